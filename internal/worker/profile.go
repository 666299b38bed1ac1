package worker

import "github.com/valyala/fasthttp"

// serveProfile turns profiling on and off and hands the profile out; see
// profile.Serve.
func (w *Worker) serveProfile(ctx *fasthttp.RequestCtx) {
	if err := w.profile.Serve(ctx); err != nil {
		writeError(ctx, err)
	}
}
