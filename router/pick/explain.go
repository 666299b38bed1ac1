package pick

import (
	"cmp"
	"slices"

	"github.com/xpyd/xpyd/internal/fleet"
)

// Explain says which candidates there were and why the pair won.
type Explain struct {
	Policy  string      `json:"policy"`
	Prefill []Candidate `json:"prefill"` // cheapest first, at most maxShown
	Decode  []Candidate `json:"decode"`
	Reason  string      `json:"reason"`
}

// Candidate is one member that was considered. Cost and Load are prompt tokens
// for prefill, sequences for decode; Match is the part of the prompt, 0 to 1,
// that it has probably cached.
type Candidate struct {
	ID    string  `json:"id"`
	Cost  float64 `json:"cost"`
	Load  float64 `json:"load"`
	Match float64 `json:"match"`
}

const maxShown = 8

func (s *scorer) note(role fleet.Role, c Candidate) {
	list := &s.prefills
	if role == fleet.Decode {
		list = &s.decodes
	}
	if !slices.ContainsFunc(*list, func(o Candidate) bool { return o.ID == c.ID }) {
		*list = append(*list, c)
	}
}

func (s *scorer) explain(p, d *node) *Explain {
	shown := func(list []Candidate, chosen string) []Candidate {
		slices.SortStableFunc(list, func(a, b Candidate) int {
			return cmp.Or(cmp.Compare(a.Cost, b.Cost), cmp.Compare(rank(b.ID == chosen), rank(a.ID == chosen)))
		})
		return list[:min(len(list), maxShown)]
	}
	e := &Explain{Policy: s.p.policy, Prefill: shown(s.prefills, p.key.id), Decode: shown(s.decodes, d.key.id)}
	switch share := s.share(p, fleet.Prefill); {
	case s.p.policy == Random || s.p.policy == PowerOfTwo:
		e.Reason = "drawn at random"
	case s.p.policy == RoundRobin:
		e.Reason = "least recently used"
	case len(e.Prefill) == 1 && len(e.Decode) == 1:
		e.Reason = "the only pair"
	case s.p.policy == Prefix && share > 0:
		e.Reason = "least cost, with a part of the prompt cached"
	default:
		e.Reason = "least cost; of equals the least recently used"
	}
	return e
}

func rank(b bool) int {
	if b {
		return 1
	}
	return 0
}
