// Package sim is the twin: a fleet on a virtual clock. The router's choice (router/pick), the
// engine's scheduler (engine.Driven) and the cache (engine/kvcache) are the running ones; a step's
// time, the network and the way to the client are modelled. See DESIGN.md.
package sim

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"time"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router/pick"
)

// Config is a fleet.
type Config struct {
	// Whole workers compute and decode; of Prefill and Decode each does one; Mixed do what the router
	// gives them. A fleet has one of the three kinds.
	Whole, Prefill, Decode, Mixed int
	Worker                        Worker
	// OneDevice: all workers share one, and lose this part of the time to taking turns.
	OneDevice bool
	Turns     float64
	KV        Link
	// Front is how long a request takes from its arrival to a worker, and a token to the client. Jitter
	// comes to Front in the mean, by an exponential distribution: clients whose answers end together
	// do not come back together.
	Front, Back, Jitter time.Duration
	Pick                pick.Config
	Heartbeat           time.Duration
	Guess               float64 // times an answer's length that the router is told
	Seed                uint64
	// Warm is how many requests like the load's each worker has served before it, so that its engine knows how fast
	// its steps are, as a running one does. Load.Until counts from then on. 0: workers have just started.
	Warm int

	scaled *scaled // nil: the fleet stays as it is
}

// DefaultConfig is a fleet without workers, whose HTTP takes a millisecond, about: `scripts/bench twin`
// measures it for its machine.
func DefaultConfig() Config {
	return Config{Front: 700 * time.Microsecond, Back: 200 * time.Microsecond, Pick: pick.DefaultConfig(), Heartbeat: fleet.DefaultHeartbeat, Guess: 1, Seed: 1}
}

// Request is one of a load.
type Request struct {
	At     time.Duration
	Prompt Prompt
	Output int // tokens
}

// Outcome is what a request's client saw.
type Outcome struct {
	At, First, Last time.Duration // of its arrival, its first token and its last; 0: never
	Prompt, Tokens  int           // of the prompt; of the answer, those that came
	Longest         time.Duration // gap between two tokens
	Failed          bool
}

// TTFT is the time to the first token.
func (o *Outcome) TTFT() time.Duration { return o.First - o.At }

// Gap is the mean gap between tokens.
func (o *Outcome) Gap() time.Duration {
	if o.Tokens < 2 {
		return 0
	}
	return (o.Last - o.First) / time.Duration(o.Tokens-1)
}

// run is a fleet under a load.
type run struct {
	cfg      Config
	clock    clock
	picker   *pick.Picker
	snapshot *fleet.Snapshot
	workers  []*worker
	byID     map[string]*worker
	lanes    *lanes // nil: workers meet each other
	load     Load
	out      []Outcome
	next     int // of the load's requests
	began    time.Duration
	open     int // requests that have not ended
	feeding  bool
	over     bool // nobody wants to know the rest
	noise    *rand.Rand
}

// Load is what is sent.
type Load struct {
	Requests []Request // by time
	// Closed, if above 0, is how many of them are in flight at most: then one is sent when another has
	// ended, and their times do not count.
	Closed int
	// Warm, if above 0, is how many of them are sent before, one after the other: then engines know how
	// fast steps are. The load begins when they have ended.
	Warm int
	// Until bounds the run: what has not ended then has failed.
	Until time.Duration
	// Ended, if set, is told of each outcome, and reports whether the run has to go on; what then has
	// not ended has failed.
	Ended func(*Outcome) (on bool)
}

// Run runs a load and returns what came of each request, in the order of the load.
func Run(ctx context.Context, cfg Config, load Load) ([]Outcome, error) {
	r, err := open(ctx, cfg, load)
	if err != nil {
		return nil, err
	}
	return r.out, r.run(ctx)
}

func open(ctx context.Context, cfg Config, load Load) (*run, error) {
	r := &run{cfg: cfg, load: load, out: make([]Outcome, len(load.Requests)), feeding: true,
		picker: pick.New(cfg.Pick, rand.New(rand.NewPCG(cfg.Seed, 1))), byID: map[string]*worker{}, noise: rand.New(rand.NewPCG(cfg.Seed, 0))}
	clockOf := func() *clock { return &r.clock }
	if cfg.Prefill+cfg.Decode+cfg.Mixed+load.Closed+load.Warm == 0 && !cfg.OneDevice && cfg.scaled == nil {
		r.lanes = &lanes{}
		clockOf = func() *clock { return &clock{} }
	}
	var one *shared
	if cfg.OneDevice {
		one = &shared{clock: &r.clock, cost: 1 + cfg.Turns}
	}
	add := func(n int, role fleet.Role, name string) error {
		for i := range n {
			if err := ctx.Err(); err != nil { // thousands take seconds
				return err
			}
			w, err := newWorker(clockOf(), fmt.Sprintf("%s-%d", name, i), role, &cfg.Worker, rand.New(rand.NewPCG(cfg.Seed, uint64(2+len(r.workers)))))
			if err != nil {
				return err
			}
			w.device.shared = one
			if name == "whole" {
				w.member.Dialect = "openai"
			}
			r.workers = append(r.workers, w)
			r.byID[w.member.ID] = w
		}
		return nil
	}
	if cfg.Whole+cfg.Mixed+min(cfg.Prefill, cfg.Decode) < 1 {
		return nil, errors.New("sim: the fleet needs a whole worker, or one of prefill and one of decode")
	}
	for _, err := range []error{add(cfg.Whole, fleet.Decode, "whole"), add(cfg.Prefill, fleet.Prefill, "prefill"), add(cfg.Decode, fleet.Decode, "decode"),
		add(cfg.Mixed, fleet.Decode, "mixed")} {
		if err != nil {
			return nil, err
		}
	}
	return r, nil
}

// looks is how many events there are between two looks at the context: some take a millisecond.
const looks = 64

func (r *run) run(ctx context.Context) error {
	if r.lanes != nil {
		defer r.lanes.open(ctx, r.workers, runtime.GOMAXPROCS(0))()
	}
	if err := r.warm(ctx); err != nil {
		return err
	}
	r.beat()
	if r.load.Warm > 0 {
		r.sendNext()
	} else {
		r.begin()
	}
	for n := 0; !r.over && r.clock.now <= r.load.Until && r.step(); n++ {
		if (r.lanes != nil || n%looks == 0) && ctx.Err() != nil { // a step of lanes is long
			return ctx.Err()
		}
	}
	if err := ctx.Err(); err != nil { // lanes stop in the midst of a step
		return err
	}
	for i := r.next; i < len(r.out); i++ {
		r.out[i].Failed = true
	}
	return nil
}

// step runs the next event or, in lanes, all that workers do until the router's next one; false if there
// is none.
func (r *run) step() bool {
	if r.lanes == nil {
		return r.clock.next()
	}
	until := r.load.Until + 1
	if len(r.clock.queue) > 0 {
		until = min(until, r.clock.queue[0].at)
	}
	if !r.lanes.run(until) {
		return r.clock.next()
	}
	for _, s := range r.lanes.told() {
		if !r.over {
			s.do()
		}
	}
	return true
}

// beat has the router hear of all workers' load, now and then while there is any.
func (r *run) beat() {
	r.announce()
	switch {
	case r.open > 0:
		r.clock.after(r.cfg.Heartbeat, r.beat)
	case r.feeding: // those until the next request would say the same
		idle := r.began + r.load.Requests[r.next].At - r.clock.now
		r.clock.after(max(1, idle/r.cfg.Heartbeat)*r.cfg.Heartbeat, r.beat)
	}
}

// announce has the router hear of all workers' load.
func (r *run) announce() {
	members := make([]fleet.Member, len(r.workers))
	for i, w := range r.workers {
		w.beat()
		members[i] = w.member
	}
	version := uint64(1)
	if r.snapshot != nil {
		version = r.snapshot.Version + 1
	}
	r.snapshot = fleet.NewSnapshot(version, r.clock.time(), members)
}

// begin begins the load.
func (r *run) begin() {
	r.began = r.clock.now
	if r.load.Closed == 0 {
		r.feed()
	}
	for range r.load.Closed {
		r.sendNext()
	}
}

// feed sends the requests at their times.
func (r *run) feed() {
	if r.next < len(r.out) {
		r.clock.after(r.began+r.load.Requests[r.next].At-r.clock.now, func() {
			r.sendNext()
			r.feed()
		})
	}
}

// sendNext sends the next request, if there is one.
func (r *run) sendNext() {
	if r.next == len(r.out) {
		return
	}
	q, o := &r.load.Requests[r.next], &r.out[r.next]
	r.next++
	r.feeding = r.next < len(r.out)
	*o = Outcome{At: r.clock.now, Prompt: q.Prompt.Tokens(), Failed: true}
	r.open++
	r.cfg.scaled.came(o.Prompt)
	f := &flight{run: r, out: o, request: q, warm: r.next <= r.load.Warm}
	if len(r.workers) == 0 { // all have died
		f.end(false)
		return
	}
	r.send(f)
}

// flight is a request on its way.
type flight struct {
	*run
	request *Request
	out     *Outcome
	choice  *pick.Choice
	prompt  []int32
	chain   *kvcache.Chain // see hash
	sent    time.Duration
	pushed  time.Duration // when prefill's leg ended
	warm    bool          // it is one of those before the load
	ended   bool
}

// send chooses workers.
func (r *run) send(f *flight) {
	f.prompt = f.request.Prompt.IDs()
	words := text(f.prompt)
	req := &pick.Request{Local: always, Model: modelName, Tokens: len(f.prompt), Output: int(float64(f.request.Output) * r.cfg.Guess), Seqs: 1, Chain: pick.NewChain(words), Head: words[:min(len(words), 1<<10)]}
	if p := r.cfg.Pick.Policy; p == pick.KVEvents || p == pick.PredictedTTFT || r.cfg.Pick.Disaggregate == pick.Mixed {
		req.Tokenized = true
		f.hash()
		for _, w := range r.workers {
			if n := w.cache.Reach(f.chain, len(f.prompt)-1); n > 0 {
				req.Warm = append(req.Warm, pick.Warm{ID: w.member.ID, Epoch: 1, Tokens: float64(n)})
			}
		}
	}
	var err error
	if f.choice, err = r.picker.Pick(pick.View{Snapshot: r.snapshot, Now: r.clock.time()}, req); err != nil {
		f.end(false)
		return
	}
	f.sent = r.clock.now
	p, d := r.byID[f.choice.Prefill.ID], r.byID[f.choice.Decode.ID]
	r.clock.after(r.front(), func() {
		if p == d {
			f.decode(d, nil)
			return
		}
		f.split(p, d)
	})
}

// front is how long a request takes to its worker.
func (r *run) front() time.Duration {
	if r.cfg.Jitter == 0 {
		return r.cfg.Front
	}
	return r.cfg.Front + time.Duration(r.noise.ExpFloat64()*float64(r.cfg.Jitter))
}

// always: any worker could serve any request alone.
func always(string) bool { return true }

// hash names what caches have of the prompt.
func (f *flight) hash() {
	if f.chain == nil {
		c := f.workers[0].cache.NewChain("")
		c.Extend(f.prompt)
		f.chain = &c
	}
}

// split has decode reserve, and then prefill compute and push.
func (f *flight) split(p, d *worker) {
	if p.gone || d.gone {
		f.again()
		return
	}
	owner := fmt.Sprintf("%p", f)
	f.hash()
	d.claim(&claim{owner: owner, chain: f.chain, prompt: f.prompt, lost: f.again, then: func(table []int32, had int) {
		if table == nil {
			f.end(false)
			return
		}
		failed := func() {
			d.cache.Release(table, owner)
			d.reserve()
			if p.gone || d.gone {
				f.again()
				return
			}
			f.end(false)
		}
		f.clock.after(f.cfg.KV.Latency, func() {
			if p.gone {
				failed()
				return
			}
			p.push(&f.cfg.KV, f.cfg.Worker.Layers, owner, f.prompt, had, func() { f.pushed = f.clock.now }, func() {
				f.choice.DonePrefill()
				f.decode(d, &engine.Prefilled{Blocks: table, First: first})
			}, failed)
		})
	}})
}

// decode has a worker answer; p is nil if it computes the prompt itself.
func (f *flight) decode(d *worker, p *engine.Prefilled) {
	if d.gone {
		f.again()
		return
	}
	r := ask(f.prompt)
	r.MaxTokens, r.Prefilled = f.request.Output, p
	if p != nil {
		r.Owner = fmt.Sprintf("%p", f)
	}
	d.clock.now = f.clock.now // it has done all that it had to do before
	err := d.submit(r, &call{lost: f.again, token: func() { f.token(d) }, done: func(ok bool) { d.tell(func() { f.end(ok) }) }})
	if err != nil {
		if p != nil {
			d.cache.Release(p.Blocks, r.Owner)
		}
		f.end(false)
	}
}

// token counts one that the client gets from a worker.
func (f *flight) token(d *worker) {
	o, now := f.out, d.clock.now+f.cfg.Back
	f.cfg.scaled.token(now-o.Last, o.Tokens == 0)
	if o.Tokens == 0 {
		o.First = now
		prefill := time.Duration(0)
		if f.pushed > 0 {
			prefill = f.pushed - f.sent
		}
		d.tell(func() {
			f.choice.EndPrefill()
			f.choice.Answered(prefill, now-f.sent)
		})
	} else {
		o.Longest = max(o.Longest, now-o.Last)
	}
	o.Last = now
	o.Tokens++
}

func (f *flight) end(ok bool) {
	if f.ended {
		return
	}
	f.ended = true
	f.open--
	f.out.Failed = !ok
	f.cfg.scaled.ended(f.out)
	f.prompt = nil
	if f.choice != nil {
		f.choice.EndPrefill()
		f.choice.EndDecode()
	}
	if f.load.Ended != nil && !f.load.Ended(f.out) {
		f.over = true
	}
	switch {
	case f.warm && f.next == f.load.Warm:
		f.clock.after(0, f.begin)
	case f.warm, f.load.Closed > 0:
		f.clock.after(0, f.sendNext)
	}
}
