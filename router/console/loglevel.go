package console

import (
	"encoding/json"
	"log/slog"
	"strings"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/logbuf"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router/flight"
)

// logLevel is the body and the answer of the paths of logs, here and at workers.
type logLevel struct {
	Level string `json:"level"` // debug, info, warn or error
}

// read reads a level to be set.
func (l *logLevel) read(ctx *fasthttp.RequestCtx) (level slog.Level, err *openai.Error) {
	if err := ReadBody(ctx, l, true); err != nil {
		return level, err
	}
	level, ok := logbuf.ParseLevel(l.Level)
	if !ok {
		return level, openai.BadRequest("level", "want debug, info, warn or error, not %q", openai.Clip(l.Level))
	}
	return level, nil
}

// ownLog answers the level of this router's log, after it has changed it (POST). The audit file has all changes,
// whatever the level is.
func (c *Console) ownLog(ctx *fasthttp.RequestCtx, a adminCall) *openai.Error {
	if c.Level == nil {
		return openai.BadRequest("", "the level of this log cannot be changed")
	}
	now := func() string { return strings.ToLower(c.Level.Level().String()) }
	if a.verb == "POST" {
		var body logLevel
		level, err := body.read(ctx)
		if err != nil {
			return err
		}
		NoteChange(ctx, "log level "+now(), "log level "+body.Level)
		c.Level.Set(level)
	}
	return reply(ctx, 200, logLevel{now()})
}

// workerLog is the same of a worker's log, which it asks the worker for.
func (c *Console) workerLog(ctx *fasthttp.RequestCtx, a adminCall) *openai.Error {
	x := flight.Question{ID: a.id, Method: a.verb, Path: "/xpyd/v1/log", Timeout: orderTimeout, Limit: maxReply}
	if a.verb == "POST" {
		var body logLevel
		if _, err := body.read(ctx); err != nil {
			return err
		}
		NoteChange(ctx, "", "log level "+body.Level)
		x.Body, _ = json.Marshal(body) // a text
	}
	m := c.Fleet.Snapshot().Get(a.part)
	switch {
	case m == nil:
		return noInstance(a.part)
	case m.Dialect != fleet.Native:
		return openai.BadRequest("", "%s is an engine of dialect %s: only native workers change their log", m.ID, m.Dialect)
	}
	said, err := c.Flights.Ask(m, x)
	if err != nil {
		return openai.Upstream("log: %v", err)
	}
	said.Write(ctx)
	return nil
}
