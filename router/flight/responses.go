package flight

import (
	"errors"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/responses"
	"github.com/xpyd/xpyd/router/h1"
	"github.com/xpyd/xpyd/router/kept"
)

// Responses serves /v1/responses by a chat.
func (s *Service) Responses(ctx *fasthttp.RequestCtx, id string) {
	q := s.clientRequest(ctx, id)
	asked, err := q.askedFor(ctx)
	if err != nil {
		q.reply(ctx, nil, err)
		return
	}
	if asked.Background {
		s.background.begin(ctx, q, asked)
		return
	}
	q.translated(asked.chat, asked.Answer(asked.options))
	ans, err := q.generate(ctx)
	q.reply(ctx, ans, err)
}

// askedResponse is a request for a response, and what it goes on with.
type askedResponse struct {
	*responses.Request
	options responses.Options
	chat    []byte
	before  []string
}

// input is what is kept of it.
func (a *askedResponse) input() []byte {
	if a.Input == nil {
		return []byte("[]")
	}
	return slices.Clone(a.Input)
}

func (q *request) askedFor(ctx *fasthttp.RequestCtx) (*askedResponse, *openai.Error) {
	asked, err := responses.Parse(ctx.PostBody())
	if err != nil {
		return nil, err
	}
	s, owner := q.s, ownerOf(q.tenant)
	if asked.Background && !s.responses.On() {
		return nil, openai.BadRequest("background", "background needs responses to be kept, and none are here")
	}
	out := &askedResponse{Request: asked}
	var turns []responses.Turn
	if asked.Previous != "" {
		if out.before, turns, err = q.turns(owner, asked.Previous); err != nil {
			return nil, err
		}
	}
	out.chat, err = asked.Chat(turns, q.lookup(owner), s.MaxBodyBytes)
	switch {
	case err != nil:
		return nil, err
	case len(out.chat) > s.MaxBodyBytes:
		return nil, openai.TooLarge("the conversation is larger than %d bytes", s.MaxBodyBytes)
	}
	o := &out.options
	*o = responses.Options{ID: newID("resp_"), Most: s.MaxResponseBytes}
	if asked.Stream {
		o.Most = min(o.Most, maxEvent)
	}
	if !s.responses.On() {
		asked.Forget()
	}
	if asked.Store && !asked.Background {
		input := out.input()
		o.Keep = func(response []byte) {
			e := &kept.Entry{Owner: owner, Before: out.before, Input: input, Response: slices.Clone(response)}
			err := errNoText
			if responses.Output(response) != nil { // else nobody could go on with it
				err = s.responses.Put(&q.ctx, o.ID, e)
			}
			if err != nil {
				s.Log.Warn("a response is not kept", "request_id", q.id, "response", o.ID, "err", err)
			}
		}
	}
	return out, nil
}

// errNoText is an engine's answer that a client may be able to read, as we pass on what is said.
var errNoText = errors.New("it is not valid UTF-8")

// turns is what a request goes on with: the responses' IDs, and what was said.
func (q *request) turns(owner, previous string) (before []string, turns []responses.Turn, _ *openai.Error) {
	status := ""
	if r := q.s.background.find(owner, previous); r != nil {
		status = responses.Status(r.snapshot())
	}
	var chain []*kept.Entry
	if !unfinished(status) {
		var err error
		if chain, err = q.s.responses.Chain(&q.ctx, owner, previous); err != nil {
			return nil, nil, q.s.lost("previous_response_id", previous, err)
		}
		status = responses.Status(chain[len(chain)-1].Response)
	}
	if unfinished(status) || status == "failed" {
		return nil, nil, openai.BadRequest("previous_response_id", "the response '%s' is %s: nothing can go on with it", openai.Clip(previous), status)
	}
	last := chain[len(chain)-1]
	if len(last.Before) >= kept.MaxChain {
		return nil, nil, openai.BadRequest("previous_response_id", "the conversation has more than %d responses; begin a new one with what it needs as input", kept.MaxChain)
	}
	for _, e := range chain {
		turns = append(turns, responses.Turn{Input: e.Input, Output: responses.Output(e.Response)})
	}
	return append(slices.Clone(last.Before), previous), turns, nil
}

// unfinished reports whether a response of a status is not over.
func unfinished(status string) bool { return status == "queued" || status == "in_progress" }

// lookup finds items that a request refers to, in the responses that they are of.
func (q *request) lookup(owner string) responses.Lookup {
	found := map[string]responses.Turn{}
	return func(id string) ([]byte, *openai.Error) {
		of := responses.ResponseOf(id)
		turn, ok := found[of]
		if !ok {
			if len(found) == kept.MaxChain {
				return nil, openai.BadRequest("input", "input refers to items of more than %d responses", kept.MaxChain)
			}
			e, err := q.s.responses.Find(&q.ctx, owner, of)
			if err != nil {
				return nil, q.s.lost("input", of, err)
			}
			turn = responses.Turn{Input: e.Input, Output: responses.Output(e.Response)}
			found[of] = turn
		}
		if raw := responses.Item(id, turn); raw != nil {
			return raw, nil
		}
		e := openai.NotFound("the item %s is not known", openai.Clip(id))
		e.Param = "input"
		return nil, e
	}
}

// lost is what a client is told that asks for a response that is not there.
func (s *Service) lost(param, id string, err error) *openai.Error {
	if !errors.Is(err, kept.ErrNone) {
		return openai.Unavailable("responses cannot be looked up now: %v", err)
	}
	what := ""
	if missing, ok := errors.AsType[*kept.MissingError](err); ok {
		what = " goes on with '" + openai.Clip(missing.ID) + "', which was"
	}
	var why string
	switch {
	case !s.responses.On():
		why = "no responses are kept here"
	case s.responses.Shared():
		why = "it was made with store: false, deleted, not used for too long, or is another API key's"
	default:
		why = "it was made with store: false, deleted, not used for too long, dropped to make room, another API key's, or another router's, which keeps its own"
	}
	e := openai.NotFound("Response with id '%s'%s not found: %s", openai.Clip(id), what, why) // as others begin it
	e.Param, e.Code = param, "response_not_found"
	return e
}

// ownerOf is whose a response is: the API key's, and of those for whom a gateway asks the one that it names.
func ownerOf(t *tenant) string {
	if t == nil {
		return ""
	}
	return t.key.Name + "\x00" + t.name
}

// keptPath is the label of responses that are kept.
const keptPath = "/v1/responses/{id}"

// KeptResponse serves /v1/responses/NAME and what is below it.
func (s *Service) KeptResponse(ctx *fasthttp.RequestCtx, id, rest string) {
	if !s.Keyed(ctx) {
		s.Refuse(ctx, id, keptPath, openai.Unauthorized("the API key is missing or wrong, or it has expired"))
		return
	}
	name, below, _ := strings.Cut(rest, "/")
	run := s.background.find(ownerOf(tenantOf(ctx)), name)
	if err := streamArgs(ctx.QueryArgs()); err != nil {
		s.Refuse(ctx, id, keptPath, err)
		return
	}
	if ctx.QueryArgs().GetBool("stream") && h1.Method(ctx) == "GET" && below == "" && run != nil {
		if err := s.retell(ctx, run); err != nil {
			s.Refuse(ctx, id, keptPath, err)
			return
		}
		s.Brief(ctx, id, keptPath)
		return
	}
	body, err := s.keptResponse(ctx, run, name, below)
	if err != nil {
		s.Refuse(ctx, id, keptPath, err)
		return
	}
	h1.WriteJSON(ctx, 200, body)
	s.Brief(ctx, id, keptPath)
}

// streamArgs refuses what asks for a stream in a way that would be passed over.
func streamArgs(args *fasthttp.Args) *openai.Error {
	switch stream := string(args.Peek("stream")); {
	case !slices.Contains([]string{"", "true", "false", "1", "0"}, stream):
		return openai.BadRequest("stream", "stream must be true or false, not %q", openai.Clip(stream))
	case args.Has("starting_after") && !args.GetBool("stream"):
		return openai.BadRequest("starting_after", "starting_after goes with stream=true")
	}
	return nil
}

// retell tells a response's events again, behind the one that the client has, and those that are to come.
func (s *Service) retell(ctx *fasthttp.RequestCtx, r *run) *openai.Error {
	from, after := 0, ctx.QueryArgs().Peek("starting_after")
	if len(after) > 0 {
		n, err := strconv.ParseInt(string(after), 10, 32)
		if err != nil || n < 0 {
			return openai.BadRequest("starting_after", "starting_after must be the number of an event")
		}
		from = int(n) + 1
	}
	s.background.mu.Lock()
	begins := r.begins
	s.background.mu.Unlock()
	switch {
	case !r.streams:
		return openai.BadRequest("stream", "the response was not made with stream: true")
	case from < begins:
		return openai.BadRequest("starting_after", "events up to %d are not there any more", begins-1)
	}
	r.tell(ctx, from)
	return nil
}

// standing is an entry as it stands now: what is not over by the time that it says is lost.
func standing(e *kept.Entry) *kept.Entry {
	if e.Until == 0 || time.Now().Unix() <= e.Until {
		return e
	}
	lost := *e
	lost.Response, lost.Until = responses.Lost(e.Response), 0
	return &lost
}

func elsewhere(id string) *openai.Error {
	return openai.BadRequest("response_id", "the response '%s' runs at another router, which alone can stream, cancel or delete it", openai.Clip(id)).WithStatus(409, "response_elsewhere")
}

func (s *Service) keptResponse(ctx *fasthttp.RequestCtx, run *run, name, below string) ([]byte, *openai.Error) {
	owner, args := ownerOf(tenantOf(ctx)), ctx.QueryArgs()
	find := func() (*kept.Entry, *openai.Error) {
		if run != nil {
			return &kept.Entry{Input: run.entry.Input, Response: run.snapshot()}, nil
		}
		e, err := s.responses.Find(s.Ctx, owner, name)
		if err != nil {
			return nil, s.lost("response_id", name, err)
		}
		return standing(e), nil
	}
	switch method := h1.Method(ctx); method + " " + below {
	case "GET ":
		e, err := find()
		switch {
		case err != nil:
			return nil, err
		case !args.GetBool("stream"):
			return e.Response, nil
		case unfinished(responses.Status(e.Response)):
			return nil, elsewhere(name)
		}
		return nil, openai.BadRequest("stream", "a response that is over is not streamed again, but for the latest that were made in the background with stream: true")
	case "DELETE ":
		if run != nil {
			run.delete()
		} else if e, err := find(); err != nil {
			return nil, err
		} else if unfinished(responses.Status(e.Response)) {
			return nil, elsewhere(name)
		}
		if err := s.responses.Delete(s.Ctx, owner, name); err != nil {
			if run == nil || !errors.Is(err, kept.ErrNone) {
				return nil, s.lost("response_id", name, err)
			}
		}
		return append(openai.AppendString([]byte(`{"id":`), name), `,"object":"response","deleted":true}`...), nil
	case "GET input_items":
		page := responses.Page{Limit: 20, Asc: string(args.Peek("order")) == "asc", After: string(args.Peek("after"))}
		if limit := args.Peek("limit"); len(limit) > 0 {
			n, err := strconv.Atoi(string(limit))
			if err != nil || n < 1 || n > 100 {
				return nil, openai.BadRequest("limit", "limit must be between 1 and 100")
			}
			page.Limit = n
		}
		e, err := find()
		if err != nil {
			return nil, err
		}
		return responses.List(nil, e.Input, name, page)
	case "POST cancel":
		if run != nil {
			return run.cancel(), nil
		}
		e, err := find()
		switch {
		case err != nil:
			return nil, err
		case unfinished(responses.Status(e.Response)):
			return nil, elsewhere(name)
		case responses.InBackground(e.Response):
			return e.Response, nil
		}
		return nil, openai.BadRequest("response_id", "Cannot cancel a synchronous response. To end one, close its connection")
	default:
		var allowed string
		switch below {
		case "":
			allowed = "GET, DELETE"
		case "input_items":
			allowed = "GET"
		case "cancel":
			allowed = "POST"
		default:
			return nil, openai.NotFound("there is no %s", openai.Clip(string(ctx.Path())))
		}
		ctx.Response.Header.Set("Allow", allowed)
		return nil, openai.BadRequest("", "%s is not allowed here, use %s", openai.Clip(method), allowed).WithStatus(405, "method_not_allowed")
	}
}
