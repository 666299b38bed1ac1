package engine_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/enginetest"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/kerneltest"
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
		"wrong": func(rng *rand.Rand) engine.Drafter {
			return mistaken{draftModel(t, open(24, 4)), rand.New(rand.NewPCG(rng.Uint64(), 1))}
		},
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
				accepted += r.value("accepted_tokens_total")
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

// TestPrefixBehindDrafts: what is indexed of answers whose drafts were wrong has the rows and digests that it
// says, and whoever goes on behind it gets the tokens that it gets alone.
func TestPrefixBehindDrafts(t *testing.T) {
	open := onCPU(t)
	for seed := range uint64(6) {
		rng := rand.New(rand.NewPCG(seed, 43))
		cfg := config()
		cfg.Speculation = engine.Speculation{Drafter: mistaken{draftModel(t, open(128, 16)), rand.New(rand.NewPCG(seed, 44))}, Depth: 5, Fixed: true}
		size := []int{4, 16}[seed%2]
		r := newRigOn(t, cfg, open(64, size))
		first := request(prompt(rng, 20+rng.IntN(20)), 90)
		first.Seed, first.IgnoreEOS = seed, true
		out := r.generate(first)
		whole := slices.Concat(first.Prompt, out[0].tokens)
		ids, n := enginetest.HoldPrefix(r.cache, whole, "", "test")
		if n < len(whole)-2*16 {
			t.Errorf("seed %d: %d of %d tokens are indexed", seed, n, len(whole))
		}
		for i, id := range ids {
			kerneltest.DigestsMatch(t, r.backend, id, i*size, size)
		}
		r.cache.Release(ids, "test")
		second := request(slices.Concat(whole[:n], prompt(rng, 3)), 30)
		second.Seed = seed
		want := aloneOn(t, open(64, 16), r.MaxModelLen(), second)
		got, info, err := collect(r.submit(second), 1)
		if err != nil || info == nil || info.CachedTokens != n {
			t.Errorf("seed %d: %+v, %v: want %d tokens from the index", seed, info, err, n)
		}
		same(t, fmt.Sprintf("seed %d", seed), got, want, false)
		if wrong := r.value("drafted_tokens_total") - r.value("accepted_tokens_total"); wrong < 10 {
			t.Errorf("seed %d: %v drafts were wrong: the test tests nothing", seed, wrong)
		}
		r.close()
	}
}

// TestDraftModel: it draws what the engine would, goes on where it was, and when its pool is full has those
// lose their rows that were asked about longest ago.
func TestDraftModel(t *testing.T) {
	if _, err := engine.NewDraftModel(fakes(8, 16), 49); err == nil {
		t.Error("another vocabulary is taken")
	}
	fake := enginetest.New(enginetest.Config{Blocks: 7, BlockTokens: 8})
	rows := 0
	fake.OnStep = func(s *kernels.Step) error {
		for i := range s.Seqs {
			rows += len(s.Seqs[i].Tokens)
		}
		return nil
	}
	m := draftModel(t, fake)
	texts := [][]int32{}
	for i := range 4 { // three of them fit
		req := request(prompt(rand.New(rand.NewPCG(uint64(i), 1)), 10), 12)
		req.Seed = uint64(i)
		texts = append(texts, slices.Concat(req.Prompt, alone(t, 512, req)[0].tokens))
	}
	ask := func(i, from, most int) []int32 {
		asks := []engine.Ask{{ID: uint64(i + 1), Tokens: texts[i][:from], Most: most,
			Sample: kernels.Sample{Seed: uint64(i), Position: from, Temperature: 1, TopP: 1, Repetition: 1, Logprobs: -1}}}
		m.Draft(asks)
		return asks[0].Drafts
	}
	for _, c := range []struct{ text, from, most, rows int }{
		{0, 12, 3, 12 + 2}, // all of it, and two behind the first guess
		{0, 14, 3, 1 + 2},  // the last for its logits
		{0, 13, 2, 1 + 1},  // a step back
		{1, 12, 3, 14}, {2, 12, 3, 14},
		{3, 12, 3, 14}, // and the first is gone
		{0, 14, 3, 16},
	} {
		rows = 0
		if got, want := ask(c.text, c.from, c.most), texts[c.text][c.from:][:c.most]; !slices.Equal(got, want) {
			t.Errorf("%+v: guessed %v, want %v", c, got, want)
		}
		if rows != c.rows {
			t.Errorf("%+v: %d rows", c, rows)
		}
	}
	if got := ask(0, len(texts[0]), 500); len(got) > 0 {
		t.Errorf("%d guesses beyond the context", len(got))
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
		drafted, accepted := r.value("drafted_tokens_total"), r.value("accepted_tokens_total")
		if drafted != accepted {
			t.Errorf("seed %d: %v of %v forced tokens were right", seed, accepted, drafted)
		}
		if steps, _ := r.fake().Steps(); !pipelined && steps != len(want[0].tokens)-int(accepted) {
			t.Errorf("seed %d: %d steps for %d tokens of which %v were forced", seed, steps, len(want[0].tokens), accepted)
		}
	}
}

// TestDrafterFails: a Drafter that fails is left alone, and nobody loses a token.
func TestDrafterFails(t *testing.T) {
	fake := enginetest.New(enginetest.Config{Blocks: 64})
	fake.OnStep = func(s *kernels.Step) error {
		if s.Seqs[0].Pos > 30 {
			return errors.New("broken")
		}
		return nil
	}
	cfg := config()
	cfg.Speculation = engine.Speculation{Drafter: draftModel(t, fake), Depth: 3, Fixed: true}
	r := newRig(t, cfg, enginetest.Config{Blocks: 64}, nil)
	for seed := range uint64(2) {
		req := request(prompt(rng(), 20), 60)
		req.Seed, req.IgnoreEOS = seed, true
		same(t, fmt.Sprint(seed), r.generate(req), alone(t, 512, req), false)
	}
	r.close()
	if n := strings.Count(r.log.String(), "no more drafts"); n != 1 || r.value("accepted_tokens_total") == 0 {
		t.Errorf("%d complaints, %v drafts were right:\n%s", n, r.value("accepted_tokens_total"), r.log.String())
	}
}

// value sums a counter of the engine's over its labels; 0: nobody has counted.
func (r *rig) value(name string) (sum float64) {
	r.t.Helper()
	families, err := r.reg.Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == "xpyd_engine_"+name {
			for _, m := range f.GetMetric() {
				sum += m.GetCounter().GetValue()
			}
		}
	}
	return sum
}
