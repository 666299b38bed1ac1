package worker

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// TestNoNextEvent: a generation whose context ends has failed, and says of what: another worker may go on
// if this one closes.
func TestNoNextEvent(t *testing.T) {
	for _, c := range []struct {
		cause   error
		outcome ticket.Outcome
		status  int
	}{{errClientLeft, ticket.Cancelled, 502}, {context.DeadlineExceeded, ticket.Cancelled, 502}, {errClosing, ticket.NoSpace, 503}, {fmt.Errorf("x: %w", errClosing), ticket.NoSpace, 503}} {
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(c.cause)
		g := &generation{open: 1}
		if g.nextEvent(ctx) || g.err == nil {
			t.Errorf("%v: it has not failed", c.cause)
			continue
		}
		if g.err.outcome != c.outcome || g.err.api.Status != c.status || !strings.Contains(c.cause.Error(), g.err.api.Message) {
			t.Errorf("%v: %s, %v", c.cause, g.err.outcome, g.err)
		}
		if g.open = 1; g.nextEvent(t.Context()) {
			t.Errorf("%v: it goes on", c.cause)
		}
		if g = (&generation{}); g.nextEvent(ctx) || g.err != nil { // all of it has come before
			t.Errorf("%v: %v", c.cause, g.err)
		}
	}
}

// followed counts those that wait for a context's end.
type followed struct {
	context.Context
	done chan struct{}
	by   int
}

func (f *followed) Done() <-chan struct{} { return f.done }

func (f *followed) AfterFunc(func()) (stop func() bool) {
	f.by++
	return func() bool { f.by--; return true }
}

// TestRenderChatEnds: a rendered chat leaves nothing behind at the worker's context, which outlives it.
func TestRenderChatEnds(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "m")
	if err := os.CopyFS(dir, os.DirFS("../internal/model/stories260k")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "chat_template.jinja"), []byte(`{{ raise_exception('no') }}`), 0o600); err != nil {
		t.Fatal(err)
	}
	w, f := rendererOf(t, dir), &followed{Context: context.Background(), done: make(chan struct{})}
	w.ctx = f
	_, err := w.renderChat(&fasthttp.RequestCtx{}, &openai.Chat{}, nil, time.Now())
	if err == nil || !strings.Contains(err.Error(), "chat template: ") || f.by != 0 {
		t.Errorf("%v, %d wait", err, f.by)
	}
}
