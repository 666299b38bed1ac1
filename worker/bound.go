package worker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/engine/handoff"
	"github.com/xpyd/xpyd/internal/bind"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kernels"
)

// grammarMemory is about how much compiled grammars may take.
const grammarMemory = 256 << 20

// newBinder makes what binds answers to grammars.
func (w *Worker) newBinder() error {
	took := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "xpyd_worker_grammar_seconds",
		Help: "Time until a request's grammar was there: compiled, or found among those compiled before.", Buckets: prometheus.ExponentialBuckets(0.00001, 4, 10)})
	refused := prometheus.NewCounter(prometheus.CounterOpts{Name: "xpyd_worker_grammars_refused_total",
		Help: "Grammars that could not be compiled: answered with 400, which says why."})
	for _, c := range []prometheus.Collector{took, refused} {
		if err := w.registry.Register(c); err != nil {
			return err
		}
	}
	w.binder = bind.New(bind.Config{Tokenizer: w.tok, Vocab: w.vocab(), Ends: w.eos, Think: w.formats.think, Bytes: grammarMemory,
		Found: func(d time.Duration, err error) {
			took.Observe(d.Seconds())
			if err != nil {
				refused.Inc()
			}
		}})
	return nil
}

// bind has a job's answers be what the spec says. field is where the request says so.
func (w *Worker) bind(ctx *fasthttp.RequestCtx, j *job, field string, spec *handoff.Guide) error {
	if len(spec.Text) > handoff.MaxGrammar {
		return openai.BadRequest(field, "%s: %d bytes bind the answer; %d is the limit", field, len(spec.Text), handoff.MaxGrammar)
	}
	waits, cancel := context.WithCancelCause(w.ctx)
	defer cancel(nil)
	defer w.clients.Watch(ctx.Conn(), func() { cancel(errClientLeft) })()
	var bad *bind.Error
	var err error
	switch j.guide, err = w.binder.Bind(waits, spec); {
	case errors.As(err, &bad):
		if i := slices.IndexFunc(j.callable, func(t function) bool { return t.Name == bad.Tool }); i >= 0 && bad.Tool != "" {
			field = fmt.Sprintf("tools[%d].function.parameters", i)
		}
		return openai.BadRequest(field, "%s: %v", field, bad)
	case waits.Err() != nil:
		return openai.Unavailable("%v", context.Cause(waits))
	case err != nil:
		return openai.BadRequest(field, "%s: %v", field, err)
	}
	j.bound = spec
	if !w.begins(j) {
		return openai.BadRequest(field, "%s: no token of the vocabulary that is allowed can begin the answer", field).WithStatus(400, codeDeadEnd)
	}
	return nil
}

// begins reports whether there is a first token that a job's guide and its allowed_token_ids both let come, or an end.
func (w *Worker) begins(j *job) bool {
	mask := make([]uint32, kernels.MaskWords(w.vocab()))
	j.guide.Fork().Mask(mask)
	if len(j.AllowedIDs) == 0 {
		return slices.ContainsFunc(mask, func(word uint32) bool { return word != 0 })
	}
	may := func(id int32) bool { return mask[id/32]&(1<<(id%32)) != 0 }
	return slices.ContainsFunc(j.AllowedIDs, may) || slices.ContainsFunc(w.eos, may)
}

func specOf(c *openai.Constraint) *handoff.Guide {
	return &handoff.Guide{Kind: string(c.Kind), Text: c.Text, Compact: c.Compact}
}

// bindChat has a chat's answers be what its fields say: text, behind the reasoning, or calls.
func (w *Worker) bindChat(ctx *fasthttp.RequestCtx, j *job, c *openai.Chat) error {
	must, name, err := mustCall(c)
	if err != nil {
		return err
	}
	r := &j.reading
	switch {
	case must && c.Constraint != nil:
		return openai.BadRequest(c.Constraint.Field, "%s and tool_choice both say what the answer must be; give one of them", c.Constraint.Field)
	case !must && c.Constraint == nil:
		return w.bindStrict(ctx, j, c)
	case c.Constraint != nil: // is text, whatever it looks like
		r.tool, r.options.Tools, r.marks = nil, nil, w.formats.thinkMarks
		spec := specOf(c.Constraint)
		spec.Begin, spec.Thinks = r.think.Before(), r.thinks()
		r.options.Bound = true
		return w.bind(ctx, j, c.Constraint.Field, spec)
	}
	calls := bind.Calls{Several: !c.OneCall && name == "", First: calledBefore(c.Messages)}
	if r.tool != nil {
		calls.Format = r.tool.Name
	}
	tools, err := functions(c.Tools, name)
	if err != nil {
		return err
	}
	for _, t := range tools {
		t.Free = false
		calls.Tools = append(calls.Tools, t.Tool)
	}
	if j.callable, err = functions(c.Tools, ""); err != nil {
		return err
	}
	r.options.Bound, r.named = true, name != ""
	return w.bindCalls(ctx, j, "tool_choice", bind.KindCalls, &calls, r.thinks())
}

// bindStrict has calls of a chat's strict tools be as their schemas say. The answer is free otherwise.
func (w *Worker) bindStrict(ctx *fasthttp.RequestCtx, j *job, c *openai.Chat) error {
	r := &j.reading
	if r.tool == nil || !c.UsesTools() || !bytes.Contains(c.Tools, []byte(`"strict"`)) {
		return nil
	}
	tools, err := functions(c.Tools, "")
	if err != nil || !slices.ContainsFunc(tools, func(t function) bool { return t.Strict }) {
		return err
	}
	calls := bind.Calls{Format: r.tool.Name, Several: true, First: calledBefore(c.Messages)}
	for _, t := range tools {
		t.Free = !t.Strict
		calls.Tools = append(calls.Tools, t.Tool)
	}
	r.options.Bound, j.callable = true, tools
	thinks := r.thinks()
	if r.think.Before() != "" { // reasoning is in messages of its own, between calls too
		thinks = handoff.ThinksNot
	}
	return w.bindCalls(ctx, j, "tools", bind.KindMayCall, &calls, thinks)
}

// bindCalls has a job's answers be calls, or have such as are bound. field is where the request says so.
func (w *Worker) bindCalls(ctx *fasthttp.RequestCtx, j *job, field, kind string, calls *bind.Calls, thinks handoff.Thinks) error {
	text, err := calls.Encode()
	if err != nil {
		return openai.BadRequest("tools", "%v", err)
	}
	return w.bind(ctx, j, field, &handoff.Guide{Kind: kind, Text: text, Thinks: thinks})
}

// calledBefore counts the calls in a chat's messages.
func calledBefore(messages []json.RawMessage) (n int) {
	for _, raw := range messages {
		var m struct {
			Calls []struct{} `json:"tool_calls"`
		}
		if bytes.Contains(raw, []byte(`"tool_calls"`)) && json.Unmarshal(raw, &m) == nil {
			n += len(m.Calls)
		}
	}
	return n
}

// thinks says where the prompt leaves the model's reasoning.
func (r *reading) thinks() handoff.Thinks {
	switch {
	case r.think == nil || r.options.Thought:
		return handoff.ThinksNot
	case r.options.Thinking || r.think.Opened():
		return handoff.ThinksNow
	case r.direct && r.think.Before() == "": // whether or not the template knows the switch
		return handoff.ThinksNot
	}
	return handoff.ThinksMay
}

// mustCall reads tool_choice: whether the model must call a tool, and which; "" is any.
func mustCall(c *openai.Chat) (must bool, name string, err error) {
	switch string(c.ToolChoice) {
	case "", `"auto"`, `"none"`:
		return false, "", nil
	case `"required"`:
		if c.Tools == nil {
			return false, "", openai.BadRequest("tool_choice", "tool_choice required needs tools")
		}
		return true, "", nil
	}
	var one struct {
		Type     string
		Function struct{ Name string }
	}
	if json.Unmarshal(c.ToolChoice, &one) != nil || one.Type != "function" || one.Function.Name == "" {
		return false, "", openai.BadRequest("tool_choice", `tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": …}}`)
	}
	return true, one.Function.Name, nil
}

// function is a tool that may be called.
type function struct {
	bind.Tool
	Strict bool // whatever the request says, its arguments are as its schema says
}

// functions are the tools that may be called: all, or the one of that name.
func functions(tools json.RawMessage, name string) (list []function, err error) {
	var all []struct {
		Type     string
		Function function
	}
	if tools != nil {
		if err := json.Unmarshal(tools, &all); err != nil {
			return nil, openai.BadRequest("tools", "tools: %v", err)
		}
	}
	for _, t := range all {
		if t.Type == "function" && (name == "" || t.Function.Name == name) {
			list = append(list, t.Function)
		}
	}
	switch {
	case len(list) > 0:
	case name != "":
		return nil, openai.BadRequest("tool_choice", "tool_choice names the function %.80q, which is not among tools", name)
	default:
		return nil, openai.BadRequest("tools", "none of the tools is a function")
	}
	return list, nil
}
