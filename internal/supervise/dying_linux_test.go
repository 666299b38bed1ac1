package supervise_test

import (
	"context"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xpyd/xpyd/internal/supervise"
)

// TestDying: the death of a process is told, where the kernel tells it; that it exits as asked is not.
func TestDying(t *testing.T) {
	noLeak(t)
	want := 0
	if fd, err := unix.PidfdOpen(unix.Gettid(), unix.O_EXCL); err == nil { // Linux 6.9
		want = 1
		unix.Close(fd)
	}
	var out buffer
	type death struct {
		name string
		pid  int
	}
	deaths := make(chan death, 9)
	s, err := supervise.New(supervise.Config{Output: &out, OnDying: func(name string, pid int) { deaths <- death{name, pid} }})
	if err != nil {
		t.Fatal(err)
	}
	c := part2child("a", "polite")
	c.Ready = func(ctx context.Context, pid int) error { // its threads run
		for pids(t, out.String())["a"] != pid && ctx.Err() == nil {
			time.Sleep(time.Millisecond)
		}
		return ctx.Err()
	}
	if err := s.Add(c); err != nil {
		t.Fatal(err)
	}
	within(t, "the child is ready", func() bool { return status(s, "a").State == supervise.Ready })
	pid := pids(t, out.String())["a"]
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	within(t, "restart", func() bool { return pids(t, out.String())["a"] != pid && status(s, "a").State == supervise.Ready })
	if err := s.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(deaths) != want {
		t.Fatalf("%d deaths are told, want %d", len(deaths), want)
	}
	if want > 0 {
		if d := <-deaths; d != (death{"a", pid}) {
			t.Errorf("%+v, want a, %d", d, pid)
		}
	}
}
