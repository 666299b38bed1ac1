package tier

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/kernels"
)

// TestArriveBehindStep: the step is launched before the first layer is there, and
// answers as if all had been computed, whole prefixes and parts, in one chunk and
// in many.
func TestArriveBehindStep(t *testing.T) {
	for _, chunk := range []int{16, 512} {
		cfg := stepConfig()
		cfg.StepTokens, cfg.MaxStepTime = chunk, 0
		r := newStepRig(t, cfg, 64)
		for _, part := range []int{321, 160} {
			tokens := talk(uint64(chunk+part), 321)
			want := r.cold(tokens, 8)
			if part < len(tokens) { // then only its begin is to be in host memory
				if err := r.tiers.Flush(t.Context()); err != nil {
					t.Fatal(err)
				}
				r.cold(tokens[:part+1], 1)
			}
			layers := make(chan struct{})
			r.setGate(func(int) { r.await(layers) })
			h, s := r.begin(tokens, 8, nil)
			a := come(t, "the prefix's begin", s.got)
			soon(t, "it is placed on what is not there", func() bool { return h.CachedTokens() > 0 })
			if a.Move().Layers() != 0 {
				t.Error("a layer is there already")
			}
			if !a.Begun() || a.Over() || a.Upto() != part/16*16 {
				t.Errorf("begun %t, over %t, up to %d", a.Begun(), a.Over(), a.Upto())
			}
			close(layers)
			got, cached, err := read(h)
			if err != nil || !slices.Equal(got, want) || cached != part/16*16 {
				t.Errorf("chunks of %d, %d of %d tokens in host memory: %v with %d cached, want %v: %v", chunk, part, len(tokens), got, cached, want, err)
			}
			come(t, "the prefix's end", a.Done())
			if !a.Over() {
				t.Error("it is done, and not over")
			}
			if n := r.cache.Reach(new(r.chain(tokens)), len(tokens)-1); n != 320 {
				t.Errorf("%d tokens in the index", n)
			}
			r.setGate(nil)
			come(t, "the request's end", h.Done())
			r.quiet()
			r.cache.Clear()
		}
		if r.voided() != 0 {
			t.Error("right rows were dropped")
		}
		r.close()
	}
}

func (r *stepRig) chain(tokens []int32) kvcache.Chain {
	c := r.cache.NewChain("")
	c.Extend(tokens)
	return c
}

// TestArriveWrong: rows that do not match their digests never become a token, never enter
// the index, and are never pushed. Requests with right rows in the same step are
// unharmed.
func TestArriveWrong(t *testing.T) {
	for _, chunk := range []int{16, 512} {
		for _, unit := range []int{0, 7, 19} {
			for layer := range 4 {
				cfg := stepConfig()
				cfg.StepTokens, cfg.MaxStepTime = chunk, 0
				r := newStepRig(t, cfg, 128)
				tokens, other := talk(1, 401), talk(2, 100)
				want, beside := r.cold(tokens, 8), r.cold(other, 8)
				if err := r.tiers.Flush(t.Context()); err != nil {
					t.Fatal(err)
				}
				r.cold(tokens[:321], 1)
				r.spoil(tokens, unit, layer)
				h2, _ := r.begin(other, 8, nil)
				placed := make(chan struct{})
				r.setGate(func(int) { r.await(placed) })
				told := newTold(r, tokens)
				var h *engine.Handle
				if chunk == 16 {
					h, _ = r.begin(tokens, 8, func(q *engine.Request) { q.PrefillOnly, q.OnBlocks = true, told.on })
				} else {
					h, _ = r.begin(tokens, 8, nil)
				}
				soon(t, "it is placed", func() bool { return h.CachedTokens() > 0 })
				close(placed)
				got, cached, err := read(h)
				if err != nil || cached != unit*16 || !slices.Equal(got, want[:len(got)]) || len(got) == 0 {
					t.Errorf("unit %d, layer %d is wrong: %v with %d cached, want %v: %v", unit, layer, got, cached, want, err)
				}
				if chunk == 16 {
					h.Release()
					come(t, "the request's end", h.Done())
					told.check()
				}
				if out, _, err := read(h2); err != nil || !slices.Equal(out, beside) {
					t.Errorf("beside it: %v, want %v: %v", out, beside, err)
				}
				if r.voided() != 1 {
					t.Errorf("%v prefixes dropped, want 1", r.voided())
				}
				r.close()
			}
		}
	}
}

// told notes what OnBlocks hears.
type told struct {
	r      *stepRig
	tokens []int32
	mu     sync.Mutex
	times  map[[2]int]int // by layer and index
	rows   map[[2]int][]byte
}

func newTold(r *stepRig, tokens []int32) *told {
	return &told{r: r, tokens: tokens, times: make(map[[2]int]int), rows: make(map[[2]int][]byte)}
}

func (o *told) on(layer int, ready []engine.Ready) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, b := range ready {
		at := [2]int{layer, b.Index}
		o.times[at]++
		rows := make([]byte, o.r.dev.Layout().Resolve()[0].PackedBytes(b.Rows))
		o.r.dev.Gather(layer, b.Block, 0, b.Rows, rows)
		o.rows[at] = rows
	}
}

// check compares with what a request hears that computes everything.
func (o *told) check() {
	t := o.r.t
	t.Helper()
	o.r.quiet()
	o.r.cache.Clear()
	if err := o.r.tiers.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	all := newTold(o.r, o.tokens)
	h, _ := o.r.begin(o.tokens, 8, func(q *engine.Request) { q.PrefillOnly, q.OnBlocks = true, all.on })
	if _, _, err := read(h); err != nil {
		t.Fatal(err)
	}
	h.Release()
	come(t, "the request's end", h.Done())
	for at, rows := range all.rows {
		if o.times[at] != 1 || !slices.Equal(o.rows[at], rows) {
			t.Errorf("layer %d, block %d: told %d times, right rows %t", at[0], at[1], o.times[at], slices.Equal(o.rows[at], rows))
		}
	}
	if len(o.rows) != len(all.rows) {
		t.Errorf("told of %d, want %d", len(o.rows), len(all.rows))
	}
}

// TestArriveEnds: a request that is cancelled, or released (revoked), with some
// layers there leaves nothing held, and the index gets the prefix all the same.
func TestArriveEnds(t *testing.T) {
	for name, end := range map[string]func(*engine.Handle){
		"cancelled": (*engine.Handle).Cancel, "released": (*engine.Handle).Release,
	} {
		for layer := range 4 {
			r := newStepRig(t, stepConfig(), 64)
			tokens := talk(3, 321)
			want := r.cold(tokens, 4)
			reached, pass := make(chan struct{}), make(chan struct{})
			r.setGate(func(l int) {
				if l == layer {
					close(reached)
					r.await(pass)
				}
			})
			h, s := r.begin(tokens, 4, func(q *engine.Request) { q.PrefillOnly = name == "released" })
			a := come(t, "the prefix's begin", s.got)
			come(t, "the layer", reached)
			end(h)
			if len(r.cache.Holders()) == 0 {
				t.Errorf("%s at layer %d: nothing is held while blocks are written", name, layer)
			}
			close(pass)
			come(t, "the prefix's end", a.Done())
			come(t, "the request's end", h.Done())
			r.setGate(nil)
			h, again := r.begin(tokens, 4, nil)
			if got, cached, err := read(h); err != nil || len(again.got) > 0 || cached != 320 || !slices.Equal(got, want) {
				t.Errorf("%s at layer %d: then %v with %d cached, want %v: %v", name, layer, got, cached, want, err)
			}
			r.close()
		}
	}
}

// TestArriveFails: an arrival that does not begin, or ends in an error, costs the
// hit and nothing else.
func TestArriveFails(t *testing.T) {
	r := newStepRig(t, stepConfig(), 64)
	tokens := talk(4, 321)
	want := r.cold(tokens, 4)
	fault := fmt.Errorf("a fault")
	r.lose(fault)
	h, s := r.begin(tokens, 4, nil)
	a := come(t, "the prefix's begin", s.got)
	if got, cached, err := read(h); err != nil || cached != 0 || !slices.Equal(got, want) {
		t.Errorf("%v with %d cached, want %v: %v", got, cached, want, err)
	}
	come(t, "the prefix's end", a.Done())
	come(t, "the request's end", h.Done())
	r.lose(nil)
	r.quiet()
	r.cache.Clear()
	r.dev.mu.Lock()
	r.dev.fail = fault
	r.dev.mu.Unlock()
	h, s = r.begin(tokens, 4, nil)
	if got, cached, err := read(h); len(s.got) > 0 || err != nil || cached != 0 || !slices.Equal(got, want) {
		t.Errorf("%v with %d cached, want %v: %v", got, cached, want, err)
	}
	come(t, "the request's end", h.Done())
}

// TestArriveHoldsUpNobody: a request that decodes goes on while another's prefix is on
// its way; the other is let in when the prefix has come.
func TestArriveHoldsUpNobody(t *testing.T) {
	r := newStepRig(t, stepConfig(), 128)
	tokens, other := talk(5, 321), talk(6, 20)
	want := r.cold(tokens, 4)
	first, submitted := make(chan struct{}), make(chan struct{})
	var steps atomic.Int32 // of the other one, and then both
	r.model.OnStep = chain(r.model.OnStep, func(s *kernels.Step) {
		if steps.Add(1) == 10 {
			r.await(submitted) // however late that is, the other one is not at its end
		}
		if len(s.Arrivals) > 0 && len(s.Seqs) > 1 {
			for _, a := range s.Arrivals {
				if a.Layers() == 0 {
					t.Error("a step with others waits for what has not begun to come")
				}
			}
		}
	})
	busy, _ := r.begin(other, 400, nil)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := busy.Next(ctx); err != nil {
		t.Fatal(err)
	}
	r.setGate(func(layer int) {
		if layer == 0 {
			r.await(first)
		}
	})
	h, s := r.begin(tokens, 4, nil)
	close(submitted)
	a := come(t, "the prefix's begin", s.got)
	for n := 0; n < 50; { // fifty tokens while nothing comes
		events, err := busy.Next(ctx)
		if err != nil {
			t.Fatal(err)
		}
		n += len(events)
	}
	close(first)
	come(t, "the prefix's end", a.Done())
	if got, _, err := read(h); err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, want %v: %v", got, want, err)
	}
	if _, _, err := read(busy); err != nil {
		t.Error(err)
	}
}

func chain(first func(*kernels.Step) error, then func(*kernels.Step)) func(*kernels.Step) error {
	return func(s *kernels.Step) error {
		then(s)
		return first(s)
	}
}

// TestArriveRandom: many at once on a small pool, with wrong rows, cancels and
// slow layers among them: right tokens, and nothing held at the end.
func TestArriveRandom(t *testing.T) {
	r := newStepRig(t, stepConfig(), 96)
	var prompts, want [][]int32
	for i := range uint64(6) {
		prompts = append(prompts, talk(10+i, 200+int(i)*16))
		want = append(want, r.cold(prompts[i], 6))
	}
	r.setGate(func(int) {
		if rand.IntN(4) == 0 {
			time.Sleep(time.Millisecond)
		}
	})
	for round := range 25 {
		gen := rand.New(rand.NewPCG(uint64(round), 3))
		r.quiet()
		r.cache.Clear()
		for i := range prompts {
			ch := r.chain(prompts[i])
			if gen.IntN(4) == 0 && r.host.Has(ch.Name(48)) {
				r.spoil(prompts[i], 2, gen.IntN(4))
			}
		}
		var all sync.WaitGroup
		for range 6 {
			i, cancel := gen.IntN(len(prompts)), gen.IntN(4) == 0
			h, _ := r.begin(prompts[i], 6, nil)
			all.Go(func() {
				if cancel {
					h.Cancel()
				}
				got, _, err := read(h)
				if err == nil && !slices.Equal(got, want[i]) || err != nil && !errors.Is(err, engine.ErrCancelled) {
					t.Errorf("round %d, prompt %d: %v, want %v: %v", round, i, got, want[i], err)
				}
				come(t, "the request's end", h.Done())
			})
		}
		all.Wait()
	}
}

// TestArriveOnce: of several requests for one prefix, which wait for memory or come while
// it arrives, one brings it and the others find it in the index.
func TestArriveOnce(t *testing.T) {
	r := newStepRig(t, stepConfig(), 96)
	tokens := talk(7, 321)
	want := r.cold(tokens, 4)
	open := make(chan struct{})
	r.setGate(func(int) { r.await(open) })
	var all sync.WaitGroup
	var spies []spy
	for i := range 12 {
		h, s := r.begin(tokens, 4, nil)
		spies = append(spies, s)
		if i == 0 {
			s.got <- come(t, "the prefix's begin", s.got)
		}
		all.Go(func() {
			if got, cached, err := read(h); err != nil || cached != 320 || !slices.Equal(got, want) {
				t.Errorf("%v with %d cached, want %v: %v", got, cached, want, err)
			}
			come(t, "the request's end", h.Done())
		})
	}
	close(open)
	all.Wait()
	n := 0
	for _, s := range spies {
		n += len(s.got)
	}
	if n != 1 {
		t.Errorf("the prefix came %d times", n)
	}
}
