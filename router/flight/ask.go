package flight

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/scarce"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/router/dialect"
	"github.com/xpyd/xpyd/router/h1"
	"github.com/xpyd/xpyd/router/pick"
)

// maxPrefillAnswer bounds prefill's answer: block IDs, token IDs, a state.
const maxPrefillAnswer = 16 << 20

func (a *attempt) askPrefill(x *dialect.Exchange) (dialect.Result, *failure) {
	h := a.q.s.Client.Header()
	defer a.q.s.Client.Recycle(h)
	body := a.speak.Prefill(h, x)
	b, err := a.q.s.send(a.p, h, body, nil)
	if err != nil {
		return dialect.Result{}, a.broken(a.p, err)
	}
	a.p.setState(legAnswer)
	text, err := b.All(maxPrefillAnswer)
	if err != nil {
		return dialect.Result{}, a.broken(a.p, err)
	}
	said := dialect.Reply{Status: b.Header.StatusCode(), ContentType: string(b.Header.ContentType()),
		Outcome: string(b.Header.Peek(ticket.HeaderOutcome)), Body: text}
	b.Finish()
	res := a.speak.Result(said)
	switch {
	case res.Outcome == ticket.Done:
		return res, nil
	case !a.rules.Typed && (said.Status < 200 || said.Status > 299):
		return res, a.refused(a.p, a.d, said)
	}
	return res, a.reported(a.p, a.d, res.Outcome, res.Message)
}

// prompted notes what a worker of ours says of the prompt in its answer's header.
func (a *attempt) prompted(header []byte) {
	prompt, cached, _ := strings.Cut(string(header), " ")
	p, err := strconv.ParseUint(prompt, 10, 26)
	c, cachedErr := strconv.ParseUint(cached, 10, 26)
	if err != nil || cachedErr != nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.usage, a.counted = openai.PromptUsage{Prompt: int(p), Cached: int(c)}, true
}

// askDecode sends decode's leg and reads as much of its answer as can still be repeated: a
// whole body, or a stream's first events.
func (a *attempt) askDecode(x *dialect.Exchange) (*answer, *failure) {
	h := a.q.s.Client.Header()
	defer a.q.s.Client.Recycle(h)
	var body [][]byte
	if a.alone {
		body = dialect.Plain(h, x)
	} else {
		body = a.speak.Decode(h, x)
	}
	if a.rules.MaxAnswer && !a.q.top.Stream {
		h.Set(ticket.HeaderMaxAnswer, a.q.s.maxAnswer)
	}
	if a.q.seam.movable() { // a client waits in the middle of its stream
		a.d.waits.Add(1)
		defer a.d.waits.Add(1)
	}
	b, err := a.q.s.send(a.d, h, body, nil)
	if err != nil {
		return nil, a.broken(a.d, err)
	}
	status := b.Header.StatusCode()
	var smaller []string
	if a.rules.Typed && refusal(status) {
		smaller = a.q.smaller(a.d)
	}
	if a.rules.Typed && status < 500 && smaller == nil && !a.commit() {
		b.Abort()
		return nil, a.beaten()
	}
	if a.rules.Typed && status >= 300 && status < 500 {
		a.countStatus(a.d, status)
	}
	a.d.setState(legAnswer)
	ans := &answer{status: status, contentType: string(b.Header.ContentType()), timing: string(b.Header.Peek("Server-Timing")), length: -1}
	if a.rules.Usage && !a.alone {
		ans.merge = a.promptUsage
	} else {
		a.prompted(b.Header.Peek(ticket.HeaderPrompt))
	}
	if status == 200 && isEventStream(ans.contentType) {
		ans.events = &events{body: b, mute: true}
		ans.first, err = ans.events.next()
		if err == nil && !a.rules.Typed {
			err = a.opening(ans.first)
		}
		if err != nil {
			b.Abort()
			if errors.Is(err, errOpening) { // mostly because it could not get the blocks
				a.fault(a.d, pick.Poor)
				return nil, &failure{by: a.d, reason: reasonStatus, retry: true,
					avoid: []string{a.p.inst.ID, a.d.inst.ID}, err: err}
			}
			return nil, a.broken(a.d, err)
		}
		a.q.firstByte()
		return ans, nil
	}
	if ans.body, err = b.All(a.q.s.MaxResponseBytes); err != nil {
		return nil, a.broken(a.d, err)
	}
	outcome := ticket.Outcome(b.Header.Peek(ticket.HeaderOutcome))
	b.Finish()
	if !a.rules.Typed {
		if status < 200 || status > 299 {
			return nil, a.refused(a.d, a.p, dialect.Reply{Status: status, ContentType: ans.contentType, Outcome: string(outcome), Body: ans.body})
		}
		if len(ans.body) == 0 {
			a.fault(a.d, pick.Broken)
			return nil, &failure{by: a.d, reason: reasonStatus, retry: true, avoid: []string{a.d.inst.ID}, err: errors.New("its answer is empty")}
		}
		if !a.commit() {
			return nil, a.beaten()
		}
		if ans.merge != nil {
			if u, ok := ans.merge(); ok {
				ans.body = openai.MergeUsage(ans.body, u)
			}
		}
	} else if smaller != nil {
		return nil, a.cramped(a.d, smaller, ans)
	} else if status >= 500 {
		switch outcome {
		case "":
			a.countStatus(a.d, status)
		case ticket.Refused: // not its fault
		case ticket.Invalid: // nor here, unless its device is broken
			a.fault(a.d, pick.Poor)
		default:
			return nil, a.reported(a.d, a.p, outcome, openai.ErrorMessage(ans.body))
		}
		if !isJSON(ans.contentType) { // not our worker's own words
			return nil, &failure{by: a.d, reason: reasonStatus, retry: true, avoid: []string{a.d.inst.ID},
				err: fmt.Errorf("status %d", status)}
		}
		if a.hedge != nil { // the other attempt may do better
			return nil, &failure{by: a.d, reason: reasonStatus, status: status, relay: ans,
				err: fmt.Errorf("status %d: %s", status, openai.ErrorMessage(ans.body))}
		}
	}
	a.q.firstByte()
	return ans, nil
}

// send sends a leg's request to its worker, with a body that is here or one that is still
// coming, and reads the answer's header.
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

// facts is what prefill engines have said about themselves.
type facts struct {
	mu   sync.Mutex
	byID map[string]known
}

type known struct {
	epoch uint64
	facts dialect.Facts
}

// forget has the next attempt ask the engine again.
func (k *facts) forget(inst *fleet.Instance) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.byID, inst.ID)
}

func (k *facts) get(inst *fleet.Instance) (dialect.Facts, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	v, ok := k.byID[inst.ID]
	return v.facts, ok && v.epoch == inst.Epoch
}

func (k *facts) put(inst *fleet.Instance, f dialect.Facts) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.byID[inst.ID] = known{inst.Epoch, f}
}

func (k *facts) prune(s *fleet.Snapshot) {
	k.mu.Lock()
	defer k.mu.Unlock()
	maps.DeleteFunc(k.byID, func(id string, v known) bool {
		m := s.Get(id)
		return m == nil || m.State == fleet.Gone || m.Epoch != v.epoch
	})
}

// askTimeout bounds a question to an engine that is not a leg.
const askTimeout = 2 * time.Second

// learnFacts fills in what the dialect must know of prefill, asking the engine if needed.
func (a *attempt) learnFacts(x *dialect.Exchange) *failure {
	if a.speak.Ask == nil || a.alone {
		return nil
	}
	s := a.q.s
	var ok bool
	if x.Facts, ok = s.facts.get(a.p.inst); ok {
		return nil
	}
	body, err := s.getSmall(&a.p.Life, a.speak.Ask(a.p.inst))
	if err == nil {
		x.Facts, err = a.speak.Learn(body)
	}
	if scarce.Ours(err) {
		return shortage(a.p, err)
	}
	if err != nil { // its bootstrap is down, which says nothing about its other port
		return &failure{by: a.p, outcome: ticket.Dead, reason: reasonTransport, retry: true,
			avoid: []string{a.p.inst.ID}, err: fmt.Errorf("ask its bootstrap: %w", err)}
	}
	s.facts.put(a.p.inst, x.Facts)
	return nil
}

func (s *Service) getSmall(asker *h1.Life, url string) ([]byte, error) {
	addr, err := h1.Address(url)
	if err != nil {
		return nil, err
	}
	var q h1.Life
	defer q.End(errOver)
	defer asker.OnEnd(func() { q.End(asker.Cause()) })()
	defer time.AfterFunc(askTimeout, func() { q.End(context.DeadlineExceeded) }).Stop()
	var h fasthttp.RequestHeader
	h.SetMethod(fasthttp.MethodGet)
	_, path, _ := strings.Cut(url[strings.Index(url, "//")+2:], "/")
	h.SetRequestURI("/" + path)
	b, err := s.Client.Do(&q, addr, &h, nil, nil)
	if err != nil {
		return nil, err
	}
	defer b.Finish()
	if s := b.Header.StatusCode(); s != 200 {
		return nil, &h1.Error{Phase: "answer", Err: fmt.Errorf("%s: status %d", url, s)}
	}
	return b.All(1 << 20)
}
