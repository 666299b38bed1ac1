package faults

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
)

// TestMixed: with pick.disaggregate: mixed workers of either role serve, the same tokens as ever, and requests
// outlive them as in any fleet: killed ones of both roles, a drain, and another role.
func TestMixed(t *testing.T) {
	t.Parallel()
	config := filepath.Join(t.TempDir(), "up.yaml")
	if err := os.WriteFile(config, []byte("pick: {policy: kv_events, disaggregate: mixed}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r := cluster.Up(t, "--prefill", "2", "--decode", "2", "--threads", "1", "--config", config)
	l := startLoad(t, r, recorded(t, r, 8), 4)
	l.answered(t, 20, nil)
	for _, id := range []string{"prefill-0", "decode-1"} {
		children, err := r.Children()
		if err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(children[id].PID, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		l.answered(t, len(l.soFar())+10, nil)
		r.WaitServing(t, time.Minute, 2, 2) // it is started again
	}
	for _, order := range [][]string{{"drain", "prefill-1", "--wait"}, {"undrain", "prefill-1"}, {"role", "decode-0", "prefill"}} {
		if out, errs, code := r.CLI(t, order...); code != 0 {
			t.Fatalf("%v: %d %s%s", order, code, out, errs)
		}
		l.answered(t, len(l.soFar())+10, nil)
	}
	for _, got := range l.stop() {
		if !got.Good() || got.Text != got.want {
			t.Errorf("%v", got.Reply)
		}
	}
	for _, id := range []string{"prefill-0", "prefill-1", "decode-0", "decode-1"} {
		if n, err := r.WorkerMetric(id, `xpyd_engine_tokens_total{phase="decode"}`); err != nil || n == 0 {
			t.Errorf("%s has decoded %v tokens, %v", id, n, err)
		}
	}
	cluster.Wait(t, 10*time.Second, "empty ledgers", r.Idle)
}
