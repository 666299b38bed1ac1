package worker

import (
	"encoding/json"
	"strings"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/logbuf"
	"github.com/xpyd/xpyd/internal/openai"
)

// logLevel is the body and the answer of the log's paths.
type logLevel struct {
	Level string `json:"level"` // debug, info, warn or error
}

// serveLog answers the level of the log, after it has changed it (POST).
func (w *Worker) serveLog(ctx *fasthttp.RequestCtx) (any, error) {
	if w.level == nil {
		return nil, openai.BadRequest("", "the level of this log cannot be changed")
	}
	if ctx.IsPost() {
		var body logLevel
		if err := json.Unmarshal(ctx.PostBody(), &body); err != nil {
			return nil, openai.BadRequest("level", "read the body: %v", err)
		}
		l, ok := logbuf.ParseLevel(body.Level)
		if !ok {
			return nil, openai.BadRequest("level", "want debug, info, warn or error, not %q", openai.Clip(body.Level))
		}
		w.level.Set(l)
	}
	return logLevel{strings.ToLower(w.level.Level().String())}, nil
}
