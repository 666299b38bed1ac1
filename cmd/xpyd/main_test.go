package main

import (
	"os"
	"syscall"
	"testing"
	"time"
)

// TestThirdSignal: the first signal ends a command's context, the second its drain, and
// the third the process, which then still does what it was told to do lastly.
func TestThirdSignal(t *testing.T) {
	exits, last := make(chan int, 1), make(chan struct{}, 1)
	ctx, stop := shutdownContext(func(code int) { exits <- code })
	defer stop()
	lastly(ctx, func() { last <- struct{}{} })
	drain, cancel := draining(ctx, time.Minute)
	defer cancel()
	signal := func() {
		t.Helper()
		if err := syscall.Kill(os.Getpid(), syscall.SIGINT); err != nil {
			t.Fatal(err)
		}
	}
	signal()
	<-ctx.Done()
	if drain.Err() != nil || cut(ctx) {
		t.Error("the first signal has cut the drain")
	}
	signal()
	<-drain.Done()
	if !cut(ctx) {
		t.Error("the second signal is not told")
	}
	signal() // or the grace's end
	if code := <-exits; code != exitFailed || len(last) != 1 {
		t.Errorf("exit code %d, %d last things done", code, len(last))
	}
}
