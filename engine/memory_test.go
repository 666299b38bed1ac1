package engine_test

import (
	"errors"
	"io"
	"reflect"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/enginetest"
	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/kernels"
)

func TestBackPressure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := config()
		cfg.MaxBacklog = 3
		r := newRig(t, cfg, enginetest.Config{Blocks: 6, BlockTokens: 16}, nil)
		slow := request(prompt(rng(), 20), 40)
		slow.IgnoreEOS = true
		want := alone(t, r.MaxModelLen(), slow)
		h := r.submit(slow)
		synctest.Wait()
		if n := r.cache.Stats().Held; n != 2 {
			t.Errorf("paused, it holds %d blocks", n)
		}
		events, err := h.Next(t.Context())
		if err != nil || len(events) != 4 {
			t.Fatalf("%d events before the first read, %v", len(events), err)
		}
		synctest.Wait() // paused again; now one that needs the whole pool
		big := request(prompt(rng(), 80), 10)
		big.Seed, big.IgnoreEOS = 2, true
		same(t, "one that needs a paused one's memory", r.generate(big), alone(t, r.MaxModelLen(), big), false)
		if n := r.metric("xpyd_engine_preemptions_total"); n != 1 {
			t.Errorf("%v preemptions", n)
		}
		out := []output{{}}
		for _, ev := range events {
			out[0].tokens = append(out[0].tokens, ev.Sampled.Token)
		}
		for {
			events, err := h.Next(t.Context())
			if errors.Is(err, io.EOF) {
				break
			}
			if len(events) > 4 {
				t.Errorf("a backlog of %d", len(events))
			}
			for _, ev := range events {
				out[0].tokens, out[0].finish = append(out[0].tokens, ev.Sampled.Token), ev.Finish
			}
			synctest.Wait()
		}
		same(t, "slow reader", out, want, false)
		r.close()
	})
}

func TestPausedIsNotPreemptedForNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := config()
		cfg.MaxBacklog = 3
		r := newRig(t, cfg, enginetest.Config{Blocks: 6, BlockTokens: 16}, nil)
		outside, err := r.cache.Alloc(3, "elsewhere")
		if err != nil {
			t.Fatal(err)
		}
		slow := request(prompt(rng(), 20), 40)
		slow.IgnoreEOS = true
		paused := r.submit(slow)
		synctest.Wait()
		big := r.submit(request(prompt(rng(), 80), 1))
		synctest.Wait()
		if n := r.metric("xpyd_engine_preemptions_total"); n != 0 {
			t.Errorf("%v preemptions that did not help", n)
		}
		r.cache.Release(outside, "elsewhere") // wakes the engine
		if _, _, err := collect(big, 1); err != nil {
			t.Error(err)
		}
		paused.Cancel()
		r.close()
	})
}

func TestPreemptsYoungestAndRecomputes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		cfg := config()
		var preempted, steps, positions int // told by the loop
		cfg.Preempted, cfg.Stepped = func() { preempted++ }, func(n int) { steps, positions = steps+1, positions+n }
		r := newRig(t, cfg, enginetest.Config{Blocks: 6, BlockTokens: 16},
			func(*kernels.Step) error { <-gate; return nil })
		var handles []*engine.Handle
		var want [][]output
		random := rng()
		for range 3 {
			req := request(prompt(random, 20), 50)
			req.IgnoreEOS = true
			want = append(want, alone(t, r.MaxModelLen(), req))
			handles = append(handles, r.submit(req))
		}
		close(gate)
		for i, h := range handles {
			got, _, err := collect(h, 1)
			if err != nil {
				t.Fatal(err)
			}
			same(t, "preempted", got, want[i], false)
		}
		if n := r.metric("xpyd_engine_preemptions_total"); n == 0 {
			t.Error("nothing was preempted: the test shows nothing")
		}
		for _, h := range handles {
			r.done(h)
		}
		r.close() // the loop is over
		if n := r.metric("xpyd_engine_preemptions_total"); float64(preempted) != n || steps < 50 || positions < 3*69 {
			t.Errorf("told of %d preempted of %v, %d steps, %d positions", preempted, n, steps, positions)
		}
	})
}

// TestNewcomerWaits: running requests may need a block soon, so a newcomer that would
// take all blocks waits, rather than being preempted at once.
func TestNewcomerWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		r := newRig(t, config(), enginetest.Config{Blocks: 4, BlockTokens: 16},
			func(*kernels.Step) error { <-gate; return nil })
		running, newcomer := request(prompt(rng(), 10), 20), request(prompt(rng(), 40), 15)
		running.IgnoreEOS, newcomer.IgnoreEOS = true, true
		first := r.submit(running)
		second := r.submit(newcomer) // as many blocks as are free
		close(gate)
		for _, h := range []*engine.Handle{first, second} {
			if _, _, err := collect(h, 1); err != nil {
				t.Error(err)
			}
		}
		if n := r.metric("xpyd_engine_preemptions_total"); n != 0 {
			t.Errorf("%v preemptions", n)
		}
		r.close()
	})
}

// TestPreemptedPrompt: a prompt that is preempted halfway is computed again, and its
// log probabilities are each there once.
func TestPreemptedPrompt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		cfg := config()
		cfg.StepTokens = 4 // a prompt takes many steps
		r := newRig(t, cfg, enginetest.Config{Blocks: 15, BlockTokens: 4},
			func(*kernels.Step) error { <-gate; return nil })
		older, younger := request(prompt(rng(), 4), 30), request(prompt(rng(), 45), 3)
		older.IgnoreEOS, younger.IgnoreEOS, younger.PromptLogprobs = true, true, 1
		want, wantInfo, err := collect(newRig(t, cfg, enginetest.Config{Blocks: 64, BlockTokens: 4}, nil).submit(younger), 1)
		if err != nil {
			t.Fatal(err)
		}
		first, second := r.submit(older), r.submit(younger)
		synctest.Wait() // both are there before the older has more blocks than leave room for the other
		close(gate)
		if _, _, err := collect(first, 1); err != nil {
			t.Error(err)
		}
		got, info, err := collect(second, 1)
		if err != nil {
			t.Fatal(err)
		}
		same(t, "preempted in its prompt", got, want, false)
		if len(info.Logprobs) != len(younger.Prompt)-1 || !reflect.DeepEqual(info.Logprobs, wantInfo.Logprobs) {
			t.Errorf("%d log probabilities of %d prompt tokens, or other ones", len(info.Logprobs), len(younger.Prompt))
		}
		if n := r.metric("xpyd_engine_preemptions_total"); n == 0 {
			t.Error("nothing was preempted: the test shows nothing")
		}
		r.close()
	})
}

// TestWaitsForOthersMemory starves a running sequence of blocks that are held
// outside the engine: it pauses, and goes on when they come back.
func TestWaitsForOthersMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, config(), enginetest.Config{Blocks: 4, BlockTokens: 16}, nil)
		outside, err := r.cache.Alloc(2, "elsewhere")
		if err != nil {
			t.Fatal(err)
		}
		req := request(prompt(rng(), 20), 30)
		req.IgnoreEOS = true
		want := alone(t, r.MaxModelLen(), req)
		h := r.submit(req)
		synctest.Wait()
		events, err := h.Next(t.Context())
		if err != nil || len(events) != 13 { // positions 20..32: 32 rows, and a draw
			t.Errorf("%d events in two blocks, %v", len(events), err)
		}
		r.cache.Release(outside, "elsewhere")
		rest, err := readAll(h)
		if err != nil {
			t.Fatal(err)
		}
		var got []int32
		for _, ev := range append(events, rest...) {
			got = append(got, ev.Sampled.Token)
		}
		if !slices.Equal(got, want[0].tokens) {
			t.Errorf("got %v, want %v", got, want[0].tokens)
		}
		r.close()
	})
}

// TestRecomputeIntoIndexedBlocks covers a prompt that ends with a block which
// the prefix index has, in a pool without a block to spare.
func TestRecomputeIntoIndexedBlocks(t *testing.T) {
	r := newRig(t, config(), enginetest.Config{Blocks: 2, BlockTokens: 16, MaxPositions: 100}, nil)
	p := prompt(rng(), 31)
	r.generate(request(p, 1)) // leaves the first block cached
	blocks, n := enginetest.HoldPrefix(r.cache, p[:16], "", "d")
	if n != 16 {
		t.Fatalf("matched %d", n)
	}
	req := request(p[:16], 5)
	req.Owner, req.N = "d", 2
	req.Prefilled = &engine.Prefilled{Blocks: blocks}
	want := alone(t, r.MaxModelLen(), req)
	same(t, "recomputed", r.generate(req), want, false)
}

// TestReservationsDoNotRobTheRunning: blocks that a preemption frees go to the sequence
// that needed them, not to a waiting reservation.
func TestReservationsDoNotRobTheRunning(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		r := newRig(t, config(), enginetest.Config{Blocks: 8, BlockTokens: 16},
			func(*kernels.Step) error { <-gate; return nil })
		var handles []*engine.Handle
		random := rng()
		for range 3 { // a block each, two in the end: one more than there is
			req := request(prompt(random, 10), 30)
			req.IgnoreEOS = true
			handles = append(handles, r.submit(req))
		}
		outside, err := r.cache.Alloc(3, "elsewhere")
		if err != nil {
			t.Fatal(err)
		}
		served := make(chan error, 1)
		time.Sleep(time.Millisecond) // the reservation is younger than the requests
		go func() {
			_, _, err := r.cache.ReserveWait(t.Context(), &kvcache.Chain{}, 0, 2, "d")
			served <- err
		}()
		synctest.Wait()
		close(gate)
		for _, h := range handles {
			if _, _, err := collect(h, 1); err != nil {
				t.Error(err)
			}
		}
		if n := r.metric("xpyd_engine_preemptions_total"); n != 1 {
			t.Errorf("%v preemptions, want 1", n)
		}
		if err := <-served; err != nil {
			t.Errorf("the reservation: %v", err)
		}
		r.cache.Release(outside, "elsewhere")
		r.cache.ReleaseAll("d")
		r.close()
	})
}

// TestReservationsGetTheirTurn: blocks freed by the engine reach AllocWait.
func TestReservationsGetTheirTurn(t *testing.T) {
	r := newRig(t, config(), enginetest.Config{Blocks: 4, BlockTokens: 16}, nil)
	req := request(prompt(rng(), 40), 10)
	req.IgnoreEOS = true
	h := r.submit(req)
	ids, err := r.reserve(4, "d")
	if err != nil {
		t.Fatal(err)
	}
	r.cache.Release(ids, "d")
	if _, _, err := collect(h, 1); err != nil {
		t.Error(err)
	}
	if s := r.cache.Stats(); s.Held != 0 {
		t.Errorf("%+v", s)
	}
}
