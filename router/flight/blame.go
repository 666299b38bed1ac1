package flight

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/scarce"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/router/dialect"
	"github.com/xpyd/xpyd/router/h1"
	"github.com/xpyd/xpyd/router/pick"
	"github.com/xpyd/xpyd/router/sense"
)

// blame returns what really ended the attempt. A leg often only reports what happened to
// the other, whose own report is about to come.
func (a *attempt) blame(f *failure) *failure {
	a.d.fail()
	if f.hearsay() {
		await(a.pDone)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.failed == nil || a.failed.hearsay() && !f.hearsay() {
		a.failed = f
	}
	return a.failed
}

// broken is the failure of a leg whose connection broke, timed out, or was closed because
// its worker is dead or the other leg failed.
func (a *attempt) broken(l *leg, err error) *failure {
	f := &failure{by: l, outcome: ticket.Dead, retry: true, exclude: []string{l.inst.ID}, err: err, reason: reasonTransport}
	cause := l.Cause()
	if other, ok := errors.AsType[*failure](cause); ok {
		return other
	}
	var large *h1.LargeError
	switch {
	case errors.Is(cause, errInstanceDead):
		f.err, f.reason = cause, reasonDead
	case errors.Is(cause, errSilent):
		f.err, f.reason = cause, reasonSilent
		a.fault(l, pick.Broken)
	case cause != nil: // the request is over
		f.err, f.retry = cause, false
	case scarce.Ours(err):
		return shortage(l, err)
	case errors.Is(err, sense.ErrRefusesUs):
		f.outcome, f.reason = ticket.Incompatible, reasonOutcome+string(ticket.Incompatible)
	case errors.As(err, &large): // the worker is fine, and another's answer would be as large
		f.outcome, f.retry, f.exclude, f.api = ticket.Refused, false, nil, tooLarge(large, &a.q.top)
	default:
		a.fault(l, pick.Broken)
		if le, ok := errors.AsType[*h1.Error](err); ok && !le.Gone() {
			f.outcome, f.reason = ticket.Late, reasonTimeout
			if a.rules != nil && a.rules.Order == dialect.Together { // each may have waited for the other
				f.avoid = []string{a.p.inst.ID, a.d.inst.ID}
			}
			break
		}
		a.q.s.Members.Suspect(l.inst, err)
	}
	if l == a.p && f.outcome == ticket.Dead && f.retry && a.rules != nil && a.rules.Typed {
		f.holds = a.d.inst.ID
	}
	return f
}

// shortage is the failure of a leg that the router could not open because it lacks file
// descriptors, ports or socket memory. No worker is at fault, and one with an idle
// connection can still be asked.
func shortage(l *leg, err error) *failure {
	return &failure{by: l, outcome: ticket.NoSpace, reason: reasonShortage, retry: true, avoid: []string{l.inst.ID},
		err: fmt.Errorf("the router lacks what a connection takes: %w", err)}
}

// maxReason is how many bytes of a worker's reason go into answers and the log.
const maxReason = 1 << 10

// reported is the failure that a worker reported; it is mostly about its partner.
func (a *attempt) reported(by, partner *leg, o ticket.Outcome, message string) *failure {
	if message == "" {
		message = "no reason given"
	} else if len(message) > maxReason {
		message = strings.ToValidUTF8(message[:maxReason], "") + "…"
	}
	f := &failure{by: by, outcome: o, retry: o.Retryable() || o == ticket.Cancelled, reason: reasonOutcome + string(o),
		err: fmt.Errorf("%s: %s", o, message)}
	if !slices.Contains(retryReasons, f.reason) {
		f.reason = reasonStatus
	}
	switch {
	case o == ticket.Invalid: // any worker would compute the same, unless this device is broken
		f.api = openai.InvalidOutput("%s", f.Error())
		a.fault(by, pick.Poor)
	case o == ticket.Shed: // others need their time for what they can still do in time
		f.api = openai.Shed("%s", f.Error())
	case o == ticket.NoSpace:
		f.avoid = []string{by.inst.ID}
	case f.hearsay():
		f.avoid = []string{partner.inst.ID, partner.inst.ID, by.inst.ID}
		if by.role == fleet.Decode && o == ticket.Dead {
			f.avoid, f.holds = f.avoid[:2], by.inst.ID
		}
	default: // either may be at fault
		f.avoid = []string{partner.inst.ID, by.inst.ID}
	}
	return f
}

// fault counts against a leg's worker. It is called only for a leg's own faults: not when
// the router cut it, for a worker's word about its partner, for a client's mistake, or for
// a worker that has no room.
func (a *attempt) fault(l *leg, kind pick.Fault) { a.choice.Failed(l.role, kind, time.Now()) }

// brokeOff notes that decode's stream broke after its first byte.
func (a *attempt) brokeOff(err error) {
	a.fault(a.d, pick.Broken)
	if le, ok := errors.AsType[*h1.Error](err); ok && le.Gone() || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET) {
		a.q.s.Members.Suspect(a.d.inst, err)
	}
}

// countStatus counts an answer's status for or against a worker. A 503 mostly means that it
// has no room, which a breaker would make worse; but a worker that says so more often than
// its peers is an outlier.
func (a *attempt) countStatus(l *leg, status int) {
	switch {
	case status == 503:
		a.fault(l, pick.Poor)
	case status >= 500:
		a.fault(l, pick.Broken)
	case status != 429: // it works, even if it refuses the request
		a.choice.Succeeded(l.role)
	}
}

// refused is the failure of an engine that did not answer 2xx. Errors in the request are
// relayed to the client; anything else may go better with another pair.
func (a *attempt) refused(by, partner *leg, said dialect.Reply) *failure {
	if o := ticket.Outcome(said.Outcome); o != "" && o != ticket.Refused {
		return a.reported(by, partner, o, openai.ErrorMessage(said.Body))
	}
	f := &failure{by: by, reason: reasonStatus, status: said.Status, retry: true, avoid: []string{by.inst.ID},
		err: fmt.Errorf("status %d: %s", said.Status, openai.ErrorMessage(said.Body))}
	a.countStatus(by, said.Status)
	switch {
	case refusal(said.Status):
		f.retry = false
		f.relay = &answer{status: said.Status, contentType: "application/json", body: said.Body}
		if !bytes.HasPrefix(openai.Member(said.Body, "error"), []byte("{")) {
			e := openai.BadRequest("", "%s", openai.ErrorMessage(said.Body))
			e.Status = said.Status
			f.relay.body = e.Append(nil)
		}
		if smaller := a.q.smaller(by); smaller != nil {
			return a.cramped(by, smaller, f.relay)
		}
	case said.Status == 429 || said.Status == 503:
		f.outcome = ticket.NoSpace
	}
	return f
}

// refusal reports whether a status says that the request itself is at fault.
func refusal(status int) bool { return status == 400 || status == 413 || status == 422 }

// smaller returns the workers that have no room for longer requests than one that refuses; nil if none
// has: what the largest refuses, the client has to mend.
func (q *request) smaller(l *leg) (ids []string) {
	most, larger := l.inst.MaxModelLen, false
	if most == 0 || q.forwarded {
		return nil
	}
	ids = append(ids, l.inst.ID)
	now := q.s.fleet.Snapshot()
	for i := range now.Members {
		switch m := &now.Members[i]; {
		case !q.s.Picker.Does(&m.Instance, l.role) || m.Model != l.inst.Model || m.ID == l.inst.ID || !q.s.Members.Serves(m):
		case m.MaxModelLen > most:
			larger = true
		case m.MaxModelLen > 0:
			ids = append(ids, m.ID)
		}
	}
	if !larger {
		return nil
	}
	return ids
}

// cramped is a refusal of a worker, perhaps for want of room that another has. The client gets it if
// there is none.
func (a *attempt) cramped(by *leg, smaller []string, ans *answer) *failure {
	return &failure{by: by, outcome: ticket.Refused, reason: reasonStatus, status: ans.status, retry: true, exclude: smaller, relay: ans,
		err: fmt.Errorf("status %d: %s", ans.status, openai.ErrorMessage(ans.body))}
}
