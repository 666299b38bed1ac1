package flight

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
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
)

// runInOrder lets prefill answer, and then gives decode what it kept. The two
// follow each other on the handler's goroutine; each leg's end, also by its
// worker's death, ends the attempt.
func (a *attempt) runInOrder(x *dialect.Exchange) (*answer, *failure) {
	stop := a.d.OnEnd(func() { // decode died, and will not collect
		cause := a.d.Cause()
		if errors.Is(cause, errInstanceDead) {
			cause = &failure{role: fleet.Decode, id: a.d.inst.ID, outcome: ticket.Dead, reason: reasonDead, err: cause, retry: true,
				exclude: []string{a.d.inst.ID}}
		}
		a.p.End(cause)
	})
	res, f := a.askPrefill(x)
	alive := stop()
	if f != nil {
		a.choice.EndPrefill()
		a.p.fail()
		a.d.set(legUnused)
		a.mu.Lock()
		a.outcome = res.Outcome
		a.mu.Unlock()
		close(a.pDone)
		return nil, f
	}
	a.choice.DonePrefill()
	a.p.set(legDone)
	a.heard(res)
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
	a.p.set(legUnused)
	if a.falls == "" {
		defer a.choice.EndPrefill() // it computes the prompt until its first event
		return a.askDecode(x)
	}
	a.choice.EndPrefill()
	if !a.rules.Falls || !a.q.s.Fallback {
		return nil, &failure{role: fleet.Decode, id: a.d.inst.ID, api: openai.BadRequest(string(a.falls),
			"%s: engines of dialect %q cannot split such a request between prefill and decode", a.falls, a.d.inst.Dialect)}
	}
	a.q.s.metrics.fallbacks.WithLabelValues(string(a.falls)).Inc()
	return a.askDecode(x)
}

// final answers with prefill's words, which left nothing to decode.
func (a *attempt) final(body []byte) (*answer, *failure) {
	if !a.commit() {
		return nil, a.beaten()
	}
	a.d.set(legUnused)
	a.q.firstByte()
	if !a.q.top.Stream {
		return &answer{status: 200, contentType: "application/json", body: body}, nil
	}
	return &answer{status: 200, contentType: "text/event-stream", body: asEvents(body)}, nil
}

// asEvents is a whole answer as a stream of one event and the end.
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

// promptUsage is what prefill has counted, if it has. Its answer may be a
// moment behind decode's.
func (a *attempt) promptUsage() (openai.PromptUsage, bool) {
	if !a.asked { // once: a stream may tell its usage with each event
		a.asked = true
		await(a.pDone)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.usage, a.counted
}

// endWatch ends watch; a.mu is held.
func (a *attempt) endWatch() {
	if a.unwatch != nil {
		a.unwatch()
		a.unwatch = nil
	}
}

// errOpening is a stream that begins with an error: its 200 was early.
var errOpening = errors.New("its stream begins with an error")

// opening commits decode on its first event.
func (a *attempt) opening(first []byte) error {
	if event := said(first); isError(event) {
		text := dataOf(event)
		if i := bytes.IndexAny(text, "\r\n"); i >= 0 {
			text = text[:i]
		}
		return &h1.Error{Phase: "answer", Err: fmt.Errorf("%w: %s", errOpening, errorMessage(text))}
	}
	if !a.commit() {
		return a.beaten()
	}
	return nil
}

// refused is the failure of an engine that answered other than 2xx. What is
// wrong with the request is the client's to hear; all else may go better with
// another pair.
func (a *attempt) refused(by, partner *leg, said dialect.Answer) *failure {
	if o := ticket.Outcome(said.Outcome); o != "" && o != ticket.Refused {
		return a.told(by, partner, o, errorMessage(said.Body))
	}
	f := &failure{role: by.role, id: by.inst.ID, reason: reasonStatus, status: said.Status, retry: true, avoid: []string{by.inst.ID},
		err: fmt.Errorf("status %d: %s", said.Status, errorMessage(said.Body))}
	a.faultOf(by, said.Status)
	switch said.Status {
	case 400, 413, 422:
		f.retry = false
		f.relay = &answer{status: said.Status, contentType: "application/json", body: said.Body}
		if !bytes.HasPrefix(openai.Member(said.Body, "error"), []byte("{")) {
			e := openai.BadRequest("", "%s", errorMessage(said.Body))
			e.Status = said.Status
			f.relay.body = e.Append(nil)
		}
	case 429, 503:
		f.outcome = ticket.NoSpace
	}
	return f
}

// facts is what prefill engines said about themselves.
type facts struct {
	mu   sync.Mutex
	byID map[string]known
}

type known struct {
	epoch uint64
	facts dialect.Facts
}

// forget makes the next exchange ask again.
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

// prune forgets what engines said that are no more.
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

// ask finds out what the dialect must know of prefill.
func (a *attempt) ask(x *dialect.Exchange) *failure {
	if a.speak.Ask == nil || a.alone {
		return nil
	}
	s := a.q.s
	var ok bool
	if x.Facts, ok = s.facts.get(a.p.inst); ok {
		return nil
	}
	body, err := s.question(&a.p.Life, a.speak.Ask(a.p.inst))
	if err == nil {
		x.Facts, err = a.speak.Learn(body)
	}
	if scarce.Ours(err) {
		return shortage(a.p, err)
	}
	if err != nil { // its bootstrap is not there; that says nothing about its other port
		return &failure{role: fleet.Prefill, id: a.p.inst.ID, outcome: ticket.Dead, reason: reasonTransport, retry: true,
			avoid: []string{a.p.inst.ID}, err: fmt.Errorf("ask its bootstrap: %w", err)}
	}
	s.facts.put(a.p.inst, x.Facts)
	return nil
}

// question GETs a small answer.
func (s *Service) question(asker *h1.Life, url string) ([]byte, error) {
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
