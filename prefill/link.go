package prefill

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/xpyd/xpyd/kvconn/ticket"
)

// Report says how a link ended. It is the response to the router's leg.
type Report struct {
	Outcome      ticket.Outcome `json:"outcome"`
	Message      string         `json:"message,omitempty"`
	PromptTokens int            `json:"prompt_tokens"`
	CachedTokens int            `json:"cached_tokens"`
	QueueUS      int64          `json:"queue_us"`   // longest of its tickets
	ComputeUS    int64          `json:"compute_us"` // longest of its tickets
}

// merge adds a ticket's report to its link's; the first failure wins.
func (r *Report) merge(t Report) {
	if r.Outcome == "" || r.Outcome == ticket.Done {
		r.Outcome, r.Message = t.Outcome, t.Message
	}
	r.PromptTokens += t.PromptTokens
	r.CachedTokens += t.CachedTokens
	r.QueueUS = max(r.QueueUS, t.QueueUS)
	r.ComputeUS = max(r.ComputeUS, t.ComputeUS)
}

// endError ends a ticket for a reason outside it: its link is over, the router's leg has left, or
// its lease is gone.
type endError struct {
	outcome ticket.Outcome
	msg     string
}

func (e *endError) Error() string { return e.msg }

// link joins the router's leg of a request and decode's tickets, which come in any order. It is
// over when all tickets are done, one failed, the leg left, or the next ticket did not come in
// time.
type link struct {
	since   time.Time
	of      int                             // tickets announced; 0 until the first
	seen    map[int]bool                    // tickets begun
	running map[int]context.CancelCauseFunc // tickets that run
	ended   int                             // tickets that have ended
	awaited bool                            // the leg waits
	quiet   time.Time                       // since when no ticket runs
	timer   *time.Timer                     // for the next ticket; stopped while one runs
	report  Report
	done    bool
	over    chan struct{} // closed when done
}

// links are the live links, and a bounded memory of finished ones.
type links struct {
	wait  time.Duration // for the first or next ticket
	limit int           // finished links remembered

	mu       sync.Mutex
	live     map[ticket.Link]*link
	finished map[ticket.Link]Report
	order    []ticket.Link // the finished ones, oldest first
}

func newLinks(wait time.Duration, limit int) *links {
	return &links{wait: wait, limit: limit, live: map[ticket.Link]*link{}, finished: map[ticket.Link]Report{}}
}

// get returns the live link, or a fresh one; mu is held.
func (l *links) get(key ticket.Link) *link {
	k := l.live[key]
	if k == nil {
		now := time.Now()
		k = &link{since: now, quiet: now, seen: map[int]bool{}, running: map[int]context.CancelCauseFunc{}, over: make(chan struct{})}
		k.timer = time.AfterFunc(l.wait, func() { l.expire(key, k) })
		l.live[key] = k
	}
	return k
}

// begin adds ticket index of key; the caller calls end with its report. The error is an *endError.
func (l *links) begin(key ticket.Link, index, of int, cancel context.CancelCauseFunc) (end func(Report), err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if r, ok := l.finished[key]; ok {
		if r.Outcome == ticket.Done {
			r = Report{Outcome: ticket.Refused, Message: fmt.Sprintf("link %s is over", key)}
		}
		return nil, &endError{r.Outcome, r.Message}
	}
	k := l.get(key)
	switch {
	case k.seen[index]:
		return nil, &endError{ticket.Refused, fmt.Sprintf("link %s: ticket %d came twice", key, index)}
	case k.of != 0 && k.of != of:
		return nil, &endError{ticket.Refused, fmt.Sprintf("link %s: %d tickets announced, now %d", key, k.of, of)}
	}
	k.of = of
	k.seen[index] = true
	k.running[index] = cancel
	k.timer.Stop()
	return func(r Report) { l.end(key, k, index, r) }, nil
}

func (l *links) end(key ticket.Link, k *link, index int, r Report) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(k.running, index)
	k.ended++
	k.report.merge(r)
	switch {
	case k.done:
	case k.ended == k.of || r.Outcome != ticket.Done:
		l.finish(key, k)
	case len(k.running) == 0:
		k.quiet = time.Now()
		k.timer.Reset(l.wait)
	}
	l.forget(key, k)
}

// finish ends a link with its report, and the tickets that still run; mu is held.
func (l *links) finish(key ticket.Link, k *link) {
	k.done = true
	k.timer.Stop()
	close(k.over)
	for _, cancel := range k.running {
		cancel(&endError{k.report.Outcome, k.report.Message})
	}
	l.finished[key] = k.report
	l.order = append(l.order, key)
	if len(l.order) > l.limit {
		delete(l.finished, l.order[0])
		l.order = l.order[1:]
	}
}

// forget drops a finished link that nobody uses; mu is held.
func (l *links) forget(key ticket.Link, k *link) {
	if k.done && len(k.running) == 0 && !k.awaited {
		delete(l.live, key)
	}
}

func (l *links) expire(key ticket.Link, k *link) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if k.done || len(k.running) > 0 || time.Since(k.quiet) < l.wait {
		return
	}
	k.report.Outcome, k.report.Message = ticket.Late, fmt.Sprintf("no ticket for link %s within %v", key, l.wait)
	l.finish(key, k)
	l.forget(key, k)
}

// Await is the router's leg. It returns when the link is over, with Late if the next ticket did not
// come within Config.TicketWait. If ctx ends first, it ends the link: as Late after a deadline,
// else as Cancelled.
func (s *Service) Await(ctx context.Context, key ticket.Link) Report { return s.links.await(ctx, key) }

func (l *links) await(ctx context.Context, key ticket.Link) Report {
	l.mu.Lock()
	if r, ok := l.finished[key]; ok {
		l.mu.Unlock()
		return r
	}
	k := l.get(key)
	if k.awaited {
		l.mu.Unlock()
		return Report{Outcome: ticket.Refused, Message: fmt.Sprintf("link %s has a leg already", key)}
	}
	k.awaited = true
	l.mu.Unlock()

	select {
	case <-k.over:
	case <-ctx.Done():
	}

	l.mu.Lock()
	defer l.mu.Unlock()
	k.awaited = false
	if !k.done {
		k.report.Outcome, k.report.Message = ticket.Cancelled, "the router gave up the transfer"
		if errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
			k.report.Outcome, k.report.Message = ticket.Late, "the request's deadline passed"
		}
		l.finish(key, k)
	}
	l.forget(key, k)
	return k.report
}

func (l *links) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for key, k := range l.live {
		if !k.done {
			k.report.Outcome, k.report.Message = ticket.Cancelled, "this worker is shutting down"
			l.finish(key, k)
			l.forget(key, k)
		}
	}
}

func (l *links) ledger() []Entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []Entry
	for key, k := range l.live {
		e := Entry{Kind: "linked", ID: key.String(), Since: k.since, Why: fmt.Sprintf("%d of %d tickets have ended", k.ended, k.of)}
		if k.awaited {
			e.Kind, e.Why = "awaited", "the router's leg waits for the transfer to end"
		}
		out = append(out, e)
	}
	return out
}
