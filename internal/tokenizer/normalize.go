package tokenizer

import (
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// spaceMark is the character that sentencepiece vocabularies write for a space.
const spaceMark = "▁"

// normStep is one step of a normaliser; exactly one of its parts is set.
type normStep struct {
	form    *norm.Form
	prepend string
	old     string         // with content: replace this string
	pattern *regexp.Regexp // with content: replace these matches
	content string
}

func (t *Tokenizer) normalize(s string) string {
	for _, n := range t.norm {
		switch {
		case s == "":
			return s
		case n.form != nil:
			s = normal(*n.form, s)
		case n.prepend != "":
			s = n.prepend + s
		case n.pattern != nil:
			s = n.pattern.ReplaceAllLiteralString(s, n.content)
		default:
			s = strings.ReplaceAll(s, n.old, n.content)
		}
	}
	return s
}

// joiner is what x/text inserts into runs of over 30 marks ("stream-safe" text).
const joiner = "\u034f"

// normal returns s in form, as Unicode defines it, without the joiners of x/text, on which
// no tokenizer is trained. It returns s itself if that is already normal.
func normal(form norm.Form, s string) string {
	out := form.String(s)
	if strings.Count(out, joiner) == strings.Count(s, joiner) || !utf8.ValidString(s) {
		return out
	}
	return byDefinition(form, s)
}

// byDefinition converts s to form, rune by rune.
func byDefinition(form norm.Form, s string) string {
	parts := norm.NFD
	if form == norm.NFKC || form == norm.NFKD {
		parts = norm.NFKD
	}
	var runes []rune
	for _, r := range s {
		if r < utf8.RuneSelf {
			runes = append(runes, r)
			continue
		}
		runes = append(runes, []rune(parts.String(string(r)))...)
	}
	for from := 0; from < len(runes); { // marks stand in the order of their classes
		to := from
		for to < len(runes) && markClass(runes[to]) > 0 {
			to++
		}
		slices.SortStableFunc(runes[from:to], func(a, b rune) int { return int(markClass(a)) - int(markClass(b)) })
		from = to + 1
	}
	if form == norm.NFC || form == norm.NFKC {
		runes = compose(runes)
	}
	return string(runes)
}

// markClass returns the canonical combining class; 0 for a starter.
func markClass(r rune) uint8 {
	if r < 0x300 {
		return 0
	}
	return norm.NFD.PropertiesString(string(r)).CCC()
}

// compose joins each starter with those following marks, or the one following starter, that
// form a character with it and are not separated from it by a mark of their class.
func compose(runes []rune) []rune {
	out := runes[:0]
	starter, last := -1, uint8(0)
	for _, r := range runes {
		c := markClass(r)
		if starter >= 0 && (last < c || starter == len(out)-1) {
			if both := norm.NFC.String(string([]rune{out[starter], r})); utf8.RuneCountInString(both) == 1 {
				out[starter], _ = utf8.DecodeRuneInString(both)
				continue
			}
		}
		if c == 0 {
			starter = len(out)
		}
		last = c
		out = append(out, r)
	}
	return out
}
