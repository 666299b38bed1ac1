package prefill

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/xpyd/xpyd/kvconn/ticket"
)

// errLegGone ends a link's tickets when the router's leg went away.
var errLegGone = errors.New("the router gave up the exchange")

// Report is how a link ended: the answer to the router's leg.
type Report struct {
	Outcome      ticket.Outcome `json:"outcome"`
	Message      string         `json:"message,omitempty"`
	PromptTokens int            `json:"prompt_tokens"`
	CachedTokens int            `json:"cached_tokens"`
	QueueUS      int64          `json:"queue_us"`   // longest of its tickets
	ComputeUS    int64          `json:"compute_us"` // longest of its tickets
}

func reportOf(o ticket.Outcome, err error) Report {
	return Report{Outcome: o, Message: err.Error()}
}

// merge adds one ticket's report to its link's: the first failure wins.
func (r *Report) merge(t Report) {
	if r.Outcome == "" || r.Outcome == ticket.Done {
		r.Outcome, r.Message = t.Outcome, t.Message
	}
	r.PromptTokens += t.PromptTokens
	r.CachedTokens += t.CachedTokens
	r.QueueUS = max(r.QueueUS, t.QueueUS)
	r.ComputeUS = max(r.ComputeUS, t.ComputeUS)
}

// link is one exchange: the router's leg on one side, decode's tickets on the
// other, in whichever order they come.
type link struct {
	since   time.Time
	seen    map[int]bool // ticket indexes begun
	ended   int
	of      int // 0 until the first ticket
	cancels map[int]context.CancelCauseFunc
	gone    bool // the leg left: tickets that still come are refused
	awaited bool
	report  Report
	over    chan struct{} // closed when every ticket ended, or one failed
	done    bool
}

// links is the table of live exchanges and a bounded memory of finished ones.
type links struct {
	mu       sync.Mutex
	live     map[ticket.Link]*link
	finished map[ticket.Link]*list.Element // of rememberedLink
	order    *list.List
	limit    int
}

type rememberedLink struct {
	key    ticket.Link
	report Report
}

func newLinks(limit int) *links {
	return &links{live: map[ticket.Link]*link{}, finished: map[ticket.Link]*list.Element{}, order: list.New(), limit: limit}
}

// get returns the live link; the caller holds mu.
func (l *links) get(key ticket.Link) *link {
	k := l.live[key]
	if k == nil {
		k = &link{since: time.Now(), seen: map[int]bool{}, cancels: map[int]context.CancelCauseFunc{}, over: make(chan struct{})}
		l.live[key] = k
	}
	return k
}

// begin books ticket index of key; end must be called with its report.
func (l *links) begin(key ticket.Link, index, of int, cancel context.CancelCauseFunc) (end func(Report), err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, ok := l.finished[key]; ok {
		return nil, fmt.Errorf("link %s is over", key)
	}
	k := l.get(key)
	switch {
	case k.gone:
		return nil, errLegGone
	case k.seen[index]:
		return nil, fmt.Errorf("link %s: ticket %d came twice", key, index)
	case k.of != 0 && k.of != of:
		return nil, fmt.Errorf("link %s: %d tickets announced, now %d", key, k.of, of)
	}
	k.of = of
	k.seen[index] = true
	k.cancels[index] = cancel
	return func(r Report) { l.end(key, k, index, r) }, nil
}

func (l *links) end(key ticket.Link, k *link, index int, r Report) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(k.cancels, index)
	k.ended++
	k.report.merge(r)
	if !k.done && (k.ended == k.of || r.Outcome != ticket.Done) {
		k.done = true
		close(k.over)
		for _, cancel := range k.cancels { // one failed ticket ends its siblings
			cancel(errors.New(r.Message))
		}
		l.remember(key, k.report)
	}
	if k.done && len(k.cancels) == 0 && !k.awaited {
		delete(l.live, key)
	}
}

// remember keeps the report of a finished link; the caller holds mu.
func (l *links) remember(key ticket.Link, r Report) {
	if e, ok := l.finished[key]; ok {
		e.Value = rememberedLink{key, r}
		return
	}
	l.finished[key] = l.order.PushBack(rememberedLink{key, r})
	for l.order.Len() > l.limit {
		oldest := l.order.Remove(l.order.Front()).(rememberedLink)
		delete(l.finished, oldest.key)
	}
}

// Await is the router's leg: it returns when the exchange of key is over, or
// Late when no ticket came in time. When ctx ends first the exchange is
// cancelled.
func (s *Service) Await(ctx context.Context, key ticket.Link) Report {
	return s.links.await(ctx, key, s.cfg.TicketWait)
}

func (l *links) await(ctx context.Context, key ticket.Link, wait time.Duration) Report {
	l.mu.Lock()
	if e, ok := l.finished[key]; ok {
		l.mu.Unlock()
		return e.Value.(rememberedLink).report
	}
	k := l.get(key)
	if k.awaited {
		l.mu.Unlock()
		return Report{Outcome: ticket.Refused, Message: fmt.Sprintf("link %s has a leg already", key)}
	}
	k.awaited = true
	l.mu.Unlock()

	timer := time.NewTimer(wait)
	defer timer.Stop()
	var gone error
	var late bool
wait:
	for {
		select {
		case <-k.over:
			break wait
		case <-timer.C:
			if l.begun(k) {
				continue // from here on the ticket's own deadline rules
			}
			late, gone = true, fmt.Errorf("no ticket for link %s within %v", key, wait)
			break wait
		case <-ctx.Done():
			gone = errLegGone
			break wait
		}
	}

	l.mu.Lock()
	defer l.mu.Unlock()
	k.awaited = false
	if k.done {
		if len(k.cancels) == 0 {
			delete(l.live, key)
		}
		return k.report
	}
	k.gone = true
	for _, cancel := range k.cancels {
		cancel(gone)
	}
	k.done = true
	close(k.over)
	k.report = Report{Outcome: ticket.Cancelled, Message: gone.Error()}
	if late {
		k.report.Outcome = ticket.Late
	}
	l.remember(key, k.report)
	if len(k.cancels) == 0 {
		delete(l.live, key)
	}
	return k.report
}

func (l *links) begun(k *link) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(k.seen) > 0
}

func (l *links) ledger() []Entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []Entry
	for key, k := range l.live {
		if k.awaited {
			out = append(out, Entry{Kind: "awaited", ID: key.String(), Since: k.since, Why: "the router's leg waits for the exchange to end"})
		}
	}
	return out
}
