package faults

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/internal/fleet"
)

// TestUpOrders: no order leaves a role without a worker that serves, unless it is
// forced; orders find workers that are starting, outlast crashes, and can be
// waited for.
func TestUpOrders(t *testing.T) {
	t.Parallel()
	r := cluster.Up(t, "--prefill", "1", "--decode", "2")
	run := func(want int, said string, args ...string) {
		t.Helper()
		if out, errs, code := r.CLI(t, args...); code != want || !strings.Contains(out+errs, said) {
			t.Errorf("%v: %d %s%s", args, code, out, errs)
		}
	}
	if n, err := r.Metric("xpyd_build_info"); err != nil || n != 1 {
		t.Errorf("the router's build info: %v %v", n, err)
	}
	if n, err := r.WorkerMetric("decode-0", "xpyd_build_info"); err != nil || n != 1 {
		t.Errorf("a worker's build info: %v %v", n, err)
	}
	const last = "serves stories260k; requests would get 503"

	// Those that are drained go first, and count.
	run(0, "", "drain", "decode-0", "--wait")
	run(1, "decode-1 is the last decode worker that "+last, "drain", "decode-1")
	run(0, "decode-0 counts, but is drained", "scale", "decode=2")
	run(0, "draining decode-0", "scale", "decode=1", "--wait")
	if err := r.ServingIs(1, 1); err != nil {
		t.Error(err)
	}
	run(1, "decode-1 is the last decode worker that "+last, "role", "decode-1", "prefill")
	run(1, "prefill-0 is the last prefill worker that "+last, "drain", "prefill-0")

	// One that is starting is found, and counts as what it has become.
	run(0, "starting prefill-1", "scale", "prefill=2")
	run(0, "role decode", "role", "prefill-1", "decode")
	r.WaitServing(t, 20*time.Second, 1, 2)
	run(0, "decode: 2 already", "scale", "decode=2")

	// What an order has made of a worker outlasts a crash.
	run(0, "", "drain", "prefill-1")
	children, err := r.Children()
	if err != nil {
		t.Fatal(err)
	}
	old := children["prefill-1"].PID
	if err := syscall.Kill(old, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	cluster.Wait(t, 20*time.Second, "prefill-1 is back, a drained decode worker", func() error {
		f, err := r.Fleet()
		if err != nil {
			return err
		}
		if m := f.Get("prefill-1"); m == nil || m.PID == old || m.State != fleet.Live || m.Role != fleet.Decode || !m.Draining {
			return fmt.Errorf("%+v", m)
		}
		return nil
	})
	run(0, "draining prefill-1", "scale", "decode=1", "--wait")
	run(0, "starting prefill-1", "scale", "prefill=2", "--wait")
	if err := r.ServingIs(2, 1); err != nil {
		t.Error(err)
	}

	run(0, "", "drain", "decode-1", "--force")
	if err := r.ServingIs(2, 0); err != nil {
		t.Error(err)
	}
}

// TestUpNamesake: a worker of another role that is started by mistake with the id of one of `up` does not
// take its place, and both are named.
func TestUpNamesake(t *testing.T) {
	t.Parallel()
	r := cluster.Up(t)
	stranger := r.Worker(t, fleet.Decode, "--id", "prefill-0")
	own := func(namesake string) func() error {
		return func() error {
			f, err := r.Fleet()
			if err != nil {
				return err
			}
			children, err := r.Children()
			if err != nil {
				return err
			}
			m := f.Get("prefill-0")
			if m == nil || m.PID != children["prefill-0"].PID || m.Role != fleet.Prefill || !strings.HasPrefix(m.Namesake, namesake) || (m.Namesake == "") != (namesake == "") {
				return fmt.Errorf("%+v", m)
			}
			return r.ServingIs(1, 1)
		}
	}
	cluster.Wait(t, 20*time.Second, "prefill-0 is the one of `up`, and the other is shown", own("decode"))
	const said = "two processes have this id: "
	if out, _, code := r.CLI(t, "status"); code != 0 || !strings.Contains(out, "another process has this id, and is not used: decode") || !strings.Contains(r.Stderr.String(), said) {
		t.Errorf("%d %s\n%s", code, out, r.Stderr.String())
	}
	stranger.Signal(syscall.SIGTERM)
	if code := stranger.Exit(t, 20*time.Second); code != 0 {
		t.Errorf("the other: exit code %d", code)
	}
	cluster.Wait(t, 20*time.Second, "only prefill-0", own(""))
}
