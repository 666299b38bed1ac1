package worker

import (
	"github.com/valyala/fasthttp"
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
	writeJSON(ctx, 200, mustJSON(w.engine.Steps()))
}
