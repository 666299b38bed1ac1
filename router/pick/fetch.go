package pick

// Fetch says what workers make of a prefix that only others have: they fetch it
// from those rather than compute it. The zero value: they do not.
type Fetch struct {
	Dialect string  // of those who can
	Weight  float64 // what a fetched token is worth of one at hand, 0 to 1
	Least   int     // tokens that a fetch must save to be worth its while
}

// fetched is the part of the prompt that n need not compute because another
// worker would give it, in all: with what it has itself. 0: nobody has enough
// more. The pair's own decode counts as others do.
func (s *scorer) fetched(n *node, own float64) float64 {
	f := &s.req.Fetch
	if f.Weight == 0 || n.class.id.dialect != f.Dialect {
		return 0
	}
	best := own + float64(f.Least)/float64(max(s.req.Tokens, 1))
	out := 0.0
	for _, w := range s.warms {
		if v := f.Weight * w.share; v >= best && w.n != n && n.class.id.fetchesFrom(&w.n.class.id) {
			best, out = v, v
		}
	}
	return out
}

// fetchesFrom reports whether blocks of two classes are of the same kind, roles
// and block sizes aside.
func (a *classID) fetchesFrom(b *classID) bool {
	return a.dialect == b.dialect && a.model == b.model && a.fingerprint == b.fingerprint && a.tokenizer == b.tokenizer && a.numerics == b.numerics
}
