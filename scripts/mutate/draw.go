package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
)

// mutant is one bug. Its id depends on what it is, not on its line, so that lines added above
// do not change it.
type mutant struct {
	ID      string `json:"id"`
	Package string `json:"package"` // its folder
	File    string `json:"file"`
	Line    int    `json:"line"`
	Func    string `json:"func,omitempty"`
	Kind    string `json:"kind"`
	Nth     int    `json:"nth"`    // among those in the function that look alike, from 1
	Before  string `json:"before"` // the lines that differ, unindented
	After   string `json:"after"`

	source *source
	edit   edit
}

func (x *mutant) String() string {
	line := func(text string) string {
		const most = 100
		if text, _, _ = strings.Cut(text, "\n"); len(text) > most {
			text = text[:most] + "…"
		}
		return text
	}
	return fmt.Sprintf("%s %s:%d %s: %s → %s", x.ID, x.File, x.Line, x.Kind, line(x.Before), line(x.After))
}

// what identifies a mutant.
func (x *mutant) what() string {
	return strings.Join([]string{x.File, x.Func, x.Kind, strconv.Itoa(x.Nth), x.Before, x.After}, "\x00")
}

// text is the file with the bug in it.
func (x *mutant) text() []byte {
	t := x.source.text
	return slices.Concat(t[:x.edit.from], []byte(x.edit.text), t[x.edit.to:])
}

// mutants returns all mutants of a source, including those that do not compile.
func mutants(m *module, u *unit, s *source) []*mutant {
	seen := map[string]bool{}
	var list []*mutant
	for _, e := range find(m, u, s) {
		from, to := bytes.LastIndexByte(s.text[:e.from], '\n')+1, len(s.text)
		if n := bytes.IndexByte(s.text[e.to:], '\n'); n >= 0 {
			to = e.to + n
		}
		head, tail := string(s.text[from:e.from]), string(s.text[e.to:to])
		x := &mutant{Package: u.folder, File: s.name, Line: 1 + strings.Count(string(s.text[:e.from]), "\n"), Func: e.fn, Kind: e.kind,
			Before: trimmed(string(s.text[from:to])), After: trimmed(head + e.text + tail), source: s, edit: e}
		for x.Nth = 1; seen[x.what()]; {
			x.Nth++
		}
		seen[x.what()] = true
		sum := sha256.Sum256([]byte(x.what()))
		x.ID = hex.EncodeToString(sum[:4])
		list = append(list, x)
	}
	return list
}

func trimmed(text string) string {
	lines := strings.Split(text, "\n")
	for i := range lines {
		lines[i] = strings.TrimSpace(lines[i])
	}
	return strings.Join(lines, "\n")
}

// deck has the mutants of one package by kind, to draw from.
type deck struct {
	u     *unit
	kinds [][]*mutant
}

func newDeck(m *module, u *unit) *deck {
	d := &deck{u: u}
	by := map[string][]*mutant{}
	for _, s := range u.files {
		if s.fixed {
			continue
		}
		for _, x := range mutants(m, u, s) {
			by[x.Kind] = append(by[x.Kind], x)
		}
	}
	for _, kind := range kinds {
		if len(by[kind]) > 0 {
			d.kinds = append(d.kinds, by[kind])
		}
	}
	return d
}

// draw takes a mutant that compiles out of the deck, or returns nil. It draws the kind first, so
// that rare kinds come as often as others.
func (d *deck) draw(m *module, r *rand.Rand) *mutant {
	for len(d.kinds) > 0 {
		k := r.IntN(len(d.kinds))
		list := d.kinds[k]
		i := r.IntN(len(list))
		x := list[i]
		list[i] = list[len(list)-1]
		if d.kinds[k] = list[:len(list)-1]; len(d.kinds[k]) == 0 {
			d.kinds = slices.Delete(d.kinds, k, k+1)
		}
		if m.compiles(d.u, x.source, x.text()) {
			return x
		}
	}
	return nil
}

// draw returns n mutants, evenly from all packages.
func draw(m *module, units []*unit, seed uint64, n int) []*mutant {
	r := rand.New(rand.NewPCG(seed, 0))
	var decks []*deck
	for _, u := range units {
		decks = append(decks, newDeck(m, u))
	}
	var list []*mutant
	for len(list) < n && len(decks) > 0 {
		r.Shuffle(len(decks), func(i, j int) { decks[i], decks[j] = decks[j], decks[i] })
		decks = slices.DeleteFunc(decks, func(d *deck) bool {
			if len(list) == n {
				return false
			}
			x := d.draw(m, r)
			if x != nil {
				list = append(list, x)
			}
			return x == nil
		})
	}
	return list
}
