//go:build cgo && linux

package cuda

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestUnusableLibraries: errors say why a library cannot be used, which differs from
// having none. One of another version is known by its version, whatever functions it has.
func TestUnusableLibraries(t *testing.T) {
	dir := t.TempDir()
	f := func(path, want string, absent bool) {
		t.Helper()
		_, err := openLibrary(path)
		if !errors.Is(err, ErrUnavailable) || errors.Is(err, ErrAbsent) != absent || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", path, err)
		}
	}
	f(filepath.Join(dir, "none.so"), "No such file", false) // it was asked for
	text := filepath.Join(dir, libraryName)
	if err := os.WriteFile(text, []byte("no library"), 0o600); err != nil {
		t.Fatal(err)
	}
	f(text, "open "+text, false)
	t.Setenv(LibraryEnv, text)
	f("", "open "+text, false)
	t.Setenv(LibraryEnv, "")
	if _, err := openLibrary(""); err != nil { // this machine has none
		f("", libraryName, true)
	}

	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip(err)
	}
	source, old := filepath.Join(dir, "old.c"), filepath.Join(dir, "old.so")
	if err := os.WriteFile(source, []byte("int xk_abi(void) { return 7; }\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(cc, "-shared", "-fPIC", "-o", old, source).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	f(old, "interface version 7, this xpyd needs ", false)
}
