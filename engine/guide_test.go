package engine_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/enginetest"
	"github.com/xpyd/xpyd/kernels"
)

// walk is a guide that allows a few tokens, others behind each: an end from its least-th token on, and
// nothing but an end behind its most-th.
type walk struct {
	seed, state uint64
	n           int
	least, most int
	none        int // from so many tokens on nothing may come; 0: there is always something
	panics      int // the same, if a grammar is broken
}

func newWalk(seed uint64, least, most int) *walk {
	return &walk{seed: seed, state: seed, least: least, most: max(least, most)}
}

func (w *walk) Fork() engine.Guide {
	c := *w
	return &c
}

func (w *walk) may(id int32) bool {
	switch {
	case w.n < 0, w.none > 0 && w.n >= w.none: // it has ended
		return false
	case id == eos:
		return w.n >= w.least
	case w.n >= w.most:
		return false
	}
	return id == int32(w.state>>40)%6 || rand.New(rand.NewPCG(w.state, uint64(id))).IntN(6) == 0
}

func (w *walk) Mask(bits []uint32) {
	if w.panics > 0 && w.n >= w.panics {
		panic("broken")
	}
	for i := range bits {
		bits[i] = 0
	}
	for id := range int32(48) {
		if w.may(id) {
			bits[id/32] |= 1 << (id % 32)
		}
	}
}

// Forced implements engine.Forcer.
func (w *walk) Forced() (token int32, ok bool) {
	n := 0
	for id := range int32(48) {
		if w.may(id) {
			token = id
			n++
		}
	}
	return token, n == 1
}

func (w *walk) Accept(id int32) bool {
	switch {
	case !w.may(id):
		return false
	case id == eos:
		w.n = -1
	default:
		w.n++
		w.state = rand.New(rand.NewPCG(w.state, uint64(id))).Uint64()
	}
	return true
}

// obeys checks that a choice is as its guide wants it.
func obeys(t *testing.T, what string, w *walk, o output) {
	t.Helper()
	g := w.Fork()
	for i, id := range o.tokens {
		if !g.Accept(id) {
			t.Errorf("%s: token %d of %d, %d, is not allowed", what, i, len(o.tokens), id)
			return
		}
	}
	if n := len(o.tokens); n > 0 && (o.tokens[n-1] == eos) != (o.finish == engine.FinishStop) {
		t.Errorf("%s: ends with %d and %q", what, o.tokens[n-1], o.finish)
	}
}

// TestGuide: what may follow binds every draw, first ones and those of several choices too, with whatever
// else shapes it; an end is drawn where it may be, and once nothing else may come.
func TestGuide(t *testing.T) {
	r := newRig(t, config(), enginetest.Config{Blocks: 512}, nil)
	for name, change := range map[string]func(*engine.Request, *walk){
		"plain":      func(*engine.Request, *walk) {},
		"greedy":     func(q *engine.Request, _ *walk) { q.Temperature = 0 },
		"choices":    func(q *engine.Request, _ *walk) { q.N = 5 },
		"log probs":  func(q *engine.Request, _ *walk) { q.Logprobs = 3 },
		"prompt's":   func(q *engine.Request, _ *walk) { q.PromptLogprobs = 1 },
		"penalties":  func(q *engine.Request, _ *walk) { q.Frequency, q.Repetition = 1, 1.3 },
		"bias":       func(q *engine.Request, _ *walk) { q.Bias = []kernels.Bias{{ID: 11, Value: 100}} },
		"at once":    func(q *engine.Request, w *walk) { w.least, w.most = 0, 0 },
		"min tokens": func(q *engine.Request, w *walk) { w.least, q.MinTokens = 0, 20 },
		"too many":   func(q *engine.Request, w *walk) { q.MinTokens = 60 },
		"ignore eos": func(q *engine.Request, w *walk) { w.least, q.IgnoreEOS = 0, true },
		"length":     func(q *engine.Request, w *walk) { q.MaxTokens = 4 },
		"allowed":    func(q *engine.Request, _ *walk) { q.Allowed = []int32{0, 1, 2, 3, 4, 5, 11, 12} },
		"allowed, min": func(q *engine.Request, w *walk) {
			q.Allowed, w.least, q.MinTokens = []int32{0, 1, 2, 3, 4, 5, 40}, 0, 6
		},
		"min, ignore eos": func(q *engine.Request, w *walk) { w.least, q.MinTokens, q.IgnoreEOS = 0, 3, true },
	} {
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(6) {
				w := newWalk(seed, 5, 30)
				req := request(prompt(rng(), 5), 80)
				req.Guide, req.Seed = w, seed
				change(req, w)
				for i, o := range r.generate(req) {
					obeys(t, fmt.Sprintf("choice %d", i), w, o)
					n := len(o.tokens) - 1 // without the end
					switch {
					case req.MaxTokens == 4 && (n != 3 || o.finish != engine.FinishLength):
						t.Errorf("%d tokens, %q: want the length", n, o.finish)
					case req.MaxTokens > 4 && o.finish != engine.FinishStop:
						t.Errorf("%d tokens, %q: want an end", n, o.finish)
					case req.MaxTokens > 4 && (n > w.most || n < min(w.most, max(w.least, req.MinTokens))):
						t.Errorf("%d tokens: want %d, at least %d, at most %d", n, w.least, req.MinTokens, w.most)
					case req.MaxTokens > 4 && (req.IgnoreEOS || len(req.Allowed) > 0) && n != w.most:
						t.Errorf("%d tokens: want all %d before the end", n, w.most)
					}
					for _, id := range o.tokens {
						if len(req.Allowed) > 0 && id != eos && !slices.Contains(req.Allowed, id) {
							t.Errorf("%d is not allowed", id)
						}
					}
				}
			}
		})
	}
}

// TestGuideStops: a stop token ends what a guide allows as it ends anything.
func TestGuideStops(t *testing.T) {
	r := newRig(t, config(), enginetest.Config{Blocks: 512}, nil)
	w := newWalk(3, 10, 20)
	req := request(prompt(rng(), 5), 80)
	req.Guide = w
	free := r.generate(req)[0].tokens
	req.StopTokens = []int32{free[4]}
	o := r.generate(req)[0]
	if want := free[:slices.Index(free, free[4])+1]; !slices.Equal(o.tokens, want) || o.finish != engine.FinishStop {
		t.Errorf("%v %q, want %v", o.tokens, o.finish, want)
	}
	req.MinTokens = 8
	o = r.generate(req)[0]
	if slices.Contains(o.tokens[:8], free[4]) && !onlyThat(w, o.tokens, free[4]) {
		t.Errorf("%v has the stop token before 8 tokens, and others were allowed", o.tokens)
	}
}

// onlyThat reports whether nothing but id was allowed where it came first.
func onlyThat(w *walk, tokens []int32, id int32) bool {
	g := w.Fork().(*walk)
	for _, tok := range tokens {
		if tok == id {
			for other := range int32(48) {
				if other != id && g.may(other) {
					return false
				}
			}
			return true
		}
		g.Accept(tok)
	}
	return true
}

// TestGuideOverlaps: steps of streams that are bound are launched before the tokens are known on which
// their masks depend, if the device can wait for these; others wait for the tokens.
func TestGuideOverlaps(t *testing.T) {
	w := newWalk(1, 50, 50)
	req := request(prompt(rng(), 5), 50)
	req.Guide = w
	r, p := overlapping(t, config(), enginetest.Config{}, nil)
	got := r.generate(req)[0]
	if n, _ := p.Steps(); n != 50 || p.Overlapped() != 49 {
		t.Errorf("%d steps, %d launched while one was under way; want 50 and 49", n, p.Overlapped())
	}
	obeys(t, "overlapping", w, got)

	fake := &enginetest.Pipelined{Backend: enginetest.New(enginetest.Config{})}
	plain := newRigOn(t, config(), struct {
		kernels.Backend
		kernels.Launcher
	}{fake, launcherAlone{fake}})
	if o := plain.generate(req)[0]; !slices.Equal(o.tokens, got.tokens) || fake.Overlapped() > 0 {
		t.Errorf("%v, %d steps overlap; want %v, none", o.tokens, fake.Overlapped(), got.tokens)
	}
}

// launcherAlone hides what else a Launcher is.
type launcherAlone struct{ p *enginetest.Pipelined }

func (l launcherAlone) Launch(s *kernels.Step) error     { return l.p.Launch(s) }
func (l launcherAlone) Await() ([]kernels.Result, error) { return l.p.Await() }

// TestGuideBesideListedPrompts: a step with a prompt whose log probabilities are asked for cannot wait
// for masks; what is bound beside it gets its tokens all the same.
func TestGuideBesideListedPrompts(t *testing.T) {
	cfg := config()
	cfg.StepTokens = 24
	r := newRig(t, cfg, enginetest.Config{Blocks: 512, MaxPositions: 4096}, nil)
	var wg sync.WaitGroup
	for seed := range uint64(6) {
		req := request(prompt(rng(), 40), 60)
		if req.Seed = seed; seed%2 == 0 {
			req.Guide = newWalk(seed, 30, 50)
		} else {
			req.Prompt, req.PromptLogprobs = prompt(rng(), 400), 0
		}
		want := aloneOn(t, enginetest.New(enginetest.Config{Blocks: 512, MaxPositions: 4096}), 0, req)
		wg.Go(func() { same(t, fmt.Sprint(seed), r.generate(req), want, false) })
	}
	wg.Wait()
}

// TestDeadEnds: where no token may come a request ends with an error of its own, whether that shows before
// or behind its first token; so does one whose guide panics. Others go on.
func TestDeadEnds(t *testing.T) {
	r := newRig(t, config(), enginetest.Config{Blocks: 512}, nil)
	other := request(prompt(rng(), 5), 60)
	other.IgnoreEOS = true
	h := r.submit(other)
	for name, c := range map[string]struct {
		guide *walk
		n     int // tokens before the end
	}{
		"at once":       {&walk{least: 99, most: 0}, 0},
		"later":         {&walk{least: 99, most: 99, none: 7}, 7},
		"panics":        {&walk{least: 99, most: 99, panics: 3}, 3},
		"panics now":    {&walk{seed: 1, state: 4, least: 0, most: 99, panics: 1}, 1},
		"behind choice": {&walk{least: 99, most: 4}, 4},
	} {
		t.Run(name, func(t *testing.T) {
			req := request(prompt(rng(), 6), 50)
			req.Guide = c.guide
			out, _, err := collect(r.submit(req), 1)
			var dead *engine.GuideError
			if !errors.As(err, &dead) || dead.Position != 6+c.n || dead.Token != kernels.NoToken || len(out[0].tokens) != c.n {
				t.Errorf("%d tokens, %v; want %d and a dead end", len(out[0].tokens), err, c.n)
			}
		})
	}
	if out, _, err := collect(h, 1); err != nil || len(out[0].tokens) != 60 {
		t.Errorf("beside them: %d tokens, %v", len(out[0].tokens), err)
	}
	if n := r.metric("xpyd_engine_dead_ends_total"); n != 5 {
		t.Errorf("%v dead ends counted", n)
	}
	if err := r.Health(); err != nil {
		t.Error(err)
	}
}

// TestGivenMustObey: tokens drawn elsewhere are refused if the guide does not allow them.
func TestGivenMustObey(t *testing.T) {
	r := newRig(t, config(), enginetest.Config{Blocks: 512}, nil)
	w := newWalk(3, 10, 20)
	req := request(prompt(rng(), 5), 80)
	req.Guide = w
	tokens := r.generate(req)[0].tokens
	req.Given = []engine.Given{{Tokens: slices.Clone(tokens[:5])}}
	got, _, err := collectAfter(r.submit(req), []output{{tokens: slices.Clone(tokens[:5])}})
	if err != nil || !slices.Equal(got[0].tokens, tokens) {
		t.Errorf("%v, %v, want %v", got[0].tokens, err, tokens)
	}
	for id := range int32(48) {
		if g := w.Fork(); id != eos && !g.Accept(id) {
			req.Given[0].Tokens[0] = id
			break
		}
	}
	_, err = r.Submit(context.Background(), req)
	var bad *engine.RequestError
	if !errors.As(err, &bad) || bad.Field != "given" {
		t.Errorf("%v, want a bad request", err)
	}
}

// TestFirstMustObey: so is a first token that a prefill worker drew, once the loop sees it.
func TestFirstMustObey(t *testing.T) {
	r := newRig(t, config(), enginetest.Config{Blocks: 512}, nil)
	req := request(prompt(rng(), 5), 80)
	req.ID = "first"
	w := newWalk(3, 10, 20)
	second, ok := r.handedOver(t, req, false) // unbound there
	if !ok {
		return
	}
	second.Guide = w
	for id := range int32(48) {
		if id != eos && !w.may(id) {
			second.Prefilled.First[0].Token = id
			break
		}
	}
	_, _, err := collect(r.submit(second), 1)
	var dead *engine.GuideError
	if !errors.As(err, &dead) || dead.Position != 5 || dead.Token != second.Prefilled.First[0].Token {
		t.Errorf("%v", err)
	}
}
