package engine

import (
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/kernels"
)

// Driven is an engine on a clock of its caller, who is its loop: the twin's (internal/sim). All
// decisions are the running engine's. It is for one goroutine, as are its handles.
type Driven struct{ *Engine }

// NewDriven is New with a clock, and without a loop. depth is how many steps may be under way: one of
// a plain Backend's, two of a Launcher's.
func NewDriven(cfg Config, backend interface {
	kernels.Backend
	kernels.Launcher
}, depth int, cache *kvcache.Cache, log *slog.Logger, reg prometheus.Registerer, now func() time.Time) (*Driven, error) {
	e, err := open(cfg, backend, cache, log, reg, now)
	if err != nil {
		return nil, err
	}
	e.depth = depth
	return &Driven{e}, nil
}

// Wait is what the loop of a Driven waits for.
type Wait int

// The waits.
const (
	Idle    Wait = iota // something to be submitted, cancelled, released or freed; or, with ShedLate, too late
	Linger              // a time: see linger
	Landing             // the end of the oldest step under way
)

// Turn does what the loop does from one wait to the next. lingered: the wait before was Linger. After
// Landing the caller calls Settle first.
func (d *Driven) Turn(lingered bool) (w Wait, linger time.Duration) {
	for {
		if linger = d.lingers(); linger > 0 && !lingered {
			return Linger, linger
		}
		lingered = false
		d.intake()
		launched := d.next()
		if n := len(d.flights); n == d.depth || n > 0 && !launched {
			return Landing, 0
		}
		if !launched {
			return Idle, 0
		}
	}
}

// Settle handles the oldest step under way, which has ended.
func (d *Driven) Settle() { d.settle() }

// Events is Handle.Next that does not wait: none, and no error, if there are none yet.
func (d *Driven) Events(h *Handle) ([]Event, error) { return h.take() }
