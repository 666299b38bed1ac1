// Package loadgen puts an OpenAI-compatible server under load and reports how it did. Package
// workload makes prompts, arrival the times of an open loop, client posts and measures, record
// gathers, report shows. This package runs the phases.
//
// A closed loop keeps a number of requests in flight. A slow server gets fewer of them, so its
// latencies omit requests that would have come meanwhile (coordinated omission). An open loop
// sends on time whatever the server does, and also measures every latency from the scheduled time.
package loadgen

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/xpyd/xpyd/internal/loadgen/arrival"
	"github.com/xpyd/xpyd/internal/loadgen/client"
	"github.com/xpyd/xpyd/internal/loadgen/record"
	"github.com/xpyd/xpyd/internal/loadgen/workload"
)

// Source makes requests, for any number of goroutines.
type Source interface {
	// Next returns the next request, maybe after a wait; false when there are no more or ctx ends.
	Next(ctx context.Context) (*workload.Item, bool)
	// Done takes back an item of Next with its result, which it must not keep.
	Done(*workload.Item, *client.Result)
}

// Poster posts a request and returns when its answer is over. Abort, called once the context has
// ended, ends those that run.
type Poster interface {
	Do(context.Context, *client.Request, *client.Result)
	Abort()
}

// Phase is one stretch of load.
type Phase struct {
	Name string
	// Clients is the number of requests in flight. In an open loop it is a maximum, beyond which
	// requests are late.
	Clients int
	Open    bool
	// Arrival is when an open loop sends; nil: at its items' own times (a trace).
	Arrival *arrival.Config
	Seed    uint64
	// Requests or Duration ends the phase, whichever comes first; 0 means no end. After
	// Duration a closed loop starts no request. An open one sends those that were due before,
	// until the drain ends.
	Requests int
	Duration time.Duration
	// Ramp is how long the clients of a closed loop take to start, one after another; an open
	// loop's is also in its Arrival. Requests that start in the ramp are not counted.
	Ramp time.Duration
	// Drain is how long requests may run after Duration. Then they are aborted and counted as
	// cancelled; what an open loop has not sent counts as unsent.
	Drain time.Duration
}

// Validate returns an error for a phase that Run cannot run.
func (p *Phase) Validate() error {
	switch {
	case p.Clients < 1:
		return errors.New("no clients")
	case p.Requests < 0 || p.Duration < 0 || p.Ramp < 0 || p.Drain < 0:
		return errors.New("a limit is negative")
	case p.Duration > 0 && p.Ramp >= p.Duration:
		return errors.New("the ramp is as long as the whole")
	case p.Arrival != nil:
		return p.Arrival.Validate()
	}
	return nil
}

// Runner runs phases, one at a time.
type Runner struct {
	Post   Poster
	Encode *workload.Encoder
	// Answers keeps the texts of answers, for Sources that need them.
	Answers bool
	jobs    sync.Pool // *job
}

// job is the memory of a running request.
type job struct {
	req  client.Request
	res  client.Result
	item *workload.Item
	due  time.Time // zero in a closed loop
}

// Run sends a phase's requests and returns when all are over. When ctx ends it aborts those that
// run and sends no more.
func (r *Runner) Run(ctx context.Context, p *Phase, src Source, rec *record.Phase) {
	begin := time.Now()
	whole, sending := ctx, ctx
	if p.Duration > 0 {
		var cancel context.CancelFunc
		sending, cancel = context.WithDeadline(ctx, begin.Add(p.Duration))
		defer cancel()
		ctx, cancel = context.WithDeadline(ctx, begin.Add(p.Duration+p.Drain))
		defer cancel()
	}
	stop := context.AfterFunc(ctx, r.Post.Abort)
	defer stop()
	run := phaseRun{Runner: r, phase: p, src: src, rec: rec, begin: begin, posting: ctx}
	if p.Open {
		run.open(whole)
	} else {
		run.closed(sending)
	}
}

// phaseRun is a running phase.
type phaseRun struct {
	*Runner
	phase   *Phase
	src     Source
	rec     *record.Phase
	begin   time.Time
	posting context.Context // ends with the drain
}

// closed lets each client send its next request when the last one is over.
func (r *phaseRun) closed(ctx context.Context) {
	var issued atomic.Int64
	var clients sync.WaitGroup
	for i := range r.phase.Clients {
		clients.Go(func() {
			from := r.begin.Add(r.phase.Ramp * time.Duration(i) / time.Duration(r.phase.Clients))
			if !workload.WaitUntil(ctx, from) {
				return
			}
			for ctx.Err() == nil {
				if r.phase.Requests > 0 && issued.Add(1) > int64(r.phase.Requests) {
					return
				}
				j := r.next(ctx)
				if j == nil {
					return
				}
				r.send(j)
			}
		})
	}
	clients.Wait()
}

// prepared is how many requests an open loop makes ahead of time.
const prepared = 32

// open sends at the scheduled times or late, until ctx ends. At the end of the drain it counts the
// requests that were due and not sent.
func (r *phaseRun) open(ctx context.Context) {
	jobs := make(chan *job, prepared)
	var running sync.WaitGroup
	running.Go(func() {
		defer close(jobs)
		r.schedule(ctx, jobs)
	})
	slots := make(chan struct{}, r.phase.Clients)
	for j := range jobs {
		if workload.WaitUntil(r.posting, j.due) && waitSlot(r.posting, slots) {
			running.Go(func() {
				r.send(j)
				<-slots
			})
		} else if ctx.Err() == nil {
			r.rec.Unsent()
			r.finish(j, &client.Result{Kind: client.Cancelled})
		}
	}
	running.Wait()
}

// waitSlot waits for a slot; false if ctx ends first.
func waitSlot(ctx context.Context, slots chan struct{}) bool {
	select {
	case slots <- struct{}{}:
		if ctx.Err() == nil {
			return true
		}
		<-slots
	case <-ctx.Done():
	}
	return false
}

// schedule makes the requests of an open loop and sets when they are due.
func (r *phaseRun) schedule(ctx context.Context, jobs chan<- *job) {
	var process *arrival.Process
	if r.phase.Arrival != nil {
		process = arrival.New(*r.phase.Arrival, r.phase.Seed)
	}
	for n := 0; r.phase.Requests == 0 || n < r.phase.Requests; n++ {
		j := r.next(ctx)
		if j == nil {
			return
		}
		at := j.item.At
		if process != nil {
			at = process.Next()
		}
		if r.phase.Duration > 0 && at >= r.phase.Duration {
			return
		}
		j.due = r.begin.Add(at)
		select {
		case jobs <- j:
		case <-ctx.Done():
			return
		}
	}
}

// next prepares a request; nil when there are no more.
func (r *phaseRun) next(ctx context.Context) *job {
	it, ok := r.src.Next(ctx)
	if !ok {
		return nil
	}
	j, _ := r.jobs.Get().(*job)
	if j == nil {
		j = new(job)
	}
	j.item, j.due = it, time.Time{}
	j.req.Body = r.Encode.Append(j.req.Body[:0], it)
	j.req.WantAnswer = r.Answers
	return j
}

// send posts a request and records the result.
func (r *phaseRun) send(j *job) {
	r.rec.Start(time.Now())
	r.Post.Do(r.posting, &j.req, &j.res)
	began := j.res.Start
	if !j.due.IsZero() {
		began = j.due
	}
	r.rec.End(&record.Observation{
		Result: &j.res, Scheduled: j.due, Ramp: began.Sub(r.begin) < r.phase.Ramp,
		In: j.item.In, Out: j.item.Out, Turn: j.item.Turn,
	})
	r.finish(j, &j.res)
}

func (r *phaseRun) finish(j *job, res *client.Result) {
	r.src.Done(j.item, res)
	j.item = nil
	r.jobs.Put(j)
}
