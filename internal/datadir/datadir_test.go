package datadir_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/xpyd/xpyd/internal/datadir"
)

const stranger = 65534

func own(t *testing.T, path string) *datadir.Dir {
	t.Helper()
	d, err := datadir.Own(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

func mustWrite(t *testing.T, d *datadir.Dir, name, text string) {
	t.Helper()
	if err := d.Write(name, []byte(text)); err != nil {
		t.Fatal(err)
	}
}

// refused wants both ways into the folder to fail with all of these words.
func refused(t *testing.T, path string, words ...string) {
	t.Helper()
	for how, open := range map[string]func(string) (*datadir.Dir, error){"own": datadir.Own, "open": datadir.Open} {
		d, err := open(path)
		if err == nil {
			d.Close()
			t.Errorf("%s: it is taken", how)
			continue
		}
		for _, w := range words {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %q lacks %q", how, err, w)
			}
		}
	}
}

func TestOwn(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a", "b")
	d := own(t, path)
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o700 || !d.Made() {
		t.Fatal(info, err)
	}
	mustWrite(t, d, "token", "one")
	mustWrite(t, d, "token", "two")
	if info, err := os.Stat(filepath.Join(path, "token")); err != nil || info.Mode().Perm() != 0o600 {
		t.Error(info, err)
	}
	reader, err := datadir.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	if text, err := reader.Read("token"); err != nil || string(text) != "two" {
		t.Errorf("%q, %v", text, err)
	}
	if _, err := reader.Read("absent"); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	reader.Close("token") // is not its to remove
	if _, err := d.Read("token"); err != nil {
		t.Error(err)
	}
	if _, err := datadir.Own(path); err == nil || !strings.Contains(err.Error(), "another xpyd uses "+path) {
		t.Errorf("a second owner: %v", err)
	}
	if _, err := datadir.Open(filepath.Join(path, "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
}

// TestTaken: a folder is taken while its owner lives, and who looks takes it from
// nobody.
func TestTaken(t *testing.T) {
	path := filepath.Join(t.TempDir(), "data")
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
	f := func(want bool) {
		t.Helper()
		d, err := datadir.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		if got, err := d.Taken(); got != want || err != nil {
			t.Errorf("%v %v, want %v", got, err, want)
		}
	}
	f(false)
	d := own(t, path)
	f(true)
	d.Close()
	f(false)
	if err := os.WriteFile(filepath.Join(path, "lock"), nil, 0o600); err != nil { // of one that was killed
		t.Fatal(err)
	}
	f(false)
	done := make(chan struct{})
	looking := make(chan struct{})
	go func() {
		defer close(looking)
		looker, err := datadir.Open(path)
		if err != nil {
			t.Error(err)
			return
		}
		defer looker.Close()
		for {
			select {
			case <-done:
				return
			default:
			}
			if _, err := looker.Taken(); err != nil {
				t.Error(err)
			}
		}
	}()
	for range 200 {
		d, err := datadir.Own(path)
		if err != nil {
			t.Error(err)
			break
		}
		d.Close()
	}
	close(done)
	<-looking
}

// TestClose: what was made goes, what others put there and folders that were there
// stay.
func TestClose(t *testing.T) {
	left := func(made bool, others ...string) []string {
		t.Helper()
		path := filepath.Join(t.TempDir(), "data")
		if !made {
			if err := os.Mkdir(path, 0o700); err != nil {
				t.Fatal(err)
			}
		}
		d := own(t, path)
		mustWrite(t, d, "token", "x")
		for _, name := range others {
			if err := os.WriteFile(filepath.Join(path, name), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		d.Close("token")
		d.Close("token")
		entries, err := os.ReadDir(path)
		names := []string{}
		for _, e := range entries {
			names = append(names, e.Name())
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return names
	}
	if got := left(true); got != nil {
		t.Errorf("of a folder that was made: %q", got)
	}
	if got := left(false); got == nil || len(got) != 0 {
		t.Errorf("of a folder that was there: %q", got)
	}
	if got := left(true, "notes"); fmt.Sprint(got) != "[notes]" {
		t.Errorf("of a folder with others' files: %q", got)
	}
}

// TestRefused: whatever is not this user's alone, with what to do about it.
func TestRefused(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	for name, mode := range map[string]fs.FileMode{"group": 0o750, "others": 0o701, "usual": 0o755} {
		if err := errors.Join(os.Mkdir(at(name), 0o700), os.Chmod(at(name), mode)); err != nil {
			t.Fatal(err)
		}
		refused(t, at(name), fmt.Sprintf("mode %04o", mode), "chmod 700 "+at(name), "--data")
		if err := os.WriteFile(filepath.Join(at(name), "notes"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := datadir.Own(at(name)); err == nil || strings.Contains(err.Error(), "chmod") {
			t.Errorf("a folder with others' files: %v", err)
		}
		if err := os.WriteFile(filepath.Join(at(name), "lock"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		refused(t, at(name), "chmod 700 "+at(name))
	}
	if err := errors.Join(os.Mkdir(at("good"), 0o700), os.Symlink(at("good"), at("link")), os.WriteFile(at("file"), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	refused(t, at("link"), "symbolic link")
	refused(t, at("link")+"/", "symbolic link")
	refused(t, at("file"), "not a folder")
	if entries, err := os.ReadDir(at("good")); err != nil || len(entries) > 0 {
		t.Errorf("%v was left behind the link, %v", entries, err)
	}
	if os.Geteuid() != 0 {
		t.Log("not root: no folder can be given to another user")
		return
	}
	if err := errors.Join(os.Mkdir(at("theirs"), 0o700), os.Chown(at("theirs"), stranger, stranger)); err != nil {
		t.Fatal(err)
	}
	refused(t, at("theirs"), "belongs to uid 65534 (mode 0700)", "this is uid 0", "--data")
	if entries, err := os.ReadDir(at("theirs")); err != nil || len(entries) > 0 {
		t.Errorf("%v was left in it, %v", entries, err)
	}
}

// TestNothingFollowed: links in the folder lead nowhere, neither when it is
// written to nor when it is read or locked.
func TestNothingFollowed(t *testing.T) {
	dir := t.TempDir()
	path, precious := filepath.Join(dir, "data"), filepath.Join(dir, "precious")
	if err := errors.Join(os.Mkdir(path, 0o700), os.WriteFile(precious, []byte("precious"), 0o600)); err != nil {
		t.Fatal(err)
	}
	link := func(name string) {
		if err := os.Symlink(precious, filepath.Join(path, name)); err != nil {
			t.Fatal(err)
		}
	}
	link("token")
	link(".token")
	link("url")
	d := own(t, path)
	mustWrite(t, d, "token", "secret")
	if text, err := d.Read("token"); err != nil || string(text) != "secret" {
		t.Errorf("%q, %v", text, err)
	}
	if text, err := d.Read("url"); err == nil || !strings.Contains(err.Error(), filepath.Join(path, "url")+" is a symbolic link") {
		t.Errorf("through a link: %q, %v", text, err)
	}
	d.Close("token", "url")
	link("lock")
	if _, err := datadir.Own(path); err == nil || !strings.Contains(err.Error(), filepath.Join(path, "lock")+" is a symbolic link") {
		t.Errorf("a lock that is a link: %v", err)
	}
	if text, err := os.ReadFile(precious); err != nil || string(text) != "precious" {
		t.Errorf("%q, %v", text, err)
	}
}

// TestRead: a file that others own or may look into, a huge one, and what is none.
func TestRead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "data")
	d := own(t, path)
	mustWrite(t, d, "open", "x")
	mustWrite(t, d, "huge", strings.Repeat("x", 64<<10+1))
	mustWrite(t, d, "theirs", "x")
	if err := errors.Join(os.Chmod(filepath.Join(path, "open"), 0o640), os.Mkdir(filepath.Join(path, "folder"), 0o700)); err != nil {
		t.Fatal(err)
	}
	names := []string{"open", "huge", "folder"}
	if os.Geteuid() == 0 {
		names = append(names, "theirs")
		if err := os.Chown(filepath.Join(path, "theirs"), stranger, stranger); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range names {
		if text, err := d.Read(name); err == nil {
			t.Errorf("%s: %d bytes", name, len(text))
		} else if told := "run `chmod 600 " + filepath.Join(path, "open") + "`"; strings.Contains(err.Error(), told) != (name == "open") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestDefault(t *testing.T) {
	f := func(want string, env ...string) {
		t.Helper()
		for _, name := range []string{"XPYD_DATA", "XDG_RUNTIME_DIR", "XDG_STATE_HOME", "HOME", "TMPDIR"} {
			t.Setenv(name, "")
		}
		for i := 0; i < len(env); i += 2 {
			t.Setenv(env[i], env[i+1])
		}
		if got := datadir.Default(); got != want {
			t.Errorf("%q: %s, want %s", env, got, want)
		}
	}
	f("/d", "XPYD_DATA", "/d", "XDG_RUNTIME_DIR", "/r")
	f("/r/xpyd", "XDG_RUNTIME_DIR", "/r", "XDG_STATE_HOME", "/s", "HOME", "/h")
	f("/s/xpyd", "XDG_RUNTIME_DIR", "relative", "XDG_STATE_HOME", "/s", "HOME", "/h")
	f("/h/.local/state/xpyd", "HOME", "/h")
	f(fmt.Sprintf("/t/xpyd-%d", os.Geteuid()), "TMPDIR", "/t")
}

// TestInherit: two processes hold one lock. The folder is the old one's until the new one takes it,
// and neither unlocks it or removes anything while it is not the owner.
func TestInherit(t *testing.T) {
	path := filepath.Join(t.TempDir(), "data")
	taken := func(want bool) {
		t.Helper()
		d, err := datadir.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		if is, err := d.Taken(); err != nil || is != want {
			t.Errorf("taken: %t, %v", is, err)
		}
	}
	inherit := func(old *datadir.Dir) *datadir.Dir {
		t.Helper()
		fd, err := syscall.Dup(int(old.Lock().Fd()))
		if err != nil {
			t.Fatal(err)
		}
		d, err := datadir.Inherit(path, os.NewFile(uintptr(fd), "lock"), old.Made())
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	first := own(t, path)
	mustWrite(t, first, "token", "one")
	inherit(first).Close("token") // a new process that fails
	taken(true)
	if text, err := first.Read("token"); err != nil || string(text) != "one" {
		t.Errorf("%q, %v", text, err)
	}
	second := inherit(first)
	second.Take()
	first.Give()
	first.Close("token")
	taken(true)
	if text, err := second.Read("token"); err != nil || string(text) != "one" {
		t.Errorf("%q, %v", text, err)
	}
	if err := errors.Join(second.Remove("token"), second.Remove("token")); err != nil {
		t.Error(err)
	}
	second.Close()
	if _, err := os.Stat(path); !os.IsNotExist(err) {
		t.Errorf("the folder is left: %v", err)
	}
	other := own(t, filepath.Join(t.TempDir(), "other"))
	third := own(t, path)
	if _, err := datadir.Inherit(path, other.Lock(), false); err == nil || !strings.Contains(err.Error(), "another folder's") {
		t.Errorf("another folder's lock: %v", err)
	}
	third.Close()
}
