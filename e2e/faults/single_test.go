package faults

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
)

func contains(text, part string) bool { return strings.Contains(text, part) }

// TestFaultLastPair: with one worker of each role, losing either makes the
// router not ready within a second, and ready again five seconds after the
// death was known; what cannot be answered gets an error in time.
func TestFaultLastPair(t *testing.T) {
	t.Parallel()
	r := cluster.Up(t, "--config", config(t))
	list := recorded(t, r, 12)
	for _, victim := range []string{"prefill-0", "decode-0"} {
		t.Run(victim, func(t *testing.T) {
			f, err := r.Fleet()
			if err != nil {
				t.Fatal(err)
			}
			old := f.Get(victim)
			l := startLoad(t, r, list, 8)
			time.Sleep(300 * time.Millisecond)
			at := time.Now()
			if err := syscall.Kill(old.PID, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			var lost, again time.Time
			cluster.Wait(t, readyAgain+slack, "ready again", func() error {
				switch err := r.Ready(); {
				case err == nil && lost.IsZero():
					return fmt.Errorf("still ready %v after the death", time.Since(at))
				case err != nil && lost.IsZero():
					lost = time.Now()
					return err
				case err != nil:
					return err
				}
				again = time.Now()
				return nil
			})
			if d := lost.Sub(at); cluster.Late(d, time.Second) {
				t.Errorf("not ready after %v", d)
			}
			failed := 0
			for _, res := range l.stop() {
				switch {
				case res.Good() && res.Text == res.want:
				case res.Good() || !strings.HasPrefix(res.want, res.Text):
					t.Errorf("wrong text: %v\n got %q\nwant %q", res.Reply, res.Text, res.want)
				case res.Err != nil || res.Problem == "":
					t.Errorf("no clear error: %v", res.Reply)
				case res.Start.Before(at) && cluster.Late(res.End.Sub(at), 2*time.Second+slack):
					t.Errorf("error %v after the death", res.End.Sub(at))
				default:
					failed++
				}
			}
			cluster.Wait(t, afterKnown+slack, "ledgers empty", r.Idle)
			t.Logf("not ready after %v, ready again after %v; %d got an error", lost.Sub(at).Round(time.Millisecond), again.Sub(at).Round(time.Millisecond), failed)
		})
	}
}
