package hostfile_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/hostfile"
)

// TestLock: a lock that another has is waited for, but not for ever.
func TestLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	unlock, err := hostfile.Lock(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	soon, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := hostfile.Lock(soon, path); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "which another process holds") {
		t.Error(err)
	}
	got := make(chan error, 1)
	go func() {
		again, err := hostfile.Lock(t.Context(), path)
		if err == nil {
			again()
		}
		got <- err
	}()
	unlock()
	if err := <-got; err != nil {
		t.Error(err)
	}
	if _, err := hostfile.Lock(t.Context(), filepath.Join(path, "below a file")); err == nil {
		t.Error("a lock below a file")
	}
}

// TestWrite: a file is replaced whole, or left as it was, and nothing else stays.
func TestWrite(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a", "b")
	for _, text := range []string{"one", "two"} {
		if err := hostfile.Write(path, []byte(text)); err != nil {
			t.Fatal(err)
		}
		if b, err := os.ReadFile(path); err != nil || string(b) != text {
			t.Errorf("%q, %v", b, err)
		}
	}
	if err := hostfile.Write(filepath.Join(path, "c"), nil); err == nil {
		t.Error("a file below a file")
	}
	if err := hostfile.Write(filepath.Join(dir, "a"), []byte("three")); err == nil {
		t.Error("a file in the place of a folder")
	}
	if left, err := filepath.Glob(filepath.Join(dir, ".tmp-*")); err != nil || len(left) > 0 {
		t.Error(left, err)
	}
}
