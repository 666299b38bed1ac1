package main

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"sync"

	"github.com/spf13/cobra"
	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/supervise"
)

// scaler answers POST /admin/v1/scale on the router of an `up`. The listener
// opens before the supervisor exists, so that comes later.
type scaler struct {
	mu  sync.Mutex
	sup *supervise.Supervisor
}

func (s *scaler) set(sup *supervise.Supervisor) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sup = sup
}

func (s *scaler) mounts() map[string]fasthttp.RequestHandler {
	return map[string]fasthttp.RequestHandler{
		"POST /admin/v1/scale":  s.serve,
		"GET /admin/v1/workers": s.list,
	}
}

// startsNone answers for a router that stands alone.
func startsNone() map[string]fasthttp.RequestHandler {
	return map[string]fasthttp.RequestHandler{"POST /admin/v1/scale": func(ctx *fasthttp.RequestCtx) {
		fail(ctx, openai.NotFound("this router was not started by `xpyd up`, and starts no workers: start them where they are to run, with `xpyd prefill --join …` and `xpyd decode --join …`, and end them there, after `xpyd drain ID`"))
	}}
}

func (s *scaler) get() *supervise.Supervisor {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sup
}

func (s *scaler) serve(ctx *fasthttp.RequestCtx) {
	want := map[string]int{}
	err := json.Unmarshal(ctx.PostBody(), &want)
	for role, n := range want {
		if role != "prefill" && role != "decode" || n < 1 || n > maxWorkers {
			err = fmt.Errorf("want prefill and decode counts in 1..%d, have %s=%d", maxWorkers, role, n)
		}
	}
	sup := s.get()
	if err == nil && sup == nil {
		err = fmt.Errorf("still starting")
	}
	if err != nil {
		fail(ctx, openai.BadRequest("", "%v", err))
		return
	}
	type change struct{ Added, Removed []string }
	changes := map[string]change{}
	for role, n := range want {
		added, removed, err := sup.Scale(role, n)
		if err != nil {
			fail(ctx, openai.Internal("scale %s: %v", role, err))
			return
		}
		changes[role] = change{added, removed}
	}
	respond(ctx, changes)
}

func (s *scaler) list(ctx *fasthttp.RequestCtx) {
	if sup := s.get(); sup != nil {
		respond(ctx, sup.Status())
		return
	}
	respond(ctx, []supervise.Status{})
}

func fail(ctx *fasthttp.RequestCtx, err *openai.Error) {
	ctx.SetStatusCode(err.Status)
	ctx.SetContentType("application/json")
	ctx.SetBody(err.Append(nil))
}

func respond(ctx *fasthttp.RequestCtx, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		fail(ctx, openai.Internal("%v", err))
		return
	}
	ctx.SetContentType("application/json")
	ctx.SetBody(b)
}

// newScale is `xpyd scale`, on a running `up`.
func newScale() *cobra.Command {
	var admin adminFlags
	cmd := &cobra.Command{
		Use: "scale prefill=N decode=N", Short: "Change the number of workers of a running `xpyd up`",
		Example: "  xpyd scale prefill=3 decode=2\n  xpyd scale decode=4",
		Args:    cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			want := map[string]int{}
			for _, a := range args {
				role, text, ok := strings.Cut(a, "=")
				n, err := strconv.Atoi(text)
				if !ok || err != nil || role != "prefill" && role != "decode" {
					return usageError{fmt.Errorf("%q: want prefill=N or decode=N", a)}
				}
				if n < 1 || n > maxWorkers {
					return usageError{fmt.Errorf("%q: want 1 to %d workers", a, maxWorkers)}
				}
				if _, twice := want[role]; twice {
					return usageError{fmt.Errorf("%q: %s is there twice", a, role)}
				}
				want[role] = n
			}
			var changes map[string]struct{ Added, Removed []string }
			if err := admin.call(cmd.Context(), "POST", "/admin/v1/scale", want, &changes); err != nil {
				return err
			}
			for role, c := range changes {
				if len(c.Added)+len(c.Removed) == 0 {
					fmt.Fprintf(cmd.OutOrStdout(), "%s: %d already\n", role, want[role])
				}
				for _, id := range c.Added {
					fmt.Fprintf(cmd.OutOrStdout(), "%s: starting %s\n", role, id)
				}
				for _, id := range c.Removed {
					fmt.Fprintf(cmd.OutOrStdout(), "%s: draining %s\n", role, id)
				}
			}
			return nil
		},
	}
	admin.register(cmd)
	return cmd
}
