package main

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/spf13/cobra"
	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/supervise"
	"github.com/xpyd/xpyd/router/console"
)

// scaler serves POST /admin/v1/scale on the router of an `up`. The listener opens before
// the supervisor exists, which is set later.
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

// startsNone refuses to scale on a router that stands alone.
func startsNone() map[string]fasthttp.RequestHandler {
	return map[string]fasthttp.RequestHandler{"POST /admin/v1/scale": func(ctx *fasthttp.RequestCtx) {
		fail(ctx, openai.NotFound("this router was not started by `xpyd up`, and starts no workers: start them where they are to run, with `xpyd prefill --join-file …` and `xpyd decode --join-file …`, and end them there, after `xpyd drain ID`"))
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
	changes := map[string]supervise.Scaled{}
	for role, n := range want {
		if changes[role], err = sup.Scale(role, n); err != nil {
			fail(ctx, openai.Internal("%v", err))
			return
		}
	}
	noteScale(ctx, changes)
	respond(ctx, changes)
}

// noteScale records the counts before and after in the audit log.
func noteScale(ctx *fasthttp.RequestCtx, changes map[string]supervise.Scaled) {
	var was, is []string
	for _, role := range slices.Sorted(maps.Keys(changes)) {
		c := changes[role]
		was = append(was, fmt.Sprintf("%s=%d", role, len(c.Kept)+len(c.Removed)))
		is = append(is, fmt.Sprintf("%s=%d", role, len(c.Kept)+len(c.Added)))
	}
	console.NoteChange(ctx, strings.Join(was, " "), strings.Join(is, " "))
}

// coming reports whether a worker runs or will run, even if the fleet has not heard of it
// yet.
func (s *scaler) coming(id string) bool {
	sup := s.get()
	return sup != nil && slices.ContainsFunc(sup.Status(), func(c supervise.Status) bool {
		return c.Name == id && c.State != supervise.Draining && c.State != supervise.Stopped
	})
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
	var wait waiting
	cmd := &cobra.Command{
		Use: "scale prefill=N decode=N", Short: "Change the number of workers of a running `xpyd up`",
		Long: `Change the number of workers of a running ` + "`xpyd up`" + `. Whoever has the role now
counts, also a drained worker; of those that are too many, drained ones go first,
and the last that serves stays. With --wait it ends when the workers are there, and
those that go have finished.`,
		Example: "  xpyd scale prefill=3 decode=2\n  xpyd scale decode=4 --wait",
		Args:    cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			want, err := wantedCounts(args)
			if err != nil {
				return usageError{err}
			}
			var changes map[string]supervise.Scaled
			if err := admin.call(cmd.Context(), "POST", "/admin/v1/scale", want, &changes); err != nil {
				return err
			}
			s := scaling{changes: changes, skip: map[string]bool{}}
			var f fleetStatus
			if err := admin.call(cmd.Context(), "GET", "/admin/v1/instances", nil, &f); err != nil {
				return err
			}
			s.tell(cmd.OutOrStdout(), want, &f)
			return wait.until(cmd, "the scaling", func(ctx context.Context) (string, error) { return s.pending(ctx, &admin) })
		},
	}
	admin.register(cmd)
	wait.register(cmd, "until the workers are there, and those that go have finished")
	return cmd
}

// wantedCounts reads prefill=N and decode=N.
func wantedCounts(args []string) (map[string]int, error) {
	want := map[string]int{}
	for _, a := range args {
		role, text, ok := strings.Cut(a, "=")
		n, err := strconv.Atoi(text)
		if !ok || err != nil || role != "prefill" && role != "decode" {
			return nil, fmt.Errorf("%q: want prefill=N or decode=N", a)
		}
		if n < 1 || n > maxWorkers {
			return nil, fmt.Errorf("%q: want 1 to %d workers", a, maxWorkers)
		}
		if _, twice := want[role]; twice {
			return nil, fmt.Errorf("%q: %s is there twice", a, role)
		}
		want[role] = n
	}
	return want, nil
}
