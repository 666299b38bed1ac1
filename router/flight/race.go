package flight

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/router/dialect"
	"github.com/xpyd/xpyd/router/h1"
	"github.com/xpyd/xpyd/router/pick"
)

// runTogether sends both legs at once: prefill's on its own goroutine, which close waits
// for, decode's on this one. Whichever fails first before decode commits ends the other.
func (a *attempt) runTogether(x *dialect.Exchange) (*answer, *failure) {
	started := a.q.s.Spawn(func() {
		defer close(a.pDone)
		a.prefill(x)
	})
	if !started {
		close(a.pDone)
		a.d.End(ErrShutdown)
	}
	return a.askDecode(x)
}

// grace is how long one leg's hearsay waits for the other leg's own report.
const grace = 50 * time.Millisecond

// prefill sends prefill's leg and waits for its outcome, which does not depend on how long
// decode streams.
func (a *attempt) prefill(x *dialect.Exchange) {
	res, f := a.askPrefill(x)
	if f == nil {
		a.choice.DonePrefill()
		a.p.setState(legDone)
		a.prefillDone(res)
		return
	}
	a.choice.EndPrefill()
	a.q.s.legs.remove(a.p)
	a.p.fail()
	if f.hearsay() {
		await(a.dDone)
	}
	a.mu.Lock()
	a.outcome = res.Outcome
	a.mu.Unlock()
	a.failDecode(f)
}

// prefillDone notes prefill's success. If decode may wait in vain from now on, prefill and
// the clock are watched until decode's first event.
func (a *attempt) prefillDone(res dialect.Result) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.outcome = res.Outcome
	if res.Counted { // else decode may have said it
		a.usage, a.counted = res.Prompt, true
	}
	if !a.rules.Watched || a.committed || a.failed != nil || a.closed {
		a.q.s.legs.remove(a.p)
		return
	}
	a.unwatch = a.watchDecode()
}

// decodeSilent fails the attempt because decode does not answer.
func (a *attempt) decodeSilent(err error) {
	if a.failDecode(&failure{by: a.d, outcome: ticket.Late, reason: reasonTimeout, err: err, retry: true,
		avoid: []string{a.p.inst.ID, a.d.inst.ID, a.d.inst.ID}}) {
		a.fault(a.d, pick.Broken)
	}
}

// watchDecode ends decode's leg when prefill dies with the blocks that decode has yet to
// collect, or when the dialect's time limits pass. The result stops it.
func (a *attempt) watchDecode() func() {
	start, silence, gap := time.Now(), a.q.s.DecodeSilence, a.rules.Gap
	if gap <= 0 || a.rules.Order != dialect.PrefillFirst {
		gap = silence
	}
	var timer *time.Timer
	timer = time.AfterFunc(min(gap, silence), func() {
		left := silence - time.Since(start)
		switch {
		case left <= 0:
			err := fmt.Errorf("it is silent for %v after prefill's answer", silence)
			if a.rules.Hint != "" {
				err = fmt.Errorf("%w; %s", err, a.rules.Hint)
			}
			a.decodeSilent(err)
		case !a.d.sent.Load():
			a.decodeSilent(fmt.Errorf("it did not take its request within %v of prefill's answer", gap))
		default:
			a.mu.Lock() // unwatch may have stopped the timer just now
			if a.unwatch != nil {
				timer.Reset(left)
			}
			a.mu.Unlock()
		}
	})
	stop := a.p.OnEnd(func() {
		if cause := a.p.Cause(); errors.Is(cause, errInstanceDead) {
			a.failDecode(&failure{by: a.p, outcome: ticket.Dead, reason: reasonDead, err: cause, retry: true,
				exclude: []string{a.p.inst.ID}, holds: a.d.inst.ID})
		}
	})
	return func() {
		timer.Stop()
		stop()
		a.q.s.legs.remove(a.p)
	}
}

// failDecode ends decode's leg with f, unless decode has committed or something else failed
// before.
func (a *attempt) failDecode(f *failure) (matters bool) {
	a.mu.Lock()
	matters = !a.committed && a.failed == nil && !a.closed
	if matters {
		a.failed = f
	}
	a.mu.Unlock()
	if matters {
		a.d.End(f)
	}
	return matters
}

func await(done <-chan struct{}) { closedWithin(grace, done, nil) }

// closedWithin reports whether a or b closed within d.
func closedWithin(d time.Duration, a, b <-chan struct{}) bool {
	select {
	case <-a: // mostly
		return true
	default:
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-a:
	case <-b:
	case <-timer.C:
		return false
	}
	return true
}

// commit marks that decode has begun to answer, unless prefill's failure or another attempt
// came first.
func (a *attempt) commit() bool {
	a.mu.Lock()
	ok := a.failed == nil && a.d.Cause() == nil
	won := ok && a.hedge.win(a)
	if a.committed = won; won {
		a.endWatch()
	}
	a.mu.Unlock()
	if won {
		a.hedge.endLoser(a)
	} else if ok {
		a.end(errLost)
	}
	return won
}

// beaten is why decode could not commit.
func (a *attempt) beaten() *failure {
	a.mu.Lock()
	f := a.failed
	a.mu.Unlock()
	if f == nil {
		f = a.broken(a.d, a.d.Cause())
	}
	return f
}

// runInOrder has prefill answer and then gives decode what it kept, both on the handler's
// goroutine. The end of either leg, also by its worker's death, ends the attempt.
func (a *attempt) runInOrder(x *dialect.Exchange) (*answer, *failure) {
	stop := a.d.OnEnd(func() { // decode died, and will not collect
		cause := a.d.Cause()
		if errors.Is(cause, errInstanceDead) {
			cause = &failure{by: a.d, outcome: ticket.Dead, reason: reasonDead, err: cause, retry: true, exclude: []string{a.d.inst.ID}}
		}
		a.p.End(cause)
	})
	res, f := a.askPrefill(x)
	alive := stop()
	if f != nil {
		a.choice.EndPrefill()
		a.p.fail()
		a.d.setState(legUnused)
		a.mu.Lock()
		a.outcome = res.Outcome
		a.mu.Unlock()
		close(a.pDone)
		return nil, f
	}
	a.choice.DonePrefill()
	a.p.setState(legDone)
	a.prefillDone(res)
	close(a.pDone) // before decode is asked: its answer waits for prefill's usage
	if res.Final != nil {
		return a.final(res.Final)
	}
	if !alive { // its death crossed prefill's answer
		return nil, a.broken(a.d, a.d.Cause())
	}
	x.Kept, x.Left = res.Kept, time.Until(a.q.end)
	return a.askDecode(x)
}

// runAlone gives decode the whole request.
func (a *attempt) runAlone(x *dialect.Exchange) (*answer, *failure) {
	close(a.pDone)
	a.p.setState(legUnused)
	if a.falls == "" {
		defer a.choice.EndPrefill() // it computes the prompt until its first event
		return a.askDecode(x)
	}
	a.choice.EndPrefill()
	if !a.rules.Falls || !a.q.s.Fallback {
		return nil, &failure{by: a.d, api: openai.BadRequest(string(a.falls),
			"%s: engines of dialect %q cannot split such a request between prefill and decode", a.falls, a.d.inst.Dialect)}
	}
	a.q.s.metrics.fallbacks.WithLabelValues(string(a.falls)).Inc()
	return a.askDecode(x)
}

// final answers with prefill's body, which leaves nothing to decode.
func (a *attempt) final(body []byte) (*answer, *failure) {
	if !a.commit() {
		return nil, a.beaten()
	}
	a.d.setState(legUnused)
	a.q.firstByte()
	if !a.q.top.Stream {
		return &answer{status: 200, contentType: "application/json", body: body}, nil
	}
	return &answer{status: 200, contentType: "text/event-stream", body: asEvents(body)}, nil
}

// asEvents turns a whole answer into a stream of one event and the end.
func asEvents(body []byte) []byte {
	if choices := openai.Member(body, "choices"); choices != nil && string(openai.Member(body, "object")) == `"chat.completion"` {
		var list []map[string]json.RawMessage
		if json.Unmarshal(choices, &list) == nil {
			for _, c := range list {
				if c == nil { // null
					continue
				}
				c["delta"] = c["message"]
				delete(c, "message")
			}
			if b, err := json.Marshal(list); err == nil {
				body = openai.With(body, [2]string{"object", `"chat.completion.chunk"`}, [2]string{"choices", string(b)})
			}
		}
	}
	var line bytes.Buffer // an event's data is one line
	line.WriteString("data: ")
	if err := json.Compact(&line, body); err != nil {
		line.Reset()
	}
	line.WriteString("\n\n")
	return openai.AppendDone(line.Bytes())
}

// promptUsage is what prefill has counted, if it has. Its answer may come a moment after
// decode's.
func (a *attempt) promptUsage() (openai.PromptUsage, bool) {
	if !a.asked { // once: a stream may report its usage with each event
		a.asked = true
		await(a.pDone)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.usage, a.counted
}

// endWatch ends watchDecode; a.mu is held.
func (a *attempt) endWatch() {
	if a.unwatch != nil {
		a.unwatch()
		a.unwatch = nil
	}
}

// errOpening is a stream that begins with an error: its 200 came too early.
var errOpening = errors.New("its stream begins with an error")

// opening commits decode on its first event.
func (a *attempt) opening(first []byte) error {
	if event := skipComments(first); isError(event) {
		text := dataOf(event)
		if i := bytes.IndexAny(text, "\r\n"); i >= 0 {
			text = text[:i]
		}
		return &h1.Error{Phase: "answer", Err: fmt.Errorf("%w: %s", errOpening, openai.ErrorMessage(text))}
	}
	if !a.commit() {
		return a.beaten()
	}
	return nil
}
