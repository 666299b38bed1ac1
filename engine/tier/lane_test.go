package tier

import (
	"context"
	"errors"
	"testing"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier/host"
	"github.com/xpyd/xpyd/engine/tier/level"
)

// holder is a level that has some units.
type holder struct {
	level.Level
	has kvcache.Hash
}

func (h holder) Has(key kvcache.Hash) bool { return key == h.has }
func (holder) Breaker() *level.Breaker     { return &level.Breaker{} }

// TestPush: whoever has a unit saved that leaves host memory hears whether a writer will.
func TestPush(t *testing.T) {
	tiers := &Tiers{}
	l := &lane{Level: holder{has: kvcache.Hash{9}}, jobs: make(chan job, 1)}
	push := func(l *lane, n byte, remove, want bool) {
		t.Helper()
		if got := tiers.push(l, job{key: kvcache.Hash{n}, leaving: &host.Lease{}, remove: remove}); got != want {
			t.Errorf("unit %d is taken: %t", n, got)
		}
	}
	push(&lane{Level: l.Level}, 1, false, false) // nothing is written to it
	push(l, 9, false, false)                     // it is there
	push(l, 9, true, true)
	push(l, 1, false, false) // the queue is full
	<-l.jobs
	push(l, 1, false, true)
	if n := tiers.unsaved.Load(); n != 2 {
		t.Errorf("%d units count as not saved", n)
	}
	<-l.jobs
	tiers.sealed = true
	push(l, 2, false, false)
}

// broken is a level that takes nothing now.
type broken struct {
	level.Level
	breaker *level.Breaker
}

func (broken) Name() string              { return "broken" }
func (b broken) Breaker() *level.Breaker { return b.breaker }

// TestWriteBroken: a unit that a level cannot take when its turn comes is dropped, and one that is on its
// way out of host memory stays there.
func TestWriteBroken(t *testing.T) {
	r := newRig(t, config(""))
	r.run(prompt(1, 32), 0)
	r.saved(tierHost, 2)
	ctx, cancel := context.WithCancel(t.Context())
	l := &lane{Level: broken{breaker: &level.Breaker{Probe: func(context.Context) error { return errors.ErrUnsupported }}}}
	defer l.Breaker().Close()
	defer cancel()
	l.Breaker().Failed(ctx, errors.New("a fault"))
	r.tiers.write(l, job{key: r.host.Units()[0].Key})
	if n := r.value("dropped_units_total", "broken"); n != 1 {
		t.Errorf("%v units are dropped", n)
	}
	leaves := r.host.Leave(r.host.Stats(false).Capacity)
	r.tiers.write(l, job{leaving: leaves})
	r.saved(tierHost, 2)
	if n := r.value("dropped_units_total", "broken"); n != 1 {
		t.Errorf("%v units are dropped", n)
	}
}
