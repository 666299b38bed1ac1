package tokenizer

import (
	"regexp"
	"strings"

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
			s = n.form.String(s) // returns s itself if it is normal already
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
