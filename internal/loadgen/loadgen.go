// Package loadgen puts an OpenAI-compatible server under load and reports how it did.
// workload makes prompts, arrival the times of an open loop, client posts and takes the
// times, record gathers them, report shows them. This package runs the phases.
//
// A closed loop keeps a number of requests in flight. A slow server gets fewer of them, so
// its latencies leave out requests that would have come meanwhile (coordinated omission). An
// open loop sends on time whatever the server does, and every latency is also given from the
// scheduled time.
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
	// Next returns the next request, maybe after a wait; false when there are no more, or
	// ctx ends.
	Next(ctx context.Context) (*workload.Item, bool)
	// Done returns an item of Next with its result, which it must not keep.
	Done(*workload.Item, *client.Result)
}

// Poster posts a request and returns when its answer is over. Abort ends those that run; it
// is called when the context has ended.
type Poster interface {
	Do(context.Context, *client.Request, *client.Result)
	Abort()
}

// Phase is one stretch of load.
type Phase struct {
	Name string
	// Clients is the number of requests in flight: always in a closed loop, at most in an
	// open one, where further requests are late.
	Clients int
	Open    bool
	// Arrival is when an open loop sends; nil: when its items say (a trace).
	Arrival *arrival.Config
	Seed    uint64
	// Requests or Duration ends the phase, whichever is first; 0 means no end. After
	// Duration a closed loop starts no request. An open one still sends those that were due
	// before, until the drain ends.
	Requests int
	Duration time.Duration
	// Ramp is how long the clients of a closed loop take to begin, one after another; an
	// open loop's is also in its Arrival. Requests that start in the ramp are not counted.
	Ramp time.Duration
	// Drain is how long requests may still run after Duration. Then they are broken off and
	// counted as cancelled, and what an open loop has not sent is counted as unsent.
	Drain time.Duration
}

// Validate refuses what Run cannot work with.
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

// job is what one request needs while it runs.
type job struct {
	req  client.Request
	res  client.Result
	item *workload.Item
	due  time.Time // zero in a closed loop
}

// Run sends a phase's requests and returns when all are over. When ctx ends it breaks off
// those that run and sends no more.
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
	run := run{Runner: r, phase: p, src: src, rec: rec, begin: begin, posting: ctx}
	if p.Open {
		run.open(whole)
	} else {
		run.closed(sending)
	}
}

// run is a phase that runs.
type run struct {
	*Runner
	phase *Phase
	src   Source
	rec   *record.Phase
	begin time.Time
	// posting ends when the drain does.
	posting context.Context
}

// closed lets each client send its next request when its last one is over.
func (r *run) closed(ctx context.Context) {
	var issued atomic.Int64
	var clients sync.WaitGroup
	for i := range r.phase.Clients {
		clients.Go(func() {
			from := r.begin.Add(r.phase.Ramp * time.Duration(i) / time.Duration(r.phase.Clients))
			if !until(ctx, from) {
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
				r.do(j)
			}
		})
	}
	clients.Wait()
}

// prepared is how many requests an open loop makes ahead of their time.
const prepared = 32

// open sends at the scheduled times, or late. At the end of the drain it counts the requests
// that were due and not sent. ctx ends all.
func (r *run) open(ctx context.Context) {
	jobs := make(chan *job, prepared)
	var running sync.WaitGroup
	running.Go(func() {
		defer close(jobs)
		r.schedule(ctx, jobs)
	})
	slots := make(chan struct{}, r.phase.Clients)
	for j := range jobs {
		if until(r.posting, j.due) && waitSlot(r.posting, slots) {
			running.Go(func() {
				r.do(j)
				<-slots
			})
		} else if ctx.Err() == nil {
			r.rec.Unsent()
			r.over(j, &client.Result{Kind: client.Cancelled})
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

// schedule makes the requests of an open loop and says when they are due.
func (r *run) schedule(ctx context.Context, jobs chan<- *job) {
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

// next makes a request ready to be sent; nil when there is none.
func (r *run) next(ctx context.Context) *job {
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

// do sends a request and passes on the result.
func (r *run) do(j *job) {
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
	r.over(j, &j.res)
}

func (r *run) over(j *job, res *client.Result) {
	r.src.Done(j.item, res)
	j.item = nil
	r.jobs.Put(j)
}

// until waits for a time; false if ctx ends first.
func until(ctx context.Context, at time.Time) bool {
	wait := time.Until(at)
	if wait <= 0 {
		return ctx.Err() == nil
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
