package pick

import (
	"cmp"
	"math"
	"slices"

	"github.com/xpyd/xpyd/internal/fleet"
)

// Explain says which candidates there were and why the pair won.
type Explain struct {
	Policy  string      `json:"policy"`
	Prefill []Candidate `json:"prefill"` // cheapest first, at most maxShown
	Decode  []Candidate `json:"decode"`
	Reason  string      `json:"reason"`
	Split   *Split      `json:"split,omitempty"` // when it was weighed
}

// Candidate is one member that was considered. Load is prompt tokens for prefill, sequences for
// decode; Cost the same or, by predicted_ttft, seconds. Match is the part of the prompt, 0 to 1,
// that it has cached, Fetch that with what it would fetch from others.
type Candidate struct {
	ID    string  `json:"id"`
	Cost  float64 `json:"cost"`
	Load  float64 `json:"load"`
	Match float64 `json:"match"`
	Fetch float64 `json:"fetch,omitempty"`
}

// Split is the decision whether decode serves the request alone, by the predicted time to the first
// token.
type Split struct {
	PairMS  float64 `json:"pair_ms"`
	LocalMS float64 `json:"local_ms"`      // with what it costs those that run there
	Why     string  `json:"why,omitempty"` // a reason of Choice.Local; "" for the pair
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

func (s *scorer) explain(won pair) *Explain {
	shown := func(list []Candidate, chosen string) []Candidate {
		slices.SortStableFunc(list, func(a, b Candidate) int {
			return cmp.Or(cmp.Compare(a.Cost, b.Cost), cmp.Compare(rank(b.ID == chosen), rank(a.ID == chosen)))
		})
		return list[:min(len(list), maxShown)]
	}
	e := &Explain{Policy: s.policy(), Prefill: shown(s.prefills, won.p.n.key.id), Decode: shown(s.decodes, won.d.n.key.id)}
	if s.localMS > 0 {
		e.Split = &Split{PairMS: round(s.splitMS), LocalMS: round(s.localMS), Why: won.local}
	}
	e.Reason = s.reason(e, won)
	return e
}

func (s *scorer) reason(e *Explain, won pair) string {
	switch policy := s.policy(); {
	case won.local == LocalMixed:
		return "one worker for all: the least predicted cost, in seconds, of all workers and pairs"
	case s.mixes() && len(s.all) > 0:
		return "the least predicted cost, in seconds, of all workers and pairs"
	case won.local == LocalCost:
		return "decode alone is predicted to be faster than the best pair"
	case won.local != "":
		return "decode alone, to learn how long that takes"
	case policy == Random || policy == PowerOfTwo:
		return "drawn at random"
	case policy == RoundRobin:
		return "least recently used"
	case s.key(policy) != 0:
		return "by its hash"
	case len(e.Prefill) == 1 && len(e.Decode) == 1:
		return "the only pair"
	case policy == PredictedTTFT:
		return "earliest predicted first token"
	case (policy == Prefix || policy == KVEvents) && won.p.share > 0:
		return "least cost, with a part of the prompt cached"
	}
	return "least cost; of equals the least recently used"
}

func round(ms float64) float64 { return math.Round(ms*1000) / 1000 }

func rank(b bool) int {
	if b {
		return 1
	}
	return 0
}
