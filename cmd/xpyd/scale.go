package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/spf13/cobra"
	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/gpus"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/supervise"
	"github.com/xpyd/xpyd/router/console"
	"github.com/xpyd/xpyd/router/steer"
)

// scaler serves POST /admin/v1/scale on the router of an `up`. The listener opens before there is a
// supervisor.
type scaler struct {
	sup   atomic.Pointer[supervise.Supervisor]
	stays func(id string) // has the streams of that worker end there
}

func (s *scaler) mounts() map[string]fasthttp.RequestHandler {
	return map[string]fasthttp.RequestHandler{
		"POST /admin/v1/scale":  s.serve,
		"GET /admin/v1/workers": s.list,
	}
}

// startsNone refuses to scale or to upgrade a router that was not started by `up`.
func startsNone() map[string]fasthttp.RequestHandler {
	refuse := func(why string) fasthttp.RequestHandler {
		return func(ctx *fasthttp.RequestCtx) {
			fail(ctx, openai.NotFound("this router was not started by `xpyd up`, %s", why))
		}
	}
	return map[string]fasthttp.RequestHandler{
		"POST /admin/v1/scale":   refuse("and starts no workers: start them where they shall run, with `xpyd prefill --join-file …` and `xpyd decode --join-file …`, and end them there, after `xpyd drain ID`"),
		"POST /admin/v1/upgrade": refuse("and is not upgraded in place: stop it, and start the other binary with the same --data; workers come back to it by themselves"),
	}
}

func (s *scaler) serve(ctx *fasthttp.RequestCtx) {
	order, refused := readScale(ctx)
	sup := s.sup.Load()
	if refused == nil && sup == nil {
		refused = openai.BadRequest("", "still starting")
	}
	if refused != nil {
		fail(ctx, refused)
		return
	}
	var leaves func(string)
	if order.WaitOnly {
		leaves = s.stays
	}
	changes, err := sup.Scale(order.counts(), leaves)
	if errors.Is(err, gpus.ErrTaken) {
		fail(ctx, openai.BadRequest("", "%v. A worker that goes frees its GPU once it has ended; `xpyd role ID decode` (or prefill) changes what one does where it is", err).WithStatus(409, "no_gpu_free"))
		return
	}
	if err != nil {
		fail(ctx, openai.Internal("%v", err))
		return
	}
	noteScale(ctx, changes)
	respond(ctx, changes)
}

// scaleOrder is the body of POST /admin/v1/scale.
type scaleOrder struct {
	Prefill  *int `json:"prefill,omitempty"`
	Decode   *int `json:"decode,omitempty"`
	WaitOnly bool `json:"wait_only,omitempty"` // the streams of workers that go end there
}

// readScale reads an order, and checks its counts.
func readScale(ctx *fasthttp.RequestCtx) (o scaleOrder, err *openai.Error) {
	if err := console.ReadBody(ctx, &o, true); err != nil {
		return o, err
	}
	want := o.counts()
	if len(want) == 0 {
		return o, openai.BadRequest("", `how many workers? Say prefill, decode or both: {"prefill": 3}`)
	}
	for role, n := range want {
		if n < 1 || n > maxWorkers {
			return o, openai.BadRequest(role, "%s: %d is not in 1..%d", role, n, maxWorkers)
		}
	}
	return o, nil
}

func (o *scaleOrder) counts() map[string]int {
	want := map[string]int{}
	for role, n := range map[string]*int{"prefill": o.Prefill, "decode": o.Decode} {
		if n != nil {
			want[role] = *n
		}
	}
	return want
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

// coming reports whether a worker runs or will run, even if the fleet has not heard of it yet.
func (s *scaler) coming(id string) bool {
	sup := s.sup.Load()
	return sup != nil && slices.ContainsFunc(sup.Status(), func(c supervise.Status) bool {
		return c.Name == id && c.State != supervise.Draining && c.State != supervise.Stopped
	})
}

// Processes implements steer.Hands.
func (s *scaler) Processes() (list []steer.Process) {
	sup := s.sup.Load()
	if sup == nil {
		return nil
	}
	for _, c := range sup.Status() {
		if c.State != supervise.Stopped {
			list = append(list, steer.Process{ID: c.Name, Role: c.Role, Ends: c.State == supervise.Draining})
		}
	}
	return list
}

// Scale implements steer.Hands.
func (s *scaler) Scale(role string, by int) ([]string, error) {
	sup := s.sup.Load()
	if sup == nil {
		return nil, errors.New("still starting")
	}
	done, err := sup.ScaleBy(role, by)
	return append(done.Added, done.Removed...), err
}

func (s *scaler) list(ctx *fasthttp.RequestCtx) {
	list := []supervise.Status{}
	if sup := s.sup.Load(); sup != nil {
		list = sup.Status()
	}
	respond(ctx, list)
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

func newScale() *cobra.Command {
	var wait waiting
	var order scaleOrder
	cmd := adminCommand(&cobra.Command{
		Use: "scale prefill=N decode=N", Short: "Change the number of workers of a running `xpyd up`",
		Long: `Change the number of workers of a running ` + "`xpyd up`" + `. Every worker that now has the
role counts, drained or not. If there are too many, drained ones go first, and the last
one that serves stays. The streams of decode workers that go move to others; with
--wait-only they end where they are. Where ` + "`up`" + ` has --gpus, a new worker needs a GPU that
is free. With --wait it ends when the new workers serve, and those that go have finished.`,
		Example: "  xpyd scale prefill=3 decode=2\n  xpyd scale decode=4 --wait",
		Args:    cobra.MinimumNArgs(1),
	}, func(cmd *cobra.Command, admin *adminFlags, args []string) error {
		want, err := wantedCounts(args)
		if err != nil {
			return usageError{err}
		}
		for role, to := range map[string]**int{"prefill": &order.Prefill, "decode": &order.Decode} {
			if n, ok := want[role]; ok {
				*to = &n
			}
		}
		s := scaling{skip: map[string]bool{}}
		if err := admin.call(cmd.Context(), "POST", "/admin/v1/scale", order, &s.changes); err != nil {
			return err
		}
		var f fleetStatus
		if err := admin.call(cmd.Context(), "GET", "/admin/v1/instances", nil, &f); err != nil {
			return err
		}
		s.tell(cmd.OutOrStdout(), want, &f)
		return wait.until(cmd, "the scaling", func(ctx context.Context) (string, error) { return s.pending(ctx, admin) })
	})
	cmd.Flags().BoolVar(&order.WaitOnly, "wait-only", false, waitOnlyHelp)
	wait.register(cmd, "until the new workers serve, and those that go have finished")
	return cmd
}

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
