package tokenizer

import (
	"slices"
	"strings"
	"unicode/utf8"
)

// decoding is the part of a decoder that depends on neighbours. What applies to single
// tokens is already in Tokenizer.texts.
type decoding struct {
	perByte   bool // one U+FFFD for each bad byte (byte fallback), else for each maximal part of a character
	strip     int  // leading spaces taken from the whole text
	dropFirst bool // Metaspace: the first token loses all its ▁
}

// Detokenizer turns a growing sequence of ids into text. What it has emitted
// never changes: it holds back a part of a character until the rest is there.
// It is not safe for concurrent use.
type Detokenizer struct {
	t       *Tokenizer
	skip    bool
	show    []int32 // special ones that are not skipped
	first   bool    // no token seen yet
	strip   int     // leading spaces still to take
	pending []byte
	store   [2 * utf8.UTFMax]byte
}

// NewDetokenizer returns a Detokenizer whose output continues prompt: the text
// begins with a space where the model means one, and a character begun by the
// prompt's last ids is completed. prompt may be nil and is not kept.
func (t *Tokenizer) NewDetokenizer(skipSpecial bool, prompt []int32) *Detokenizer {
	d := &Detokenizer{t: t, skip: skipSpecial, first: true, strip: t.dec.strip}
	d.pending = d.store[:0]
	at := d.settledAt(prompt)
	if at > 0 {
		d.first, d.strip = false, 0
	}
	for _, id := range prompt[at:] {
		d.Push(id)
	}
	return d
}

// Continue returns a Detokenizer that continues from d's state. d is unchanged.
func (d *Detokenizer) Continue(skipSpecial bool) *Detokenizer {
	c := *d
	c.skip = skipSpecial
	c.pending = append(c.store[:0], d.pending...)
	return &c
}

// Show has special ids be text although special ones are skipped: marks that somebody reads. ids is
// kept.
func (d *Detokenizer) Show(ids []int32) { d.show = ids }

// settledAt returns how many ids of a prompt need not be looked at: the last of them is
// whole characters, not all spaces, so nothing is held back after it and no space is left
// to strip, whatever came before.
func (d *Detokenizer) settledAt(prompt []int32) int {
	t := d.t
	for at := len(prompt); at > 1; at-- {
		id := prompt[at-1]
		if t.has(id, flagPresent) && !(d.skip && t.flags[id]&flagSpecial != 0) &&
			t.flags[id]&(flagUTF8|flagByte) == flagUTF8 && strings.Trim(t.texts[id], " ") != "" {
			return at
		}
	}
	return 0
}

// Push returns the text that id completes, which may be "". Unknown ids, and
// special ones if they are skipped, add nothing.
func (d *Detokenizer) Push(id int32) string {
	t := d.t
	if !t.has(id, flagPresent) || d.skip && t.flags[id]&flagSpecial != 0 && !slices.Contains(d.show, id) {
		return ""
	}
	text, flags := t.texts[id], t.flags[id]
	if t.dec.dropFirst && d.first && flags&flagByte == 0 {
		text = strings.ReplaceAll(t.pieces[id], spaceMark, "")
	}
	d.first = false
	switch {
	case len(d.pending) == 0 && flags&(flagUTF8|flagByte) == flagUTF8:
		return d.trim(text)
	case t.dec.perByte && flags&flagByte == 0:
		// A token that is text ends a run of bytes, whatever they were.
		out := appendLossy(nil, d.pending, true)
		d.pending = d.pending[:0]
		return d.trim(string(append(out, text...)))
	}
	d.pending = append(d.pending, text...)
	n := wholeLen(d.pending)
	if n == 0 {
		return ""
	}
	var out string
	if utf8.Valid(d.pending[:n]) {
		out = string(d.pending[:n])
	} else {
		out = string(appendLossy(nil, d.pending[:n], t.dec.perByte))
	}
	d.pending = append(d.pending[:0], d.pending[n:]...)
	return d.trim(out)
}

// Flush returns what was held back, as U+FFFD, once no more ids will come.
func (d *Detokenizer) Flush() string {
	out := string(appendLossy(nil, d.pending, d.t.dec.perByte))
	d.pending = d.pending[:0]
	return d.trim(out)
}

func (d *Detokenizer) trim(text string) string {
	for d.strip > 0 && text != "" {
		if text[0] != ' ' {
			d.strip = 0
			break
		}
		text = text[1:]
		d.strip--
	}
	return text
}

// wholeLen returns the length of b without a last character that more bytes
// could complete.
func wholeLen(b []byte) int {
	for i := len(b) - 1; i >= 0 && i >= len(b)-utf8.UTFMax; i-- {
		if utf8.RuneStart(b[i]) {
			if !utf8.FullRune(b[i:]) {
				return i
			}
			break
		}
	}
	return len(b)
}

// appendLossy appends b with U+FFFD for invalid UTF-8: one for each maximal part of a
// character (as the Unicode standard and Rust do), or for each byte.
func appendLossy(dst, b []byte, perByte bool) []byte {
	for len(b) > 0 {
		r, n := utf8.DecodeRune(b)
		if r == utf8.RuneError && n == 1 {
			for !perByte && n < len(b) && !utf8.FullRune(b[:n+1]) {
				n++
			}
		}
		dst = utf8.AppendRune(dst, r)
		b = b[n:]
	}
	return dst
}
