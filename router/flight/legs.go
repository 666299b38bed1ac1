package flight

import (
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

// leg is one exchange with one worker.
type leg struct {
	role    fleet.Role
	inst    *fleet.Instance
	version uint64 // of the snapshot that it was chosen from

	h1.Life // its end closes the leg's connection

	sent atomic.Bool // the request is written: its body is not needed any more

	span *trace.Context // that the worker is told; nil without a trace

	smu   sync.Mutex
	state string // see the states below
	since time.Time
	begun time.Time // its request is being sent
	ended time.Time
}

// States of a leg.
const (
	legOpen      = "open"   // sent or being sent, unanswered
	legAnswer    = "answer" // the answer is arriving
	legDone      = "done"
	legFailed    = "failed"
	legCancelled = "cancelled" // ended by the router
	legUnused    = "unused"    // the other leg does both phases
)

func newLeg(role fleet.Role, inst *fleet.Instance, version uint64) *leg {
	return &leg{role: role, inst: inst, version: version, state: legOpen, since: time.Now()}
}

func (l *leg) set(state string) {
	l.smu.Lock()
	defer l.smu.Unlock()
	l.state, l.since = state, time.Now()
	if state == legDone || state == legFailed {
		l.ended = l.since
	}
}

// begin notes that the request is being sent.
func (l *leg) begin() {
	l.smu.Lock()
	defer l.smu.Unlock()
	l.begun = time.Now()
}

// times are when the request was begun to be sent, and when the leg ended;
// zero for what has not happened.
func (l *leg) times() (begun, ended time.Time) {
	l.smu.Lock()
	defer l.smu.Unlock()
	return l.begun, l.ended
}

// fail marks the leg as failed, unless it was ended from outside.
func (l *leg) fail() {
	if l.Cause() == nil {
		l.set(legFailed)
	}
}

// finish settles the state at the exchange's end and reports whether the router
// cut the leg short; cut says that the whole request was.
func (l *leg) finish(cut bool) (cancelled bool) {
	l.smu.Lock()
	defer l.smu.Unlock()
	switch {
	case l.state == legDone || l.state == legFailed || l.state == legCancelled || l.state == legUnused:
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

func (l *leg) get() (state string, since time.Time) {
	l.smu.Lock()
	defer l.smu.Unlock()
	return l.state, l.since
}

// legs are the open legs by worker, so that a death ends them at once.
type legs struct {
	mu   sync.Mutex
	byID map[string]map[*leg]struct{}
	n    int
}

func (r *legs) add(l *leg) {
	r.mu.Lock()
	defer r.mu.Unlock()
	m := r.byID[l.inst.ID]
	if m == nil {
		m = map[*leg]struct{}{}
		r.byID[l.inst.ID] = m
	}
	m[l] = struct{}{}
	r.n++
}

func (r *legs) remove(l *leg) {
	r.mu.Lock()
	defer r.mu.Unlock()
	m := r.byID[l.inst.ID]
	if _, ok := m[l]; !ok {
		return
	}
	delete(m, l)
	r.n--
	if len(m) == 0 {
		delete(r.byID, l.inst.ID)
	}
}

func (r *legs) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.n
}

// sweep ends the legs on workers that s knows to be dead, gone or restarted.
func (r *legs) sweep(s *fleet.Snapshot) {
	var dead []*leg
	r.mu.Lock()
	for id, m := range r.byID {
		for l := range m {
			if l.version <= s.Version && lost(s.Get(id), l.inst) != nil {
				dead = append(dead, l)
			}
		}
	}
	r.mu.Unlock()
	for _, l := range dead {
		l.End(lost(s.Get(l.inst.ID), l.inst))
	}
}

// lost says why what inst had is lost, nil if it is not. One that said goodbye
// has answered what it had, though the last bytes may still be on their way:
// its connections end by themselves.
func lost(m *fleet.Member, inst *fleet.Instance) error {
	switch {
	case m == nil:
		return fmt.Errorf("%w: it was removed", errInstanceDead)
	case m.Epoch != inst.Epoch:
		return fmt.Errorf("%w: it was restarted, or another was started with its id", errInstanceDead)
	case m.State == fleet.Dead || m.Revoked:
		return fmt.Errorf("%w: %s %s", errInstanceDead, m.State, m.Reason)
	}
	return nil
}
