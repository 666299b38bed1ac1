package tokenizer

import (
	"strings"
)

// A cutter cuts the first piece off a non-empty s: n is its length in bytes, at least 1,
// and match reports whether it is a match of the pattern or the text between two matches.
type cutter func(s string) (n int, match bool)

// behavior is what a Split pre-tokenizer does with the matches of its pattern.
type behavior uint8

const (
	isolated behavior = iota // every match is a piece, and everything between
	removed
	contiguous // neighbouring matches are one piece
	mergedWithPrevious
	mergedWithNext
)

// spacePrefix is when a step puts its mark before a text that lacks it.
type spacePrefix uint8

const (
	prefixNever spacePrefix = iota
	prefixAlways
	prefixFirst // only before the very beginning of the whole text
)

// splitStep is one step of a pre-tokenizer: first the prefix, then the cut.
type splitStep struct {
	mark   string // "" or what a space is written as, from here on
	prefix spacePrefix
	cut    cutter // nil: no cut
	mode   behavior
	invert bool
}

// encoder carries the state of one Encode.
type encoder struct {
	t   *Tokenizer
	out []int32
	sc  scratch
}

// split runs s through the steps and encodes every piece. start reports whether s begins
// the whole text.
func (e *encoder) split(s string, steps []splitStep, start bool) {
	if s == "" {
		return
	}
	if len(steps) == 0 {
		e.out = e.t.model.encode(e.out, s, &e.sc)
		return
	}
	st, rest := &steps[0], steps[1:]
	if st.mark != "" {
		if st.mark != " " {
			s = strings.ReplaceAll(s, " ", st.mark)
		}
		if (st.prefix == prefixAlways || st.prefix == prefixFirst && start) && !strings.HasPrefix(s, st.mark) {
			s = st.mark + s
		}
	}
	if st.cut == nil {
		e.split(s, rest, start)
		return
	}
	if st.mode == isolated {
		for i := 0; i < len(s); {
			n, _ := st.cut(s[i:])
			e.split(s[i:i+n], rest, start && i == 0)
			i += n
		}
		return
	}
	// piece s[from:at] is complete once it is known not to grow.
	from, at, last := 0, 0, false
	emit := func() {
		if from < at {
			e.split(s[from:at], rest, start && from == 0)
		}
		from = at
	}
	for at < len(s) {
		n, match := st.cut(s[at:])
		match = match != st.invert
		switch st.mode {
		case removed:
			emit()
			if match {
				from = at + n
			}
		case contiguous:
			if match != last {
				emit()
			}
		case mergedWithPrevious: // a match joins the piece before it, unless that ends in a match
			if !match || last {
				emit()
			}
		case mergedWithNext:
			if match || !last {
				emit()
			}
		}
		at += n
		last = match
	}
	emit()
}
