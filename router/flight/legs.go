package flight

import (
	"cmp"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router/h1"
	"github.com/xpyd/xpyd/router/trace"
)

// errInstanceDead is why the legs on a dead worker end.
var errInstanceDead = errors.New("the worker is dead")

// leg is a request to one worker, and its answer.
type leg struct {
	role    fleet.Role
	inst    *fleet.Instance
	version uint64 // of the snapshot it was chosen from

	h1.Life // its end closes the leg's connection

	sent    atomic.Bool // the request is written; its body is no longer needed
	movable atomic.Bool // decode's: another pair could go on with its stream
	// waits counts the beginnings and ends of waits for the worker whose silence matters; see
	// silent.go, which alone uses the next two.
	waits atomic.Uint32
	seen  uint32
	still int32 // since when it is seen
	// Of balance.go: looks at it since the last comparison, those at which it waited, and waits then.
	samples, waiting int32
	counted          uint32

	span *trace.Context // as the worker is told; nil without a trace

	smu   sync.Mutex
	state string // see the states below
	since time.Time
	begun time.Time // when sending began
	ended time.Time
	ahead period // of legBring
	why   string // of legMoved
}

// States of a leg.
const (
	legBring     = "bring"  // decode brings what another has of a stream
	legOpen      = "open"   // sent or being sent, unanswered
	legAnswer    = "answer" // the answer is arriving
	legDone      = "done"
	legMoved     = "moved" // another pair goes on, though its worker is well
	legFailed    = "failed"
	legCancelled = "cancelled" // ended by the router
	legUnused    = "unused"    // the other leg does both phases
)

func newLeg(role fleet.Role, inst *fleet.Instance, version uint64) *leg {
	return &leg{role: role, inst: inst, version: version, state: legOpen, since: time.Now()}
}

func (l *leg) setState(state string) {
	l.smu.Lock()
	defer l.smu.Unlock()
	l.state, l.since = state, time.Now()
	if state == legDone || state == legFailed || state == legMoved {
		l.ended = l.since
	}
}

// moved says that another pair goes on, and why: the label of its metric.
func (l *leg) moved(why string) {
	l.setState(legMoved)
	l.smu.Lock()
	defer l.smu.Unlock()
	l.why = why
}

func (l *leg) begin() {
	l.smu.Lock()
	defer l.smu.Unlock()
	l.begun = time.Now()
}

// brought ends legBring: the leg itself is yet to come.
func (l *leg) brought() {
	l.smu.Lock()
	defer l.smu.Unlock()
	l.state, l.since = legOpen, time.Now()
	l.ahead, l.begun = period{l.begun, l.since}, time.Time{}
}

// period is from a beginning to an end, both zero if it was not.
type period struct{ from, to time.Time }

// fail marks the leg as failed, unless it was ended from outside.
func (l *leg) fail() {
	if l.Cause() == nil {
		l.setState(legFailed)
	}
}

// finish settles the final state and reports whether the router cut the leg short;
// cut means that the whole request was cut.
func (l *leg) finish(cut bool) (cancelled bool) {
	l.smu.Lock()
	defer l.smu.Unlock()
	switch {
	case l.state == legDone || l.state == legMoved || l.state == legFailed || l.state == legCancelled || l.state == legUnused:
		return false
	case l.state == legAnswer && !cut:
		l.state = legDone
	default:
		l.state, cancelled = legCancelled, true
	}
	l.since = time.Now()
	l.ended = l.since
	return cancelled
}

func (l *leg) record() legRecord {
	l.smu.Lock()
	defer l.smu.Unlock()
	return legRecord{l.inst.ID, l.inst.Epoch, l.state, l.why, l.since, l.begun, l.ended, l.ahead}
}

// legs are the open legs, so that a worker's death ends its own at once.
type legs struct {
	mu   sync.Mutex
	open map[*leg]struct{}
}

func (r *legs) add(l *leg) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.open[l] = struct{}{}
}

func (r *legs) remove(l *leg) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.open, l)
}

func (r *legs) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.open)
}

// sweep ends the legs on workers that s knows to be dead, gone or restarted.
func (r *legs) sweep(s *fleet.Snapshot) {
	var dead []*leg
	r.mu.Lock()
	for l := range r.open {
		if l.lost(s) != nil {
			dead = append(dead, l)
		}
	}
	r.mu.Unlock()
	for _, l := range dead {
		l.End(l.lost(s))
	}
}

// lost says why the worker has lost what it had, as far as s knows; nil if it has not. A
// worker that said goodbye has answered everything, but the last bytes may still be on
// their way: its connections end by themselves.
func (l *leg) lost(s *fleet.Snapshot) error {
	if l.version > s.Version {
		return nil
	}
	switch m := s.Get(l.inst.ID); {
	case m == nil:
		return fmt.Errorf("%w: it was removed", errInstanceDead)
	case m.Epoch != l.inst.Epoch:
		return fmt.Errorf("%w: it was restarted, or another was started with its id", errInstanceDead)
	case m.State == fleet.Dead || m.Revoked:
		return fmt.Errorf("%w: %s", errInstanceDead, cmp.Or(m.Reason, string(m.State)))
	}
	return nil
}
