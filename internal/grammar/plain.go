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

// plainLoop is walker.loop.
func (m *machine) plainLoop(s *state) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	best := loopNone
	for _, r := range s.runs {
		if r.e.free {
			best = len(plainCuts)
			continue
		}
		if !m.isWide(r.e.kids[0]) {
			continue
		}
		if r.hi < 0 {
			if r.lo == 0 && m.union([]*cont{r}) == s && s.staysAt(r) {
				return loopEndless
			}
			best = len(plainCuts)
			continue
		}
		for i, cut := range plainCuts {
			if cut <= r.hi {
				best = max(best, i+1)
			}
		}
	}
	return best
}

// staysAt says whether all that s reads of plain characters is a round of r, which s begins with.
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
		for range 3 {
			if c == r || c.e == nil || c.e.kind != exprBytes {
				break
			}
			c = c.next
		}
		if c != r {
			return false
		}
	}
	return true
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
