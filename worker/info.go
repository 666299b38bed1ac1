package worker

import (
	"encoding/json"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/prefill"
)

func (w *Worker) serveModels(*fasthttp.RequestCtx) (any, error) {
	return openai.AppendModels(nil, []openai.Model{{ID: w.served, Created: w.started.Unix(), MaxModelLen: w.engine.MaxModelLen()}}), nil
}

// tokenizeBytes of text are tokenised however short the model's context is: people count the tokens
// of text that they are about to cut.
const tokenizeBytes = 1 << 20

func (w *Worker) checkModel(name string) error {
	if name != "" && name != w.served {
		return openai.ModelNotFound(name)
	}
	return nil
}

func (w *Worker) serveTokenize(ctx *fasthttp.RequestCtx) (any, error) {
	t, fail := openai.ParseTokenize(ctx.PostBody(), w.vocab())
	if fail != nil {
		return nil, fail
	}
	err := w.checkModel(t.Model)
	var ids []int32
	switch {
	case err != nil:
	case t.Chat != nil:
		var p *prompt
		if p, err = w.renderChat(ctx, t.Chat, nil, time.Now()); err == nil {
			ids = p.tokens
		}
	default:
		if err = w.checkText("prompt", t.Prompt, tokenizeBytes); err == nil {
			ids = w.tok.Encode(t.Prompt, t.AddSpecial)
		}
	}
	if err != nil {
		return nil, err
	}
	var strs []string
	if t.ReturnStrs {
		strs = make([]string, len(ids))
		for i, id := range ids {
			strs[i] = w.tok.Piece(id)
		}
	}
	return openai.AppendTokenized(nil, ids, strs, w.engine.MaxModelLen()), nil
}

func (w *Worker) serveDetokenize(ctx *fasthttp.RequestCtx) (any, error) {
	d, fail := openai.ParseDetokenize(ctx.PostBody(), w.vocab())
	if fail != nil {
		return nil, fail
	}
	if err := w.checkModel(d.Model); err != nil {
		return nil, err
	}
	if most := int(w.cfg.MaxAnswer); openai.MaxHead+len(d.Tokens)*w.sizes.Text > most {
		return nil, openai.AnswerTooLarge("tokens", "%d tokens could be more than %d bytes of text, which is the limit; ask for fewer at a time", len(d.Tokens), most)
	}
	return openai.AppendDetokenized(nil, w.tok.Decode(d.Tokens, true)), nil
}

// serveTokenizerInfo answers what a tokenizer_config.json has, as vLLM does.
func (w *Worker) serveTokenizerInfo(*fasthttp.RequestCtx) (any, error) {
	info := map[string]any{"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": w.engine.MaxModelLen(), "chat_template": nil}
	if t := w.tok.ChatTemplate(); t != "" {
		info["chat_template"] = t
	}
	for name, token := range w.tok.SpecialTokens() {
		info[name] = token
	}
	return info, nil
}

func (w *Worker) serveVersion(*fasthttp.RequestCtx) (any, error) {
	return append(openai.AppendString([]byte(`{"version":`), w.build), '}'), nil
}

// serveHealth answers whether the engine works, and names this run of the worker.
func (w *Worker) serveHealth(ctx *fasthttp.RequestCtx) (any, error) {
	is := fleet.Instance{ID: w.identity.ID, Epoch: w.identity.Epoch}
	ctx.Response.Header.Set(fleet.HeaderInstance, is.Is())
	if err := w.engine.Health(); err != nil {
		return nil, openai.Unavailable("engine: %v", err)
	}
	return []byte(`{"status":"ok"}`), nil
}

// serveProfile turns profiling on and off and hands out the profile; see profile.Serve.
func (w *Worker) serveProfile(ctx *fasthttp.RequestCtx) (any, error) {
	if err := w.profile.Serve(ctx); err != nil {
		return nil, err
	}
	return nil, nil
}

func (w *Worker) serveSteps(*fasthttp.RequestCtx) (any, error) { return w.engine.Steps(), nil }

// Ledger is everything that this process holds for somebody; it is empty when idle.
type Ledger struct {
	ID       string           `json:"id"`
	Epoch    uint64           `json:"epoch"`
	Role     fleet.Role       `json:"role"`
	Requests []Running        `json:"requests"`
	Blocks   []kvcache.Holder `json:"blocks"`
	Tickets  []kvconn.Entry   `json:"tickets"`
	Held     []prefill.Entry  `json:"held"` // leases and links
}

// Empty reports whether nothing is held, quarantined blocks aside.
func (l *Ledger) Empty() bool {
	for _, h := range l.Blocks {
		if h.State != kvcache.StateQuarantined {
			return false
		}
	}
	return len(l.Requests)+len(l.Tickets)+len(l.Held) == 0
}

// Ledger returns what this process holds now. Its lists are never nil: [] in JSON, not null.
func (w *Worker) Ledger() *Ledger {
	return &Ledger{ID: w.identity.ID, Epoch: w.identity.Epoch, Role: w.Role(), Requests: w.requests.ledger(),
		Blocks: append([]kvcache.Holder{}, w.cache.Holders()...), Held: append([]prefill.Entry{}, w.prefill.Ledger()...),
		Tickets: append(append([]kvconn.Entry{}, w.recv.Ledger()...), w.server.Ledger()...)}
}

func (w *Worker) serveLedger(*fasthttp.RequestCtx) (any, error) { return w.Ledger(), nil }

// serveDrain drains. Unless its body says wait_only, routers may move the streams to other workers.
func (w *Worker) serveDrain(ctx *fasthttp.RequestCtx) (any, error) {
	var body struct {
		WaitOnly bool `json:"wait_only"`
	}
	if b := ctx.PostBody(); len(b) > 0 {
		if err := json.Unmarshal(b, &body); err != nil {
			return nil, openai.BadRequest("wait_only", "read the body: %v", err)
		}
	}
	err := w.fleet.update(func(i *fleet.Instance) { i.Draining, i.WaitOnly = true, body.WaitOnly })
	return w.Instance(), err
}

func (w *Worker) serveUndrain(*fasthttp.RequestCtx) (any, error) {
	err := w.Undrain()
	return w.Instance(), err
}

func (w *Worker) serveRole(ctx *fasthttp.RequestCtx) (any, error) {
	var body struct {
		Role fleet.Role `json:"role"`
	}
	if err := json.Unmarshal(ctx.PostBody(), &body); err != nil || body.Role != fleet.Prefill && body.Role != fleet.Decode {
		return nil, openai.BadRequest("role", "want {\"role\":\"prefill\"} or {\"role\":\"decode\"}")
	}
	err := w.SetRole(body.Role)
	return w.Instance(), err
}
