package worker

import (
	"encoding/json"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/openai"
)

// serveProfile turns profiling on and off and hands the profile out; see
// profile.Serve.
func (w *Worker) serveProfile(ctx *fasthttp.RequestCtx) {
	if err := w.profile.Serve(ctx); err != nil {
		writeError(ctx, err)
	}
}

// serveSteps lists the newest steps, with and without prompts: where their time went.
func (w *Worker) serveSteps(ctx *fasthttp.RequestCtx) {
	body, err := json.Marshal(w.engine.Steps())
	if err != nil {
		writeError(ctx, openai.Internal("%v", err))
		return
	}
	writeJSON(ctx, fasthttp.StatusOK, body)
}
