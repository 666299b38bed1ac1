package grammar

// utf8Rows are the well-formed sequences of UTF-8 (Unicode's table 3-7), as ranges of bytes,
// but for ASCII only the plain characters.
var utf8Rows = [][][2]byte{
	{{0x20, 0x21}}, {{0x23, 0x5b}}, {{0x5d, 0x7e}},
	{{0xc2, 0xdf}, {0x80, 0xbf}},
	{{0xe0, 0xe0}, {0xa0, 0xbf}, {0x80, 0xbf}},
	{{0xe1, 0xec}, {0x80, 0xbf}, {0x80, 0xbf}},
	{{0xed, 0xed}, {0x80, 0x9f}, {0x80, 0xbf}},
	{{0xee, 0xef}, {0x80, 0xbf}, {0x80, 0xbf}},
	{{0xf0, 0xf0}, {0x90, 0xbf}, {0x80, 0xbf}, {0x80, 0xbf}},
	{{0xf1, 0xf3}, {0x80, 0xbf}, {0x80, 0xbf}, {0x80, 0xbf}},
	{{0xf4, 0xf4}, {0x80, 0x8f}, {0x80, 0xbf}, {0x80, 0xbf}},
}

// plainLead are the bytes that plain characters begin with.
var plainLead = func() (set byteSet) {
	for _, row := range utf8Rows {
		set.add(row[0][0], row[0][1])
	}
	return set
}()

// plainLoop finds the loop of s.
func (m *machine) plainLoop(s *state) *loop {
	m.mu.Lock()
	defer m.mu.Unlock()
	best := &loop{slice: -1}
	for _, r := range s.runs {
		if r.e.free {
			best.slice = len(plainCuts) - 1
			continue
		}
		if !m.isWide(r.e.kids[0]) {
			continue
		}
		slice := len(plainCuts) - 1
		for slice >= 0 && r.hi >= 0 && plainCuts[slice] > r.hi {
			slice--
		}
		if slice < 0 {
			continue
		}
		if slice >= firstOther {
			best.slice = max(best.slice, slice)
		}
		if r.more != nil || m.union([]*cont{r}) != s {
			continue
		}
		l := &loop{slice: slice, most: r.hi}
		if l.behind, l.more = m.counted(r, min(plainCuts[slice]-1, maxBehind)); l.behind == nil {
			continue
		}
		l.more = l.more && plainCuts[slice]-1 > maxBehind // else no token of the tails has more
		l.control = l.more || m.readsControl(l.behind)
		return l
	}
	return best
}

// maxBehind bounds the plain characters that a loop counts.
const maxBehind = 16

// counted are the states behind 0 to most plain characters that r, a repetition, reads, or up to one from
// which on r need not go on. more says that there would be others. Nil: something else reads them too.
func (m *machine) counted(r *cont, most int32) (list []*state, more bool) {
	for {
		s := m.union([]*cont{r})
		next := m.round(r)
		if s.busy || !s.staysAt(next) {
			return nil, false
		}
		list = append(list, s)
		if r.lo == 0 {
			return list, false
		}
		if int32(len(list)) > most {
			return list, true
		}
		r = next
	}
}

// readsControl says whether one of the states reads a control character.
func (m *machine) readsControl(list []*state) bool {
	var seen [256]bool // by class
	for b := range 256 {
		c := m.class[b]
		if b >= 0x20 && b != 0x7f || seen[c] {
			continue
		}
		seen[c] = true
		for _, s := range list {
			if m.stepLocked(s, c) != m.dead {
				return true
			}
		}
	}
	return false
}

// staysAt says whether r is behind all plain characters that s reads.
func (s *state) staysAt(r *cont) bool {
	for _, l := range s.leaves {
		var set byteSet
		switch l.e.kind {
		case exprBytes:
			set = l.e.set
		case exprLit:
			set.add(l.e.text[l.n], l.e.text[l.n])
		case exprAuto:
			return false
		}
		common := false
		for i := range set {
			common = common || set[i]&plainLead[i] != 0
		}
		if !common {
			continue
		}
		c := l.next
		for c != r && c.e != nil && set[0]|set[1] == 0 && continues(c.e, int(c.n)) {
			c = c.next
		}
		if c != r {
			return false
		}
	}
	return true
}

// continues says that e, from kid n on if it is a concatenation, reads nothing but bytes that
// continue a character.
func continues(e *expr, n int) bool {
	switch e.kind {
	case exprBytes:
		return e.set[0]|e.set[1]|e.set[3] == 0
	case exprCat, exprAlt:
		if e.kind == exprAlt {
			n = 0
		}
		for _, k := range e.kids[n:] {
			if !continues(k, 0) {
				return false
			}
		}
		return true
	}
	return false
}

// isWide says whether e reads each plain character, alone.
func (m *machine) isWide(e *expr) bool {
	if wide, ok := m.wide[e]; ok {
		return wide
	}
	wide := !e.calls
	if wide {
		start := m.union([]*cont{m.cons(e, m.end)})
		for _, row := range utf8Rows {
			wide = wide && m.readsAll(start, row)
		}
	}
	m.wide[e] = wide
	return wide
}

func (m *machine) readsAll(s *state, row [][2]byte) bool {
	if len(row) == 0 {
		return s.final
	}
	var seen [256]bool
	for b := int(row[0][0]); b <= int(row[0][1]); b++ {
		c := m.class[b]
		if seen[c] {
			continue
		}
		seen[c] = true
		t := m.stepLocked(s, c)
		if t == m.dead || !m.readsAll(t, row[1:]) {
			return false
		}
	}
	return true
}
