package pick

// Conditional disaggregation: whether a request is split at all. Computing a short rest of a
// prompt on decode saves the way over prefill, but holds up the sequences that run there. Both are
// predicted from measurements; what has not been measured yet is tried now and then.

// Reasons of Choice.Local.
const (
	LocalCost    = "cost"    // predicted to be faster
	LocalExplore = "explore" // tried, to know how long it takes
)

const (
	disturbs     = 0.05 // of a local prefill's time, charged for each sequence that runs there
	exploreEvery = 16   // one request of so many is tried while too little is known
	staleAfter   = 512  // chances until a line that was not used is tried again
)

// explorer counts chances to serve locally.
type explorer struct{ unknown, since int }

// tries reports whether this chance is used to learn.
func (e *explorer) tries(known bool) bool {
	if !known {
		e.unknown++
		return e.unknown%exploreEvery == 0
	}
	e.since++
	if e.since >= staleAfter {
		e.since = 0
		return true
	}
	return false
}

// alone looks for a decode worker that should serve the request without prefill, given the best
// pair.
func (s *scorer) alone(m *model, split pair) (pair, bool) {
	p := s.p
	if p.cfg.Disaggregate != ByCost || s.req.Local == nil || split.p == nil || split.p.n == split.d.n || len(s.req.Avoid) > 0 {
		return split, false
	}
	speaks := split.d.n.class.id.Dialect
	if !s.req.Local(speaks) {
		return split, false
	}
	var best *scored
	var cost float64
	for j, c := range m.decode {
		if c.id.Dialect != speaks {
			continue
		}
		for i := range s.dec[j].n {
			d := &s.dec[j].list[i]
			rest := s.uncached(d)
			if rest > float64(p.cfg.LocalMaxTokens) {
				continue
			}
			took := d.n.time(lineLocal, rest)
			if total := took * (1 + disturbs*d.load); best == nil || total < cost {
				best, cost = d, total
			}
		}
	}
	if best == nil {
		return split, false
	}
	remote := split.p.n.time(linePrefill, split.p.load+s.uncached(split.p)) + split.d.n.time(lineDecode, s.uncached(split.d))
	known := best.n.class.lines[lineLocal].n >= enough
	s.localMS, s.splitMS = cost*1000, remote*1000
	switch {
	case known && cost < remote:
		p.local.since = 0
		return pair{p: best, d: best, local: LocalCost}, true
	case p.local.tries(known):
		return pair{p: best, d: best, local: LocalExplore}, true
	}
	return split, false
}
