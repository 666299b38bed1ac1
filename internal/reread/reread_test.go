package reread_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/internal/reread"
)

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestValue(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	write(t, path, "one")
	synctest.Test(t, func(t *testing.T) {
		var said []error
		loads := 0
		v, err := reread.New(func() (string, error) {
			loads++
			b, err := os.ReadFile(path)
			if err == nil && strings.Contains(string(b), "bad") {
				err = errors.New("bad text")
			}
			return string(b), err
		}, func(err error) { said = append(said, err) }, "", path)
		if err != nil {
			t.Fatal(err)
		}
		f := func(wait time.Duration, want string, wantLoads, wantSaid int) {
			t.Helper()
			time.Sleep(wait)
			if got := v.Get(); got != want || loads != wantLoads || len(said) != wantSaid {
				t.Errorf("%q after %d readings, told %v; want %q after %d, told %d times", got, loads, said, want, wantLoads, wantSaid)
			}
		}
		f(0, "one", 1, 0)
		f(reread.Every, "one", 1, 0) // nothing has changed
		write(t, path, "other")
		f(reread.Every/2, "one", 1, 0) // nobody looks so soon
		f(reread.Every/2, "other", 2, 1)
		write(t, path, "bad one")
		f(reread.Every, "other", 3, 2)
		f(reread.Every, "other", 3, 2) // said once
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		f(reread.Every, "other", 3, 3) // gone is no change, but is said
		f(reread.Every, "other", 3, 3) // once
		write(t, path, "a third")
		f(reread.Every, "a third", 4, 4)
		if said[0] != nil || said[1] == nil || said[2] == nil || !strings.Contains(said[2].Error(), path+" is gone") || said[3] != nil {
			t.Errorf("told %v", said)
		}
	})
	if _, err := reread.New(func() (int, error) { return 0, errors.New("no") }, nil); err == nil {
		t.Error("a first reading that fails is no error")
	}
}

func TestFiles(t *testing.T) {
	if !reread.Of("", "").None() || reread.Of("", "a").None() {
		t.Error("none")
	}
	path := filepath.Join(t.TempDir(), "file")
	f := reread.Of(path)
	want := func(changed bool) {
		t.Helper()
		if f.Changed() != changed {
			t.Errorf("changed: %t, want %t", !changed, changed)
		}
	}
	want(true) // the first time
	want(false)
	write(t, path, "there")
	want(true)
	want(false)
	lost := func(want string) {
		t.Helper()
		f.Changed()
		if err := f.Lost(); want == "" && err != nil || want != "" && (err == nil || err.Error() != want+" is gone") {
			t.Errorf("lost %v, want %q", err, want)
		}
	}
	for range 2 {
		lost("")
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		lost(path)
		lost("")
		write(t, path, "there")
	}
	lost("")
	when := time.Now().Add(-time.Hour)
	if err := os.Chtimes(path, when, when); err != nil {
		t.Fatal(err)
	}
	want(true)
	want(false)
	if err := os.Chmod(path, 0o640); err != nil { // a file may be refused for its mode
		t.Fatal(err)
	}
	want(true)
	want(false)
}
