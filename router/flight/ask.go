package flight

import (
	"errors"
	"fmt"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/router/dialect"
	"github.com/xpyd/xpyd/router/h1"
	"github.com/xpyd/xpyd/router/pick"
	"github.com/xpyd/xpyd/router/sense"
)

// maxPrefillAnswer bounds prefill's answer: block ids, token ids, a state.
const maxPrefillAnswer = 16 << 20

func (a *attempt) askPrefill(x *dialect.Exchange) (dialect.Result, *failure) {
	h := a.q.s.Client.Header()
	defer a.q.s.Client.Recycle(h)
	body := a.speak.Prefill(h, x)
	b, err := a.q.s.send(a.p, h, body, nil)
	if err != nil {
		return dialect.Result{}, a.broken(a.p, err)
	}
	a.p.set(legAnswer)
	text, err := b.All(maxPrefillAnswer)
	if err != nil {
		b.Abort()
		return dialect.Result{}, a.broken(a.p, err)
	}
	said := dialect.Answer{Status: b.Header.StatusCode(), ContentType: string(b.Header.ContentType()),
		Outcome: string(b.Header.Peek(dialect.HeaderOutcome)), Body: text}
	b.Finish()
	res := a.speak.Result(said)
	switch {
	case res.Outcome == ticket.Done:
		return res, nil
	case !a.rules.Typed && (said.Status < 200 || said.Status > 299):
		return res, a.refused(a.p, a.d, said)
	}
	return res, a.told(a.p, a.d, res.Outcome, res.Message)
}

// decode sends decode's leg and reads its answer up to where it can still be
// repeated: the whole body, or a stream's first events.
func (a *attempt) askDecode(x *dialect.Exchange) (*answer, *failure) {
	h := a.q.s.Client.Header()
	defer a.q.s.Client.Recycle(h)
	var body [][]byte
	if a.alone {
		body = dialect.Plain(h, x)
	} else {
		body = a.speak.Decode(h, x)
	}
	if a.d.inst.Dialect == sense.NativeDialect && !a.q.top.Stream {
		h.Set(dialect.HeaderMaxAnswer, a.q.s.maxAnswer)
	}
	b, err := a.q.s.send(a.d, h, body, nil)
	if err != nil {
		return nil, a.broken(a.d, err)
	}
	status := b.Header.StatusCode()
	if a.rules.Typed && status < 500 && !a.commit() {
		b.Abort()
		return nil, a.beaten()
	}
	if a.rules.Typed && status >= 300 && status < 500 {
		a.faultOf(a.d, status)
	}
	a.d.set(legAnswer)
	ans := &answer{status: status, contentType: string(b.Header.ContentType()), timing: string(b.Header.Peek("Server-Timing"))}
	if a.rules.Usage && !a.alone {
		ans.merge = a.promptUsage
	}
	if status == 200 && isEventStream(ans.contentType) {
		ans.stream = &events{body: b, mute: true}
		ans.first, err = ans.stream.next()
		if err == nil && !a.rules.Typed {
			err = a.opening(ans.first)
		}
		if err != nil {
			b.Abort()
			if errors.Is(err, errOpening) { // mostly of blocks that it could not get
				a.fault(a.d, pick.Poor)
				return nil, &failure{role: fleet.Decode, id: a.d.inst.ID, reason: reasonStatus, retry: true,
					avoid: []string{a.p.inst.ID, a.d.inst.ID}, err: err}
			}
			return nil, a.broken(a.d, err)
		}
		a.q.firstByte()
		return ans, nil
	}
	if ans.body, err = b.All(a.q.s.MaxResponseBytes); err != nil {
		b.Abort()
		return nil, a.broken(a.d, err)
	}
	outcome := ticket.Outcome(b.Header.Peek(dialect.HeaderOutcome))
	b.Finish()
	if !a.rules.Typed {
		if status < 200 || status > 299 {
			return nil, a.refused(a.d, a.p, dialect.Answer{Status: status, ContentType: ans.contentType, Outcome: string(outcome), Body: ans.body})
		}
		if !a.commit() {
			return nil, a.beaten()
		}
		if ans.merge != nil {
			if u, ok := ans.merge(); ok {
				ans.body = openai.MergeUsage(ans.body, u)
			}
		}
	} else if status >= 500 {
		switch outcome {
		case "":
			a.faultOf(a.d, status)
		case ticket.Refused: // no fault of its own
		case ticket.Invalid: // so it is here, but its device may be broken
			a.fault(a.d, pick.Poor)
		default:
			return nil, a.told(a.d, a.p, outcome, errorMessage(ans.body))
		}
		if !isJSON(ans.contentType) { // not our worker's own words
			return nil, &failure{role: fleet.Decode, id: a.d.inst.ID, reason: reasonStatus, retry: true, avoid: []string{a.d.inst.ID},
				err: fmt.Errorf("status %d", status)}
		}
		if a.hedge != nil { // another attempt may do better
			return nil, &failure{role: fleet.Decode, id: a.d.inst.ID, reason: reasonStatus, status: status, relay: ans,
				err: fmt.Errorf("status %d: %s", status, errorMessage(ans.body))}
		}
	}
	a.q.firstByte()
	return ans, nil
}

// send does a leg's round trip to its worker, with a body that is here or one that
// is still coming.
func (s *Service) send(l *leg, h *fasthttp.RequestHeader, body [][]byte, up *h1.Upload) (*h1.Response, error) {
	addr, err := s.Members.Address(l.inst)
	if err != nil {
		return nil, &h1.Error{Phase: "connect", Err: err}
	}
	l.begin()
	if l.span != nil {
		h.Set("traceparent", l.span.Parent())
	}
	s.Members.Introduce(h, l.inst)
	var b *h1.Response
	if up != nil {
		b, err = s.Client.Upload(&l.Life, addr, h, up, &l.sent)
	} else {
		b, err = s.Client.Do(&l.Life, addr, h, body, &l.sent)
	}
	if err == nil {
		err = s.Members.Admitted(l.inst, b)
	}
	if err != nil {
		return nil, err
	}
	return b, nil
}
