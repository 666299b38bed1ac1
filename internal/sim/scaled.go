package sim

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router/planner"
)

// Planner decides how many workers a fleet has: a *planner.Planner, or what it is compared with.
type Planner interface {
	Observe(planner.Sample)
	Decide(now time.Time) []planner.Decision
}

// Scaling has a fleet's workers come and go in a run.
type Scaling struct {
	Planner Planner
	// Every is the time between two samples, after each of which the planner decides.
	Every time.Duration
	// Start is how long a worker takes to start; Fails, if set, says which starts come to nothing, from 0.
	Start time.Duration
	Fails func(nth int) bool
	// Promise, if set, is what requests are to see.
	Promise *Promise
	// Deaths are times at which a worker dies, the one with the most to do. Its requests go on at others.
	Deaths []time.Duration
	// Look, if set, sees each sample and what was decided then.
	Look func(*planner.Sample, []planner.Decision)
}

// Scaled is what came of it.
type Scaled struct {
	Outcomes []Outcome
	// Workers is the time that all workers took together, from the order to start until they were gone.
	Workers time.Duration
	// Most is how many there were at once.
	Most                 int
	Starts, Stops, Flips int
}

// scaled is a run whose fleet changes.
type scaled struct {
	*run
	Scaling
	sample planner.Sample // being filled
	coming []*starting
	leaves map[*worker]fleet.Role // drained workers: "" ends, else the role that it gets
	made   int                    // workers
	ticked time.Duration
	result Scaled
}

type starting struct {
	id   string
	role planner.Role
	off  bool
}

// RunScaled runs a load, through Load.Until, on a fleet that begins as cfg says.
func RunScaled(ctx context.Context, cfg Config, load Load, s Scaling) (*Scaled, error) {
	if cfg.OneDevice || load.Closed+load.Warm > 0 || s.Every <= 0 || s.Planner == nil {
		return nil, errors.New("sim: a fleet that changes has devices of its own, an open load, and a planner")
	}
	x := &scaled{Scaling: s, leaves: map[*worker]fleet.Role{}}
	cfg.scaled = x
	r, err := open(ctx, cfg, load)
	if err != nil {
		return nil, err
	}
	x.run, x.made = r, len(r.workers)
	r.clock.after(0, x.tick)
	for _, at := range s.Deaths {
		r.clock.after(at, x.kill)
	}
	err = r.run(ctx)
	x.result.Outcomes = r.out
	return &x.result, err
}

// came counts a request that comes.
func (x *scaled) came(prompt int) {
	if x != nil {
		x.sample.Requests++
		x.sample.PromptTokens += prompt
	}
}

// token counts one, and the gap before it unless it is a request's first.
func (x *scaled) token(gap time.Duration, first bool) {
	if x == nil {
		return
	}
	x.sample.OutputTokens++
	if !first {
		x.sample.Gaps++
		x.sample.Streaming += gap
	}
}

// ended counts one that is over.
func (x *scaled) ended(o *Outcome) {
	if x == nil {
		return
	}
	x.sample.Ended++
	if x.Promise != nil {
		if x.sample.Judged++; x.Promise.Kept(o) {
			x.sample.Good++
		}
	}
}

// tick has the planner see the fleet and decide.
func (x *scaled) tick() {
	x.leave()
	x.result.Workers += time.Duration(len(x.workers)+len(x.coming)) * (x.clock.now - x.ticked)
	x.ticked = x.clock.now
	s := x.sample
	x.sample = planner.Sample{}
	s.At = x.clock.time()
	for _, w := range x.workers {
		l, state := w.engine.Stats(), planner.Serving
		if w.member.Draining {
			state = planner.Draining
		}
		s.Workers = append(s.Workers, planner.Worker{ID: w.member.ID, Role: roleOf(w), State: state,
			Running: l.Running, Waiting: l.Waiting + len(w.claims), QueuedTokens: l.QueuedTokens})
	}
	for _, c := range x.coming {
		s.Workers = append(s.Workers, planner.Worker{ID: c.id, Role: c.role})
	}
	x.result.Most = max(x.result.Most, len(s.Workers))
	x.Planner.Observe(s)
	list := x.Planner.Decide(s.At)
	for i := range list {
		x.obey(&list[i])
	}
	if x.Look != nil {
		x.Look(&s, list)
	}
	x.clock.after(x.Every, x.tick)
}

func roleOf(w *worker) planner.Role {
	if w.member.Alone() {
		return planner.Whole
	}
	return planner.Role(w.member.Role)
}

// obey carries out a decision.
func (x *scaled) obey(d *planner.Decision) {
	switch d.Kind {
	case planner.Start:
		for range d.N {
			x.start(d.Role)
		}
	case planner.Stop:
		x.result.Stops++
		if i := slices.IndexFunc(x.coming, func(c *starting) bool { return c.id == d.Worker }); i >= 0 {
			x.coming[i].off = true
			x.coming = slices.Delete(x.coming, i, i+1)
			return
		}
		x.drain(d.Worker, "")
	case planner.Flip:
		x.result.Flips++
		x.drain(d.Worker, fleet.Role(d.Role))
	}
}

// start starts a worker.
func (x *scaled) start(role planner.Role) {
	nth := x.result.Starts
	x.result.Starts++
	c := &starting{id: fmt.Sprintf("%s-%d", role, x.made), role: role}
	x.made++
	x.coming = append(x.coming, c)
	x.clock.after(x.Start, func() {
		if c.off {
			return
		}
		x.coming = slices.DeleteFunc(x.coming, func(o *starting) bool { return o == c })
		if x.Fails != nil && x.Fails(nth) {
			return
		}
		x.join(c)
	})
}

// join adds a worker that has started.
func (x *scaled) join(c *starting) {
	announced := fleet.Role(c.role)
	if c.role == planner.Whole {
		announced = fleet.Decode
	}
	w, err := newWorker(&x.clock, c.id, announced, &x.cfg.Worker, rand.New(rand.NewPCG(x.cfg.Seed, uint64(2+x.made))))
	if err != nil {
		panic(err) // those before it were made alike
	}
	if c.role == planner.Whole {
		w.member.Dialect = "openai"
	}
	x.workers = append(x.workers, w)
	x.byID[c.id] = w
	x.announce()
}

// drain gives a worker no more requests; once it is empty, it gets another role or ends.
func (x *scaled) drain(id string, then fleet.Role) {
	if w := x.byID[id]; w != nil && !w.member.Draining {
		w.member.Draining = true
		x.leaves[w] = then
		x.announce()
	}
}

// leave ends what has drained.
func (x *scaled) leave() {
	changed := false
	for _, w := range slices.Clone(x.workers) {
		then, drains := x.leaves[w]
		if !drains || x.picker.Loads(w.member.ID, 1).Legs > 0 || len(w.calls)+len(w.claims) > 0 {
			continue
		}
		changed = true
		delete(x.leaves, w)
		if w.member.Draining = false; then != "" {
			w.member.Role = then
			continue
		}
		x.drop(w)
	}
	if changed {
		x.announce()
	}
}

func (x *scaled) drop(w *worker) {
	w.gone = true
	x.workers = slices.DeleteFunc(x.workers, func(o *worker) bool { return o == w })
	delete(x.byID, w.member.ID)
}

// kill ends the worker that has the most to do.
func (x *scaled) kill() {
	if len(x.workers) == 0 {
		return
	}
	w := slices.MaxFunc(x.workers, func(a, b *worker) int { return len(a.calls) - len(b.calls) })
	x.drop(w)
	delete(x.leaves, w)
	x.announce()
	calls, claims := w.calls, w.claims
	w.calls, w.claims = nil, nil
	for _, c := range calls {
		c.lost()
	}
	for _, c := range claims {
		c.lost()
	}
}

// again sends a request whose worker has died to others, for the tokens that its client lacks.
func (f *flight) again() {
	if f.ended {
		return
	}
	f.choice.EndPrefill()
	f.choice.EndDecode()
	q := *f.request
	if q.Output -= f.out.Tokens; q.Output < 1 {
		f.end(true)
		return
	}
	f.request, f.choice, f.pushed = &q, nil, 0
	if len(f.workers) == 0 {
		f.end(false)
		return
	}
	f.send(f)
}
