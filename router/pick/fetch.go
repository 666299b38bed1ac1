package pick

// Fetch says which workers fetch a prefix that only others have rather than compute it. The zero
// value: none.
type Fetch struct {
	Dialect string  // of the workers that can
	Weight  float64 // what a fetched token is worth of one at hand, 0 to 1
	Least   int     // tokens that a fetch must save to pay
}

// fetched returns the part of the prompt that n need not compute, counting what another worker
// (maybe the pair's own decode) would give; 0 if none has enough more.
func (s *scorer) fetched(n *node, own float64) float64 {
	f := &s.req.Fetch
	if f.Weight == 0 || n.class.id.Dialect != f.Dialect {
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

// fetchesFrom reports whether two classes have the same kind of blocks, of whatever size.
func (a *classID) fetchesFrom(b *classID) bool {
	return a.Dialect == b.Dialect && a.Model == b.Model && a.ModelFingerprint == b.ModelFingerprint &&
		a.TokenizerFingerprint == b.TokenizerFingerprint && a.Numerics == b.Numerics
}
