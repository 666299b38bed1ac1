package worker

import (
	"github.com/valyala/fasthttp"
)

// serveProfile turns profiling on and off and hands out the profile (profile.Serve).
func (w *Worker) serveProfile(ctx *fasthttp.RequestCtx) {
	if err := w.profile.Serve(ctx); err != nil {
		writeError(ctx, err)
	}
}

// serveSteps lists where the newest steps' time went.
func (w *Worker) serveSteps(ctx *fasthttp.RequestCtx) {
	writeJSON(ctx, 200, mustJSON(w.engine.Steps()))
}
