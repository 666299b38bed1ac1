package input

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
)

// TestReload: SIGHUP puts new limits in force and drops no request; a bad file
// changes nothing, and says so. A worker takes it for nothing.
func TestReload(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "up.yaml")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("")
	s := &system{Router: cluster.Up(t, "--config", file), client: cluster.NewClient(t)}
	// With a life of a millisecond every request is late.
	late := func(want bool) {
		t.Helper()
		cluster.Wait(t, 5*time.Second, fmt.Sprintf("requests being late: %t", want), func() error {
			r := cluster.Post(t.Context(), s.client, s.URL+completions, long)
			if late := r.Status == 504 || r.Problem != ""; late != want {
				return fmt.Errorf("%v", r)
			}
			return nil
		})
	}
	says := func(text string) {
		t.Helper()
		cluster.Wait(t, 5*time.Second, text, func() error {
			if log := s.Stderr.String(); !strings.Contains(log, text) {
				return fmt.Errorf("the log has no %q:\n%s", text, log)
			}
			return nil
		})
	}
	workers, err := s.Children()
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range workers {
		if err := syscall.Kill(w.PID, syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
	}
	says("a worker reloads only its join file")

	write("limits: {max_in_flight: 0, request_timeout: 1ms}\n")
	s.Signal(syscall.SIGHUP)
	says(file + ":1: limits.max_in_flight: 0 is below 1")
	late(false)

	done := make(chan *cluster.Reply)
	go func() { // from before the reload to after it
		done <- cluster.Post(t.Context(), s.client, s.URL+completions, strings.Replace(long, `300`, `500,"ignore_eos":true,"n":64`, 1))
	}()
	cluster.Wait(t, 5*time.Second, "a request to run", func() error {
		l, err := s.Ledger()
		if err != nil || len(l.Requests) == 0 {
			return fmt.Errorf("%v %v", l, err)
		}
		return nil
	})
	write("read_timeout: 7s\nlimits: {request_timeout: 1ms}\npick: {policy: random}\n")
	s.Signal(syscall.SIGHUP)
	says("other changes need a restart")
	late(true)
	if r := <-done; !r.Good() {
		t.Errorf("a request that ran meanwhile: %v", r)
	}
	write("limits: {}\n")
	s.Signal(syscall.SIGHUP)
	late(false)

	again, err := s.Children()
	if err != nil {
		t.Fatal(err)
	}
	for name, w := range workers {
		if again[name].PID != w.PID {
			t.Errorf("%s was %d and is %d", name, w.PID, again[name].PID)
		}
	}
}
