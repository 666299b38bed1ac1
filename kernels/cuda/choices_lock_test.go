//go:build cgo && linux

package cuda

import (
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestLockWithin: a lock that another has is waited for, but not for ever.
func TestLockWithin(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	unlock, err := lockWithin(path, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := lockWithin(path, 50*time.Millisecond); err == nil || !strings.Contains(err.Error(), "another process has it") {
		t.Error(err)
	}
	got := make(chan error, 1)
	go func() {
		again, err := lockWithin(path, time.Minute)
		if err == nil {
			again()
		}
		got <- err
	}()
	unlock()
	if err := <-got; err != nil {
		t.Error(err)
	}
	if _, err := lockWithin(filepath.Join(path, "below a file"), time.Second); err == nil {
		t.Error("a lock below a file")
	}
}
