package prefill_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/enginetest"
	"github.com/xpyd/xpyd/engine/handoff"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/prefill"
)

// cached is a ticket for the cached beginning of a prompt.
func cached(prompt []int32, have ...int) kvconn.TicketSpec {
	s := spec(prompt)
	s.First = order(func(o *handoff.Order) { o.N, o.Of, o.Cached, o.Salt = 0, 0, true, "salt" })
	s.Have = make([]bool, len(s.Dest))
	for _, i := range have {
		s.Have[i] = true
	}
	return s
}

// stuck is a sink that takes nothing until it is opened.
type stuck struct{ open chan struct{} }

func (s stuck) Store(int, int32, int, int, int, []byte, []uint64) error { <-s.open; return nil }

// TestGive: a ticket for cached blocks gets those that the receiver lacks, nothing is computed, and
// they are held for as long as they are read and no longer.
func TestGive(t *testing.T) {
	p := tokens(3, 32)
	var asked []prefill.Asked
	var table []int32
	var refuse error
	var held, given atomic.Int32
	config := func(c *prefill.Config) {
		c.GiveTime = 5 * time.Second
		c.Give = func(_ context.Context, a prefill.Asked) ([]int32, func(), error) {
			if asked = append(asked, a); refuse != nil {
				return nil, nil, refuse
			}
			held.Add(1)
			given.Add(1)
			return table, func() { held.Add(-1) }, nil
		}
	}
	bubble(t, config, nil, func(r *rig) {
		r.alone(&engine.Request{ID: "plain", Prompt: append(slices.Clone(p), 9), N: 1, MaxTokens: 1, Logprobs: -1, PromptLogprobs: -1})
		var n int
		if table, n = enginetest.HoldPrefix(r.cache, p, "", "test"); n != 32 {
			r.t.Fatalf("%d tokens are cached", n)
		}
		defer r.cache.Release(table, "test")
		steps, _ := r.backend.Steps()

		s := cached(p, 1)
		if c, err := r.send(s).Wait(r.t.Context()); err != nil || len(c.Payload) != 0 || c.Units != 7*2 {
			r.t.Errorf("%+v, %v", c, err)
		}
		buf := make([]byte, r.backend.Layout().Resolve()[0].PackedBytes(4))
		for i := range s.Dest {
			has := i != 1
			for layer := range 2 {
				r.backend.Gather(layer, table[i], 0, 4, buf)
				if got, ok := s.Sink.(*sink).rows[[2]int{layer, i}]; ok != has || ok && got != string(buf) {
					r.t.Errorf("layer %d block %d: arrived %t, as it is here %t", layer, i, ok, got == string(buf))
				}
			}
		}
		synctest.Wait()
		want := prefill.Asked{Peer: kvconn.PeerID{ID: "decode-0", Epoch: 1}, Salt: "salt", Blocks: 7, Bytes: 7 * int64(r.backend.Layout().BlockBytes())}
		if got := asked[0]; got.Peer != want.Peer || got.Salt != want.Salt || got.Blocks != want.Blocks || got.Bytes != want.Bytes || !slices.Equal(got.Tokens, p) {
			r.t.Errorf("asked %+v, want %+v", got, want)
		}
		if held.Load() != 0 || given.Load() != 1 {
			r.t.Errorf("%d held of %d", held.Load(), given.Load())
		}

		for _, c := range []struct {
			err  error
			want ticket.Outcome
		}{{prefill.ErrNotCached, ticket.Refused}, {prefill.ErrGivesEnough, ticket.NoSpace}, {errors.New("broken"), ticket.Dead}} {
			refuse = c.err
			r.gets(r.send(cached(p)), c.want, c.err.Error())
		}
		refuse = nil

		slow := cached(p)
		hold := stuck{make(chan struct{})}
		slow.Sink = hold
		began, in := time.Now(), r.send(slow)
		synctest.Wait()
		if held.Load() != 1 {
			r.t.Errorf("%d held while they are read", held.Load())
		}
		time.AfterFunc(6*time.Second, func() { close(hold.open) })
		r.gets(in, ticket.Late, "not taken within 5s")
		if d := time.Since(began); d < 5*time.Second || d > 6*time.Second {
			r.t.Errorf("late after %v", d)
		}
		time.Sleep(2 * time.Second)
		if held.Load() != 0 {
			r.t.Errorf("%d held", held.Load())
		}
		if now, _ := r.backend.Steps(); now != steps {
			r.t.Errorf("%d steps ran", now-steps)
		}
	})
	bubble(t, nil, nil, func(r *rig) { r.gets(r.send(cached(p)), ticket.Refused, "not cached here") })
}

// TestGiveOneLayer: what a receiver has is not counted, however few layers there are.
func TestGiveOneLayer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var asked prefill.Asked
		r := newRigOf(t, 1, func(c *prefill.Config) {
			c.Give = func(_ context.Context, a prefill.Asked) ([]int32, func(), error) {
				asked = a
				return nil, nil, prefill.ErrNotCached
			}
		}, nil)
		r.gets(r.send(cached(tokens(3, 32), 1, 2)), ticket.Refused, "not cached here")
		if asked.Blocks != 6 || asked.Bytes != 6*int64(r.backend.Layout().BlockBytes()) {
			t.Errorf("%d blocks of %d bytes", asked.Blocks, asked.Bytes)
		}
		r.empty()
		r.close()
	})
}

// TestGoneBefore: nothing is looked for, computed or held for a ticket that ended before it was
// looked at.
func TestGoneBefore(t *testing.T) {
	bubble(t, func(c *prefill.Config) {
		c.Warm = func(context.Context, prefill.Wanted) engine.Source {
			t.Error("looked for")
			return nil
		}
	}, nil, func(r *rig) {
		r.slow = make(chan struct{})
		s := spec(tokens(1, 8))
		in := r.send(s)
		if err := in.Revoke(r.t.Context()); err != nil {
			r.t.Fatal(err)
		}
		synctest.Wait() // it is heard
		close(r.slow)
		if rep := r.Await(r.t.Context(), s.Link); rep.Outcome != ticket.Cancelled {
			r.t.Errorf("%+v", rep)
		}
		if n, _ := r.backend.Steps(); n != 0 {
			r.t.Errorf("%d steps ran", n)
		}
	})
}

// TestWarm: a prompt is looked for in the lower tiers with what is known of it, unless all of it is
// to be computed, and its first tokens are told, unless it is a router's probe.
func TestWarm(t *testing.T) {
	p := tokens(3, 12)
	var wanted []prefill.Wanted
	ran := 0
	bubble(t, func(c *prefill.Config) {
		c.Warm = func(_ context.Context, w prefill.Wanted) engine.Source { wanted = append(wanted, w); return nil }
		c.Ran = func(info *engine.PromptInfo, choices int, took time.Duration) {
			if ran++; info.Tokens != 12 || choices != 2 || took < 0 || took > time.Second {
				t.Errorf("ran %+v, %d choices, %v", info, choices, took)
			}
		}
	}, nil, func(r *rig) {
		peers := []ticket.Peer{{ID: "a", Epoch: 1, KV: "h:1", Tokens: 4}}
		f := func(warm, runs int, change func(*handoff.Order)) {
			r.t.Helper()
			s := spec(p)
			s.First = order(func(o *handoff.Order) { o.N, o.Salt, o.Peers = 2, "s", peers; change(o) })
			wanted, ran = nil, 0
			if _, err := r.send(s).Wait(r.t.Context()); err != nil {
				r.t.Error(err)
			}
			if len(wanted) != warm || ran != runs {
				r.t.Errorf("looked for %+v, ran %d; want %d and %d", wanted, ran, warm, runs)
			}
			for _, w := range wanted {
				if w.RequestID != "r" || w.Salt != "s" || !slices.Equal(w.Tokens, p) || len(w.Peers) != 1 {
					r.t.Errorf("looked for %+v", w)
				}
			}
		}
		f(1, 1, func(*handoff.Order) {})
		f(0, 1, func(o *handoff.Order) { o.PromptLogprobs = 0 })
		f(1, 0, func(o *handoff.Order) { o.Urgent = true })

		wanted, ran = nil, 0
		for _, logprobs := range []int{-1, 0} {
			q := &engine.Request{ID: "keep", Prompt: p, N: 2, Salt: "s", Logprobs: -1, PromptLogprobs: logprobs}
			k, err := r.Keep(r.t.Context(), q, "")
			if err != nil || len(k.First) != 2 {
				r.t.Fatalf("%+v, %v", k, err)
			}
			c := claim(k.ID, p)
			c.First = order(func(o *handoff.Order) { o.Salt = "s" })
			if _, err := r.send(c).Wait(r.t.Context()); err != nil {
				r.t.Error(err)
			}
		}
		if len(wanted) != 1 || wanted[0].RequestID != "keep" || wanted[0].Salt != "s" || len(wanted[0].Tokens) != 12 || ran != 2 {
			r.t.Errorf("looked for %+v, ran %d", wanted, ran)
		}
	})
}

// TestIdleGivesUp: who waits for the last lease may leave, and is told of how many.
func TestIdleGivesUp(t *testing.T) {
	p := tokens(4, 10)
	bubble(t, nil, nil, func(r *rig) {
		for range 2 {
			if _, err := r.keep("", p); err != nil {
				r.t.Fatal(err)
			}
		}
		ctx, cancel := context.WithTimeout(r.t.Context(), 29*time.Second)
		defer cancel()
		if err := r.Idle(ctx); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "2 leases") {
			r.t.Error(err)
		}
		if err := r.Idle(r.t.Context()); err != nil { // they end by themselves
			r.t.Error(err)
		}
	})
}

// TestLedger: what is held shows as what it waits for.
func TestLedger(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		onStep, release := hold()
		r := newRig(t, nil, onStep)
		f := func(want ...string) {
			t.Helper()
			synctest.Wait()
			var got []string
			for _, e := range r.Ledger() {
				got = append(got, e.Kind+" "+e.ID)
				if !e.Since.Equal(time.Now()) || e.Why == "" {
					t.Errorf("%+v", e)
				}
			}
			slices.Sort(got)
			if slices.Sort(want); !slices.Equal(got, want) {
				t.Errorf("have %q, want %q", got, want)
			}
		}
		f()
		s := spec(tokens(1, 8))
		in := r.send(s)
		f("linked " + s.Link.String())
		leg := make(chan prefill.Report, 1)
		go func() { leg <- r.Await(t.Context(), s.Link) }()
		f("awaited " + s.Link.String())
		if rep := r.Await(t.Context(), s.Link); rep.Outcome != ticket.Refused || !strings.Contains(rep.Message, "a leg already") {
			t.Errorf("a second leg: %+v", rep)
		}
		early := r.send(claim(prefill.EarlyClaim+"1", tokens(2, 8)))
		f("awaited "+s.Link.String(), "claimed "+prefill.EarlyClaim+"1")
		kept := make(chan error, 1)
		go func() { _, err := r.keep(prefill.EarlyClaim+"1", tokens(2, 8)); kept <- err }()
		f("awaited "+s.Link.String(), "leasing "+prefill.EarlyClaim+"1")
		release()
		r.gets(in, ticket.Done, "")
		r.gets(early, ticket.Done, "")
		if rep, err := <-leg, <-kept; rep.Outcome != ticket.Done || err != nil {
			t.Errorf("%+v, %v", rep, err)
		}
		f()
		r.empty()
		r.close()
	})
}

// TestCloseWithPrompts: Close ends what runs, tells both sides, and leaves nothing behind.
func TestCloseWithPrompts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		onStep, release := hold()
		r := newRig(t, nil, onStep)
		s := spec(tokens(1, 8))
		leg, kept := make(chan prefill.Report, 1), make(chan error, 1)
		go func() { leg <- r.Await(t.Context(), s.Link) }()
		in := r.send(s)
		go func() { _, err := r.keep("lease", tokens(2, 8)); kept <- err }()
		synctest.Wait()
		r.Close()
		if rep := <-leg; rep.Outcome != ticket.Cancelled || !strings.Contains(rep.Message, "shutting down") {
			t.Errorf("%+v", rep)
		}
		if err := <-kept; !errors.Is(err, engine.ErrClosed) {
			t.Errorf("kept: %v", err)
		}
		r.gets(in, ticket.Cancelled, "shutting down")
		release()
		r.empty()
		r.close()
	})
}
