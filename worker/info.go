package worker

import (
	"encoding/json"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/prefill"
)

func (w *Worker) serveModels(ctx *fasthttp.RequestCtx) {
	writeJSON(ctx, 200, openai.AppendModels(nil, []openai.Model{{ID: w.served, Created: w.started.Unix(), MaxModelLen: w.engine.MaxModelLen()}}))
}

// tokenizeBytes of text are tokenised whatever the model's length: people count tokens of
// text that they are about to cut.
const tokenizeBytes = 1 << 20

func (w *Worker) serveTokenize(ctx *fasthttp.RequestCtx) {
	t, err := openai.ParseTokenize(ctx.PostBody(), w.vocab())
	if err == nil && t.Model != "" && t.Model != w.served {
		err = openai.ModelNotFound(t.Model)
	}
	if err != nil {
		writeError(ctx, err)
		return
	}
	var ids []int32
	if t.Chat != nil {
		if ids, err = w.renderChat(ctx, t.Chat); err != nil {
			writeError(ctx, err)
			return
		}
	} else {
		if err := w.checkText("prompt", t.Prompt, tokenizeBytes); err != nil {
			writeError(ctx, err)
			return
		}
		ids = w.tok.Encode(t.Prompt, t.AddSpecial)
	}
	var strs []string
	if t.ReturnStrs {
		strs = make([]string, len(ids))
		for i, id := range ids {
			strs[i] = w.tok.Piece(id)
		}
	}
	writeJSON(ctx, 200, openai.AppendTokenized(nil, ids, strs, w.engine.MaxModelLen()))
}

func (w *Worker) serveDetokenize(ctx *fasthttp.RequestCtx) {
	d, err := openai.ParseDetokenize(ctx.PostBody(), w.vocab())
	if err == nil && d.Model != "" && d.Model != w.served {
		err = openai.ModelNotFound(d.Model)
	}
	if most := int(w.cfg.MaxAnswer); err == nil && openai.MaxHead+len(d.Tokens)*w.sizes.Text > most {
		err = openai.AnswerTooLarge("tokens", "%d tokens could be more than %d bytes of text, which is the limit; ask for fewer at a time", len(d.Tokens), most)
	}
	if err != nil {
		writeError(ctx, err)
		return
	}
	writeJSON(ctx, 200, openai.AppendDetokenized(nil, w.tok.Decode(d.Tokens, true)))
}

func (w *Worker) serveVersion(ctx *fasthttp.RequestCtx) {
	b := append([]byte(`{"version":`), openai.AppendString(nil, w.build)...)
	writeJSON(ctx, 200, append(b, '}'))
}

// serveHealth answers whether the engine works, and names this run of the worker.
func (w *Worker) serveHealth(ctx *fasthttp.RequestCtx) {
	is := fleet.Instance{ID: w.identity.ID, Epoch: w.identity.Epoch}
	ctx.Response.Header.Set(fleet.HeaderInstance, is.Is())
	if err := w.engine.Health(); err != nil {
		writeError(ctx, openai.Unavailable("engine: %v", err))
		return
	}
	writeJSON(ctx, 200, []byte(`{"status":"ok"}`))
}

// Ledger is everything that this process holds for somebody; empty when it is idle.
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

// Ledger returns what this process holds now.
func (w *Worker) Ledger() *Ledger {
	l := &Ledger{ID: w.identity.ID, Epoch: w.identity.Epoch, Role: w.Role(), Requests: w.requests.ledger(),
		Blocks: w.cache.Holders(), Held: w.prefill.Ledger(),
		Tickets: append(w.recv.Ledger(), w.server.Ledger()...)}
	if l.Blocks == nil {
		l.Blocks = []kvcache.Holder{}
	}
	if l.Tickets == nil {
		l.Tickets = []kvconn.Entry{}
	}
	if l.Held == nil {
		l.Held = []prefill.Entry{}
	}
	return l
}

func (w *Worker) serveLedger(ctx *fasthttp.RequestCtx) {
	writeJSON(ctx, 200, mustJSON(w.Ledger()))
}

// serveControl answers drain and undrain.
func (w *Worker) serveControl(ctx *fasthttp.RequestCtx, do func() error) {
	if err := do(); err != nil {
		writeError(ctx, openai.Internal("%v", err))
		return
	}
	writeJSON(ctx, 200, mustJSON(w.instance()))
}

func (w *Worker) serveRole(ctx *fasthttp.RequestCtx) {
	var body struct {
		Role fleet.Role `json:"role"`
	}
	if err := json.Unmarshal(ctx.PostBody(), &body); err != nil || body.Role != fleet.Prefill && body.Role != fleet.Decode {
		writeError(ctx, openai.BadRequest("role", "want {\"role\":\"prefill\"} or {\"role\":\"decode\"}"))
		return
	}
	w.serveControl(ctx, func() error { return w.SetRole(body.Role) })
}
