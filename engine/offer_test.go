package engine_test

import (
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/enginetest"
	"github.com/xpyd/xpyd/kernels"
)

// crowd runs requests that need more blocks than there are, 10 ms a step. on hears of each offer, and
// reports whether the request is to be cancelled, as one that went elsewhere. It returns the outputs
// of those that were not.
func crowd(t *testing.T, r *rig, n int, edit func(i int, q *engine.Request), on func(i int, o engine.Offer) bool) (reqs []*engine.Request, out []output) {
	t.Helper()
	gen := rng()
	handles := make([]*engine.Handle, n)
	out = make([]output, n)
	for i := range handles {
		q := request(prompt(gen, 64), 250)
		q.IgnoreEOS, q.Offers, q.Seed = true, true, uint64(i)
		if edit != nil {
			edit(i, q)
		}
		reqs = append(reqs, q)
		handles[i] = r.submit(q)
		synctest.Wait()
	}
	done := make(chan int)
	for i, h := range handles {
		go func() {
			defer func() { done <- i }()
			for {
				events, err := h.Next(t.Context())
				if err != nil {
					return
				}
				for _, ev := range events {
					if ev.Offer != engine.OfferNone {
						if on(i, ev.Offer) {
							h.Cancel()
						}
						continue
					}
					if ev.Index != len(out[i].tokens) {
						t.Errorf("%d: token %d after %d", i, ev.Index, len(out[i].tokens))
					}
					out[i].tokens = append(out[i].tokens, ev.Sampled.Token)
				}
			}
		}()
	}
	for range handles {
		<-done
	}
	r.close()
	return reqs, out
}

// tight is a rig whose pool holds three of the requests of a crowd.
func tight(t *testing.T) *rig {
	return newRig(t, config(), enginetest.Config{Blocks: 64, BlockTokens: 16}, func(*kernels.Step) error {
		time.Sleep(10 * time.Millisecond)
		return nil
	})
}

// TestOffers: where blocks run short, the youngest is offered while it runs, and again when it has
// lost its blocks, but once in a shortage each; all get their tokens where nobody takes any.
func TestOffers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := tight(t)
		var got []string
		began := time.Now()
		var at []time.Duration
		reqs, out := crowd(t, r, 4, nil, func(i int, o engine.Offer) bool {
			got, at = append(got, fmt.Sprint(i, o)), append(at, time.Since(began))
			return false
		})
		if r.metric("xpyd_engine_preemptions_total") == 0 {
			t.Fatal("nothing was preempted")
		}
		soon := fmt.Sprint(3, engine.OfferSoon)
		if len(got) < 2 || got[0] != soon || !slices.Contains(got, fmt.Sprint(3, engine.OfferNow)) {
			t.Errorf("offered %v", got)
		}
		for i := range got {
			if i > 0 && at[i]-at[i-1] < 10*time.Millisecond {
				t.Errorf("offered %v at %v", got, at)
			}
			if slices.Contains(got[:i], got[i]) {
				t.Errorf("twice in a shortage: %v", got)
			}
		}
		for i, q := range reqs {
			q.Offers = false
			if want := alone(t, r.MaxModelLen(), q); !slices.Equal(out[i].tokens, want[0].tokens) {
				t.Errorf("%d got other tokens", i)
			}
		}
	})
}

// TestOfferTaken: one that goes elsewhere when it is offered makes room before others lose blocks.
func TestOfferTaken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := tight(t)
		var got []string
		_, out := crowd(t, r, 4, nil, func(i int, o engine.Offer) bool {
			got = append(got, fmt.Sprint(i, o))
			return true
		})
		if n := r.metric("xpyd_engine_preemptions_total"); n != 0 || !slices.Equal(got, []string{fmt.Sprint(3, engine.OfferSoon)}) {
			t.Errorf("%v preemptions, offered %v", n, got)
		}
		for i := range 3 {
			if len(out[i].tokens) != 250 {
				t.Errorf("%d has %d tokens", i, len(out[i].tokens))
			}
		}
	})
}

// TestNoOffers: nobody is offered who did not ask for it or is near the end, and none where all have
// room.
func TestNoOffers(t *testing.T) {
	for name, c := range map[string]struct {
		n    int
		edit func(i int, q *engine.Request)
	}{
		"not asked for": {4, func(_ int, q *engine.Request) { q.Offers = false }},
		"only the youngest's choice": {4, func(i int, q *engine.Request) {
			if q.Offers = i < 3; !q.Offers {
				q.MaxTokens = 1
			}
		}},
		"room": {2, nil},
		"near the end": {4, func(i int, q *engine.Request) {
			if i > 0 {
				q.MaxTokens = 8
			}
		}},
		"alone": {1, func(_ int, q *engine.Request) { q.MaxTokens = 440 }},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := tight(t)
				crowd(t, r, c.n, c.edit, func(i int, o engine.Offer) bool {
					t.Errorf("%d was offered %v", i, o)
					return false
				})
			})
		})
	}
}
