package worker

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// TestMemoryInTurn: shares are granted in order of arrival. A small one does not overtake a
// large one, and released memory goes to the one that has waited longest.
func TestMemoryInTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newAnswerMemory(100, 10, time.Minute)
		type given struct {
			name string
			*answerShare
		}
		got := make(chan given, 8)
		shares := map[string]*answerShare{}
		ask := func(name string, n int64) {
			go func() {
				s, err := m.reserve(t.Context(), n)
				if err != nil {
					t.Error(name, err)
				}
				got <- given{name, s}
			}()
			synctest.Wait()
		}
		come := func(want ...string) {
			t.Helper()
			synctest.Wait()
			var came []string
			for len(got) > 0 {
				g := <-got
				came, shares[g.name] = append(came, g.name), g.answerShare
			}
			if slices.Sort(came); !slices.Equal(came, want) {
				t.Errorf("%s came, want %s", came, want)
			}
		}
		ask("a", 60)
		ask("b", 30)
		come("a", "b")
		ask("large", 90)
		ask("small", 5)
		come()
		shares["b"].release()
		come() // large is first
		shares["a"].release()
		come("large", "small")
		if shares["small"].grow(6) || !shares["small"].grow(5) {
			t.Error("5 are free")
		}
		ask("next", 10)
		shares["small"].release()
		shares["small"].release() // once is enough
		come("next")
		shares["large"].release()
		shares["next"].release()
		ask("all", 100)
		come("all")
		ask("one", 1) // byte too much
		come()
		shares["all"].release()
		come("one")
		shares["one"].release()
		if used, waiting := m.state(); used != 0 || waiting != 0 {
			t.Errorf("%d used, %d waiting", used, waiting)
		}
		var none *answerShare
		if none.release(); !none.grow(1 << 40) {
			t.Error("who needs none was refused")
		}
	})
}

// TestMemoryTaken: a request that waits too long, or finds too many waiting, is told that
// another worker may have room. One that leaves makes room.
func TestMemoryTaken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newAnswerMemory(100, 2, time.Second)
		held, err := m.reserve(t.Context(), 100)
		if err != nil {
			t.Fatal(err)
		}
		ctx, leave := context.WithCancelCause(t.Context())
		errs := make(chan error, 2)
		for _, c := range []context.Context{ctx, t.Context()} {
			go func() { _, err := m.reserve(c, 50); errs <- err }()
			synctest.Wait()
		}
		if _, err := m.reserve(t.Context(), 1); !errors.Is(err, errWaiters) || memoryFailure(err).outcome != ticket.NoSpace || memoryFailure(err).api.Status != 503 {
			t.Errorf("a third waiter: %v", err)
		}
		if n := testutil.ToFloat64(m.full); n != 1 {
			t.Errorf("%v refusals counted", n)
		}
		leave(errClientLeft)
		if err := <-errs; !errors.Is(err, errClientLeft) || memoryFailure(err).outcome != ticket.Cancelled {
			t.Errorf("who left: %v", err)
		}
		start := time.Now()
		if err := <-errs; !errors.Is(err, errMemory) || memoryFailure(err).outcome != ticket.NoSpace || time.Since(start) != time.Second {
			t.Errorf("after %v: %v", time.Since(start), err)
		}
		held.release()
		if used, waiting := m.state(); used != 0 || waiting != 0 {
			t.Errorf("%d used, %d waiting", used, waiting)
		}
	})
}

// TestTakesIsNoLess: what is set aside for an answer is not less than what it has
// when it is all there, and when its lists grow for the last time; nor much more than three times
// its tokens, or others would wait for nothing.
func TestTakesIsNoLess(t *testing.T) {
	w := renderer(t)
	w.sizes = openai.MeasureTokens(w.tok, w.tok.VocabSize())
	id := w.tok.Encode("once", false)[0]
	for _, top := range []int{-1, 0, 5, 20} {
		for _, n := range []int{1, 100, 3000} {
			j := newTestJob(func(j *job) { j.N, j.MaxTokens, j.logprobs, j.ReturnTokenIDs = 8, &n, top, true })
			e := &engine.Event{Sampled: kernels.Sampled{Token: id}}
			if top > 0 {
				e.Sampled.Top = make([]kernels.TokenLogprob, top)
			}
			heap := func() uint64 {
				runtime.GC()
				var m runtime.MemStats
				runtime.ReadMemStats(&m)
				return m.HeapAlloc
			}
			before := heap()
			choices := make([]*choice, j.N)
			taken := make([]openai.Choice, j.N)
			for i := range choices {
				choices[i] = newChoice(w, j, &j.items[0], i)
				for range n {
					choices[i].addToken(e)
				}
				taken[i] = choices[i].takeChunk()
			}
			held := heap() - before
			if needs := w.answerNeeds(j, false); int64(held) > needs.fixed+needs.tokens {
				t.Errorf("%d alternatives of %d tokens: %d bytes held, %+v set aside", top, n, held, needs)
			} else if each := len("once") + 4 + min(top+1, 1)*int(unsafe.Sizeof(openai.TokenLogprob{})) + max(top, 0)*8; needs.tokens > int64(7*j.N*n*each/2) {
				t.Errorf("%d alternatives of %d tokens of %d bytes: %+v set aside", top, n, each, needs)
			}
			runtime.KeepAlive(choices)
			runtime.KeepAlive(taken)
		}
	}
}

// TestEncodedSize: a whole answer is not larger than it was thought to be, whichever of its choices is
// the longest.
func TestEncodedSize(t *testing.T) {
	w := renderer(t)
	w.served = "m"
	w.sizes = openai.MeasureTokens(w.tok, w.tok.VocabSize())
	id := w.tok.Encode("once", false)[0]
	for _, top := range []int{-1, 5} {
		for n := 1; n <= 3; n++ {
			for longest := range n {
				tokens := 400
				j := newTestJob(func(j *job) { j.N, j.MaxTokens, j.logprobs, j.ReturnTokenIDs = n, &tokens, top, true })
				e := &engine.Event{Sampled: kernels.Sampled{Token: id, Top: make([]kernels.TokenLogprob, max(top, 0))}}
				g := &generation{j: j}
				for i := range n {
					c := newChoice(w, j, &j.items[0], i)
					for k := range tokens {
						if k < 2 || i == longest {
							c.addToken(e)
						}
					}
					g.choices = append(g.choices, c)
				}
				thought := w.encodedSize(g)
				list := make([]openai.Choice, n)
				for i, c := range g.choices {
					list[i] = c.takeChunk()
				}
				got := len(w.encoder(j).AppendFull(nil, list, openai.Usage{}))
				if got > thought {
					t.Errorf("%d choices, the %d. the longest, %d alternatives: %d bytes, thought to be %d", n, longest+1, top, got, thought)
				}
			}
		}
	}
}
