package engine_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/enginetest"
	"github.com/xpyd/xpyd/kernels"
)

// mistaken is a Drafter some of whose guesses another one's are made wrong.
type mistaken struct {
	engine.Drafter
	rng *rand.Rand
}

func (m mistaken) Draft(asks []engine.Ask) {
	m.Drafter.Draft(asks)
	for i := range asks {
		for j := range asks[i].Drafts {
			if m.rng.IntN(4) == 0 {
				asks[i].Drafts[j] = m.rng.Int32N(48)
			}
		}
	}
}

// guessing is some way to speculate: drafts that are often right, often wrong, rare, or none.
func guessing(t *testing.T, rng *rand.Rand, open backends) engine.Speculation {
	t.Helper()
	s := engine.Speculation{Depth: 1 + rng.IntN(6), Fixed: rng.IntN(4) > 0}
	switch rng.IntN(4) {
	case 0:
		s.Drafter = engine.Lookup{}
	case 1:
		s.Drafter = mistaken{draftModel(t, open(24, 8)), rng}
	case 2:
		s.Drafter = draftModel(t, open(64, 16))
	}
	return s
}

func draftModel(t testing.TB, b kernels.Backend) *engine.DraftModel {
	t.Helper()
	m, err := engine.NewDraftModel(b, 48)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// drafters make the Drafter of each kind on a backend.
func drafters(t *testing.T, open backends) map[string]func(rng *rand.Rand) engine.Drafter {
	return map[string]func(*rand.Rand) engine.Drafter{
		"ngram": func(*rand.Rand) engine.Drafter { return engine.Lookup{} },
		"draft": func(*rand.Rand) engine.Drafter { return draftModel(t, open(256, 16)) },
		"wrong": func(rng *rand.Rand) engine.Drafter { return mistaken{draftModel(t, open(24, 4)), rng} },
	}
}

// TestSameTokensWithDrafts: 500 random requests of each kind of draft, greedy and drawn, bound and
// penalised, of several choices, cancelled and handed over, get the tokens that they get without.
func TestSameTokensWithDrafts(t *testing.T) {
	const each = 10 // requests of an engine
	rounds := 500 / each
	if testing.Short() {
		rounds = 6
	}
	for kind, drafter := range drafters(t, fakes) {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			accepted := 0.0
			for seed := range uint64(rounds) {
				rng := rand.New(rand.NewPCG(seed, 41))
				cfg := config()
				cfg.MaxRunning, cfg.StepTokens = 1+rng.IntN(8), 32+rng.IntN(80)
				cfg.MaxBacklog = []int{1, 3, 1000}[rng.IntN(3)]
				cfg.RetractEvery = []int{0, 0, 19}[rng.IntN(3)]
				cfg.Speculation = engine.Speculation{Drafter: drafter(rng), Depth: 1 + rng.IntN(6), Fixed: true}
				bt := []int{1, 3, 4, 16}[rng.IntN(4)]
				r := newRigOn(t, cfg, fakes(max(300/bt, 3), bt))
				stems := [][]int32{prompt(rng, 64), prompt(rng, 48)}
				var wait []func()
				for i := range each {
					req := randomRequest(rng, r.MaxModelLen(), stems)
					req.ID = fmt.Sprint(i)
					if kind == "ngram" && i%2 == 0 { // few tokens repeat themselves
						req.Allowed, req.BadWords, req.MinTokens, req.Guide = []int32{3, 4, eos}, nil, 0, nil
					}
					want := alone(t, r.MaxModelLen(), req)
					fate, cut, done := rng.IntN(6), rng.IntN(8), make(chan struct{})
					go func() {
						defer close(done)
						r.live(t, req, want, fate, cut)
					}()
					wait = append(wait, func() { <-done })
				}
				for _, w := range wait {
					w()
				}
				accepted += value(t, r.reg, "xpyd_engine_accepted_tokens_total")
				r.cache.Clear()
				if s := r.cache.Stats(); s.Free != s.Blocks {
					t.Errorf("seed %d: not all free at the end: %+v", seed, s)
				}
				r.close()
			}
			if accepted < float64(rounds) {
				t.Errorf("%v drafts were right: the test tests nothing", accepted)
			}
		})
	}
}

// TestForcedTokens: tokens that a guide forces are drafts that are always right, and take no steps.
func TestForcedTokens(t *testing.T) {
	for seed := range uint64(20) {
		r := newRig(t, config(), enginetest.Config{Blocks: 512}, nil)
		req := request(prompt(rng(), 5), 80)
		req.Guide, req.Seed = newWalk(seed, 5, 60), seed
		want := alone(t, 512, req)
		same(t, fmt.Sprint(seed), r.generate(req), want, false)
		drafted, accepted := value(t, r.reg, "xpyd_engine_drafted_tokens_total"), value(t, r.reg, "xpyd_engine_accepted_tokens_total")
		if drafted != accepted {
			t.Errorf("seed %d: %v of %v forced tokens were right", seed, accepted, drafted)
		}
		if steps, _ := r.fake().Steps(); !pipelined && steps != len(want[0].tokens)-int(accepted) {
			t.Errorf("seed %d: %d steps for %d tokens of which %v were forced", seed, steps, len(want[0].tokens), accepted)
		}
	}
}

// value sums a counter over its labels.
func value(t *testing.T, reg *prometheus.Registry, name string) (sum float64) {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == name {
			for _, m := range f.GetMetric() {
				sum += m.GetCounter().GetValue()
			}
		}
	}
	return sum
}
