package flight

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router/h1"
)

// ward is a silence whose ticks the test makes, and workers that answer as told.
type ward struct {
	*silence
	t       *testing.T
	wg      sync.WaitGroup
	answers map[string]error // errNoAnswer: none; missing: at once
	times   map[string]int   // that each was asked
	left    map[string]bool
	alone   bool
	legs    map[string]*leg
}

// newWard has two streams of d0 and one of d1.
func newWard(t *testing.T) *ward {
	w := &ward{t: t, answers: map[string]error{}, times: map[string]int{}, left: map[string]bool{}, legs: map[string]*leg{}}
	s := &Service{legs: legs{open: map[*leg]struct{}{}}, Deps: Deps{Log: slog.New(slog.DiscardHandler), Ctx: t.Context(), Spawn: func(f func()) bool { w.wg.Go(f); return true }}}
	w.silence = &silence{s: s, asked: map[workerKey]*question{}, elsewhere: func(*fleet.Instance) bool { return !w.alone },
		gone: func(i *fleet.Instance) bool { return w.left[i.ID] },
		ask: func(l *h1.Life, i *fleet.Instance) error {
			w.times[i.ID]++
			err := w.answers[i.ID]
			if errors.Is(err, errNoAnswer) {
				<-l.Done()
			}
			return err
		}}
	for _, id := range []string{"d0.0", "d0.1", "d1.0"} {
		l := newLeg(fleet.Decode, &fleet.Instance{ID: id[:2], Epoch: 1}, 1)
		w.legs[id] = l
		s.legs.add(l)
		l.waits.Add(1)
	}
	return w
}

// pass lets ticks pass, while the stream of d1 and some others move.
func (w *ward) pass(ticks int, moving ...string) {
	for range ticks {
		for _, id := range append(moving, "d1.0") {
			w.legs[id].waits.Add(2)
		}
		w.listen()
		synctest.Wait()
	}
}

// taken checks whose legs were ended.
func (w *ward) taken(want ...string) {
	w.t.Helper()
	n := 0
	for id, l := range w.legs {
		if l.Cause() == nil {
			continue
		}
		n++
		if !errors.Is(l.Cause(), errSilent) {
			w.t.Errorf("%s: %v", id, l.Cause())
		}
	}
	for _, id := range want {
		if w.legs[id].Cause() == nil {
			w.t.Errorf("%s was not ended", id)
		}
	}
	if n != len(want) {
		w.t.Errorf("%d were ended, want %v", n, want)
	}
}

// TestSilence: a worker that is silent on a stream and does not answer loses it after a second,
// and nobody else does.
func TestSilence(t *testing.T) {
	for name, f := range map[string]func(w *ward){
		"it stops": func(w *ward) {
			w.answers["d0"] = errNoAnswer
			w.pass(silentAfter)
			w.taken()
			w.pass(1)
			w.taken("d0.0", "d0.1")
		},
		"it stops, and nothing may be spawned any more": func(w *ward) {
			w.answers["d0"] = errNoAnswer
			w.pass(silentAfter)
			w.s.Spawn = func(func()) bool { return false }
			w.pass(1)
			w.taken("d0.0", "d0.1")
		},
		"it answers": func(w *ward) {
			w.pass(100)
			w.taken()
			if n := w.times["d0"]; n < 30 || n > 35 {
				w.t.Errorf("asked %d times", n)
			}
		},
		"it answers, then it stops": func(w *ward) {
			w.pass(100)
			w.answers["d0"] = errNoAnswer
			w.pass(askEvery + answerWithin + 2)
			w.taken("d0.0", "d0.1")
		},
		"we cannot ask": func(w *ward) {
			w.answers["d0"] = errors.New("no descriptor")
			w.pass(100)
			w.taken()
		},
		"one of its streams moves": func(w *ward) { // and then does not
			w.answers["d0"] = errNoAnswer
			w.pass(silentAfter-2, "d0.1")
			w.pass(3)
			w.taken("d0.0")
			w.pass(silentAfter)
			w.taken("d0.0", "d0.1")
		},
		"a client does not read": func(w *ward) {
			w.answers["d0"] = errNoAnswer
			w.legs["d0.1"].waits.Add(1)
			w.pass(3 * silentAfter)
			w.taken("d0.0")
		},
		"no other pair": func(w *ward) {
			w.answers["d0"], w.alone = errNoAnswer, true
			w.pass(3 * silentAfter)
			w.taken()
			w.alone = false
			w.pass(1)
			w.taken("d0.0", "d0.1")
		},
		"no other pair, and it wakes up": func(w *ward) {
			w.answers["d0"], w.alone = errNoAnswer, true
			w.pass(3 * silentAfter)
			if !w.mute(w.legs["d0.0"].inst) {
				w.t.Error("it is not known")
			}
			delete(w.answers, "d0")
			w.pass(answerWithin + 2)
			w.alone = false
			w.pass(3 * silentAfter)
			w.taken()
		},
		"it is asked until it answers": func(w *ward) {
			w.answers["d0"] = errNoAnswer
			w.pass(2 * silentAfter)
			for _, id := range []string{"d0.0", "d0.1"} {
				w.s.legs.remove(w.legs[id])
			}
			w.pass(2 * silentAfter)
			if !w.mute(w.legs["d0.0"].inst) || w.mute(w.legs["d1.0"].inst) {
				w.t.Error("it is not known which it is")
			}
			delete(w.answers, "d0")
			w.pass(awakeEvery + answerWithin)
			if n := w.times["d0"]; len(w.asked) != 0 || w.mute(w.legs["d0.0"].inst) {
				w.t.Errorf("asked %d times, %d are asked", n, len(w.asked))
			}
		},
		"it is asked until it is dead": func(w *ward) {
			w.answers["d0"] = errNoAnswer
			w.pass(2 * silentAfter)
			for _, id := range []string{"d0.0", "d0.1"} {
				w.s.legs.remove(w.legs[id])
			}
			w.left["d0"] = true
			w.pass(answerWithin + 2)
			if len(w.asked) != 0 {
				w.t.Errorf("%d are asked", len(w.asked))
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWard(t)
				f(w)
				for _, q := range w.asked {
					if q.life != nil {
						q.life.End(errOver)
					}
				}
				w.wg.Wait()
			})
		})
	}
}

// TestSilenceEnds: with the router no worker is asked any more.
func TestSilenceEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWard(t)
		ctx, cancel := context.WithCancel(t.Context())
		w.s.Ctx = ctx
		w.answers["d0"] = errNoAnswer
		w.pass(silentAfter)
		if w.times["d0"] == 0 {
			t.Error("it is not asked")
		}
		cancel()
		w.wg.Wait()
	})
}
