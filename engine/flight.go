package engine

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/xpyd/xpyd/kernels"
)

// A launcher is given the next step while one is under way, so that the device never waits for
// the loop: step n+1 is planned before the tokens of step n are known. A sequence whose next
// token is still being drawn takes part with kernels.Seq.After in the place of that token; if
// the token then ends it, what it computed in vain is dropped. Blocks that a step under way may
// write are freed when it has ended, never before: others could fill them from outside.
//
// A sequence sits the next step out when more than its token depends on the
// draw: the first one of a prompt with several choices (forks), one under penalties, one that length
// will end. With a plain Backend a step is awaited before the next is planned.

// flight is a step from its launch to its settlement.
type flight struct {
	buf     stepBuffers
	step    *kernels.Step
	members []member
	began   time.Time
	target  time.Duration // that it was planned to take where gaps are promised; else 0
	launch  time.Duration // of the loop's, to describe and launch it
	held    bool          // its draws wait for what the step before it draws; see guide.go
}

// member is one sequence's part of a flight.
type member struct {
	q      *sequence
	chunk  int
	drafts int  // behind it
	at     int  // position of its first token
	void   bool // what came of it is dropped; see arrive.go
}

// decodes reports whether it carries what decodes.
func (f *flight) decodes() bool {
	return slices.ContainsFunc(f.members, func(m member) bool { return m.chunk == 1 })
}

// serial makes a Launcher of a Backend: the step runs when it is awaited.
type serial struct {
	kernels.Backend
	step *kernels.Step
}

func (s *serial) Launch(step *kernels.Step) error {
	s.step = step
	return nil
}

func (s *serial) Await() ([]kernels.Result, error) {
	return s.Step(s.step)
}

// launcherOf also says how many steps may be under way.
func launcherOf(b kernels.Backend) (kernels.Launcher, int) {
	if l, ok := b.(kernels.Launcher); ok {
		return l, 2
	}
	return &serial{Backend: b}, 1
}

// ahead is how long before the end of the step under way the next is planned: enough to
// describe and launch it while the device is busy.
const ahead = 3 * time.Millisecond

// linger waits with the plan of the next step until the one under way is about to end: requests
// that come meanwhile go into the next step, not into the one behind it.
func (e *Engine) linger() {
	if d := e.lingers(); d > 0 {
		time.Sleep(d)
	}
}

// lingers is how long linger waits, by what steps such as the one under way took. It takes a device
// that computes by itself, and a step that nobody hears of layer by layer, and that waits for
// nothing.
func (e *Engine) lingers() time.Duration {
	if !e.timed() || len(e.flights) == 0 || len(e.flights) >= e.depth || e.cfg.MaxStepTime == 0 {
		return 0
	}
	f := e.flights[0]
	if f.step == nil || f.step.OnLayer != nil || len(f.step.Arrivals) > 0 {
		return 0
	}
	d := e.deviceBegan(f).Add(e.pace.takes(f.members)*9/10 - ahead).Sub(e.now())
	return max(0, min(d, aloneTime*e.cfg.MaxStepTime)) // one odd step predicts nothing
}

// deviceBegan is when the device began the oldest step under way: before, it was busy with the
// one that was settled last.
func (e *Engine) deviceBegan(f *flight) time.Time {
	if f.began.Before(e.settled) {
		return e.settled
	}
	return f.began
}

// turn plans and launches a step if one more may be under way. Otherwise, or if there is nothing
// to launch, it settles the oldest. It reports whether there was anything to do.
func (e *Engine) turn() bool {
	if len(e.flights) > 0 && (e.expects() || e.awaitsDrafts()) {
		e.settle()
		return true
	}
	launched := e.next()
	if n := len(e.flights); n == e.depth || n > 0 && !launched {
		e.settle()
		return true
	}
	return launched
}

// next plans and launches a step, and reports whether there was anything to launch.
func (e *Engine) next() (launched bool) {
	if e.short && len(e.flights) > 0 {
		return false
	}
	e.short = false
	e.shed()
	e.admit()
	e.shed() // of those that have blocks now, it is known what they lack
	if launched = e.plan(); launched {
		e.speculate()
		e.launch()
	}
	e.foresee()
	e.publish()
	return launched
}

// launch launches the batch.
func (e *Engine) launch() {
	f := e.spare
	if e.spare = nil; f == nil {
		f = &flight{}
	}
	f.members = f.members[:0]
	begin := e.now()
	var err error
	for {
		f.step = e.build(&f.buf)
		if !f.step.Hold {
			e.masks(f.buf.guided)
		}
		f.began = e.now()
		err = guard(func() error { return e.device.Launch(f.step) })
		if !errors.Is(err, kernels.ErrStepTooLarge) {
			break
		}
		if e.undraft() {
			f.buf.untell()
			continue
		}
		if len(e.batch) == 1 {
			err = &RequestError{Field: "n", Msg: fmt.Sprintf("is more than one step takes: %v", err)}
			break
		}
		e.halve(&f.buf)
	}
	f.launch, f.target = e.now().Sub(begin), 0
	if e.promisesGaps() {
		f.target = e.target()
	}
	draw := 0
	for i, q := range e.batch {
		e.foretell(q)
		f.members = append(f.members, member{q: q, chunk: q.chunk, drafts: len(q.drafting.tokens), at: f.step.Seqs[i].Pos})
		q.ahead += q.chunk
		q.chunk, q.draw = 0, 0
		if n := len(f.step.Seqs[i].Samples); n > 0 {
			q.draw = draw + 1
			draw += n
		}
		q.flights++
		q.h.flights++
		q.h.stepped = true
	}
	e.flights = append(e.flights, f)
	e.predict()
	f.held = false
	switch {
	case err != nil:
		f.step = nil
		e.broken(f, err)
	case !f.step.Hold:
		e.endDead(f.buf.guided)
	case f.buf.behind:
		f.held = true
	default:
		e.draw(f)
	}
}

// halve takes back a step that was too large: the last half of its batch goes into the next
// step, before anything else.
func (e *Engine) halve(b *stepBuffers) {
	b.untell()
	n := (len(e.batch) + 1) / 2
	for _, q := range e.batch[n:] {
		q.chunk = 0
	}
	e.cut = append(slices.Clone(e.batch[n:]), e.cut...)
	e.batch = e.batch[:n]
}

// settle waits for the oldest step under way and handles its outcome.
func (e *Engine) settle() {
	f := e.flights[0]
	defer e.release()
	var results []kernels.Result
	asked := e.now()
	err := guard(func() (err error) {
		results, err = e.device.Await()
		if err == nil {
			err = checkResults(f.step, results)
		}
		return err
	})
	now := e.now()
	f.began = e.deviceBegan(f)
	e.settled = now
	took := now.Sub(f.began)
	if f.decodes() {
		e.decoded = now
		e.spend(f.target, took)
	}
	positions := e.metrics.step(took, f.members)
	if e.cfg.Stepped != nil {
		e.cfg.Stepped(positions)
	}
	if err != nil {
		e.broken(f, err)
		return
	}
	e.record(nil)
	if device := e.note(f, now.Sub(asked), took); device > 0 { // without what linger waited
		took = min(took, device)
	}
	if len(f.step.Arrivals) == 0 { // else it waited
		e.pace.step(took, f.members)
		e.steps.add(took, f.members)
		e.measureRows(took, f)
	}
	e.judge(f)
	e.land(f)
	e.predict()
	// Advance all before delivering any: delivery can end a request with
	// several sequences in the batch.
	for i := range f.members {
		m := &f.members[i]
		if m.void = m.q.voided(); m.void {
			continue
		}
		if at, bad := e.spoilt(&f.step.Seqs[i], &results[i]); bad {
			e.fail(m.q, at)
		}
		e.advance(*m)
	}
	e.tellLate(f)
	for i, m := range f.members {
		if !m.void {
			e.deliver(m.q, &results[i])
		}
	}
	e.reuse(f)
}

// broken ends every request of a flight that failed: its rows are not valid.
func (e *Engine) broken(f *flight, err error) {
	e.log.Error("engine step", "sequences", len(f.members), "error", err)
	if bad := new(RequestError); !errors.As(err, &bad) { // else it says nothing about the device
		e.record(err)
	}
	e.metrics.failures.Inc()
	e.land(f)
	for _, m := range f.members {
		if m.q.running { // else it ended with a sibling, or before
			e.finish(m.q.h, err)
		}
	}
	e.reuse(f)
}

// land removes a flight. It frees what ended while the flight was under way, unless a later one
// carries it too.
func (e *Engine) land(f *flight) {
	e.flights = slices.DeleteFunc(e.flights, func(g *flight) bool { return g == f })
	for _, m := range f.members {
		q, h := m.q, m.q.h
		q.ahead -= m.chunk
		h.flights--
		if q.flights--; q.flights == 0 {
			q.draw = 0
			if q.ended {
				e.cache.Release(q.table, h.owner)
				q.table = nil
			}
		}
		if h.over && h.flights == 0 {
			e.close(h)
		}
	}
}

// reuse keeps a flight's memory for the next.
func (e *Engine) reuse(f *flight) {
	clear(f.members) // they are not ours to keep alive
	e.spare = f
}
