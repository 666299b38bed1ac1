package profile

import (
	"encoding/json"
	"errors"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/openai"
)

// Serve answers a request for the profiler: POST begins a profile (seconds=N ends it by itself),
// DELETE ends it, GET returns the state or, with download in the query, the last profile for
// `go tool pprof`. The caller writes the error.
func (p *Profiler) Serve(ctx *fasthttp.RequestCtx) *openai.Error {
	switch string(ctx.Method()) {
	case fasthttp.MethodPost:
		d, err := Duration(ctx.QueryArgs())
		if err != nil {
			return err
		}
		switch err := p.Start(d); {
		case errors.Is(err, ErrOn):
			return &openai.Error{Status: 409, Type: openai.TypeInvalid, Code: "profile_on", Message: err.Error() + "; DELETE ends it"}
		case err != nil:
			return openai.Internal("%v", err)
		}
	case fasthttp.MethodDelete:
		p.Stop()
	default:
		if ctx.QueryArgs().Has("download") {
			return p.download(ctx)
		}
	}
	b, err := json.Marshal(p.State())
	if err != nil {
		return openai.Internal("%v", err)
	}
	ctx.SetContentType("application/json")
	ctx.SetBody(b)
	return nil
}

func (p *Profiler) download(ctx *fasthttp.RequestCtx) *openai.Error {
	b := p.Last()
	if b == nil {
		return openai.NotFound("there is no complete profile: POST begins one, DELETE ends it")
	}
	ctx.SetContentType("application/octet-stream")
	ctx.Response.Header.Set("Content-Disposition", `attachment; filename="cpu.pprof"`)
	ctx.Response.SetBodyRaw(b)
	return nil
}

// Duration reads how long a profile is to be.
func Duration(args *fasthttp.Args) (time.Duration, *openai.Error) {
	if !args.Has("seconds") {
		return Default, nil
	}
	n, err := args.GetUint("seconds")
	if err != nil || n < 1 || n > int(Longest/time.Second) {
		return 0, openai.BadRequest("seconds", "seconds is %q, want 1 to %d", args.Peek("seconds"), int(Longest/time.Second))
	}
	return time.Duration(n) * time.Second, nil
}
