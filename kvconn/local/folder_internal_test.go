//go:build linux

package local

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// inFolder is a transport whose sockets are files, and their folder.
func inFolder(t *testing.T, folder string) *Transport {
	t.Helper()
	tr, err := New("shm", folder, func(c *Conn) net.Conn { return c })
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

// files are what a folder has.
func files(t *testing.T, folder string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(folder)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// TestFolder: a socket in a folder is dialled by the same folder, whatever its path, and
// leaves nothing when it is closed; one of the same name elsewhere is another.
func TestFolder(t *testing.T) {
	folder, link := t.TempDir(), filepath.Join(t.TempDir(), "mounted elsewhere")
	if err := os.Symlink(folder, link); err != nil {
		t.Fatal(err)
	}
	ln, err := inFolder(t, folder).Listen("")
	if err != nil {
		t.Fatal(err)
	}
	addr := ln.Addr().String()
	if !strings.HasPrefix(addr, "shm:xpyd-kv-") || strings.Contains(addr, "/") {
		t.Errorf("it listens at %s", addr)
	}
	c, err := inFolder(t, link).Dial(t.Context(), addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for _, elsewhere := range []string{"", t.TempDir()} {
		if c, err := inFolder(t, elsewhere).Dial(t.Context(), addr); err == nil {
			c.Close()
			t.Errorf("%q leads to a socket of %s", elsewhere, folder)
		}
	}
	if err := ln.Close(); err != nil {
		t.Error(err)
	}
	_ = ln.Close() // again, as one does
	if left := files(t, folder); len(left) > 0 {
		t.Errorf("it leaves %v", left)
	}
}

// TestFolderNames: a peer's address leads to nothing but a socket of the folder.
func TestFolderNames(t *testing.T) {
	folder := t.TempDir()
	below := filepath.Join(folder, "below")
	if err := os.Mkdir(below, 0o700); err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("unix", filepath.Join(folder, "other"))
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	for _, addr := range []string{"shm:../other", "shm:other", "shm:..", "shm:.", "shm:", "shm:a/b", "shm:" + folder + "/other", "shm:@x", "shm:x\x00", "tcp:other"} {
		for _, f := range []string{below, folder} {
			if c, err := inFolder(t, f).Dial(t.Context(), addr); err == nil {
				c.Close()
				t.Errorf("%q leads somewhere", addr)
			}
		}
	}
}

// TestFolderFull: the longest folder that CheckSockets of kvconn/way lets through has room
// for a socket's name, and a longer one has none.
func TestFolderFull(t *testing.T) {
	t.Chdir(t.TempDir())
	for _, more := range []int{0, 1} {
		folder := strings.Repeat("d", MaxFolder+more)
		if err := os.Mkdir(folder, 0o700); err != nil {
			t.Fatal(err)
		}
		ln, err := inFolder(t, folder).Listen("")
		if (err == nil) != (more == 0) {
			t.Errorf("%d bytes: %v", len(folder), err)
		}
		if err == nil {
			ln.Close()
		}
		if left := files(t, folder); len(left) > 0 {
			t.Errorf("%d bytes: it leaves %v", len(folder), left)
		}
	}
}

const listenEnv = "XPYD_TEST_LISTEN"

// TestFolderSweep: what a killed process leaves is removed by the next that listens there,
// and nothing else is.
func TestFolderSweep(t *testing.T) {
	if folder := os.Getenv(listenEnv); folder != "" { // that process
		if _, err := inFolder(t, folder).Listen(""); err != nil {
			t.Fatal(err)
		}
		runtime.KeepAlive(unix.Kill(os.Getpid(), unix.SIGKILL))
	}
	folder := t.TempDir()
	living, err := inFolder(t, folder).Listen("")
	if err != nil {
		t.Fatal(err)
	}
	defer living.Close()
	for _, name := range []string{"l.dead", "s.mine", "notes"} { // a killed process may not have come to its socket
		if err := os.WriteFile(filepath.Join(folder, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command(os.Args[0], "-test.run", "^TestFolderSweep$")
	cmd.Env = append(os.Environ(), listenEnv+"="+folder)
	if out, err := cmd.CombinedOutput(); err == nil || cmd.ProcessState.ExitCode() != -1 {
		t.Fatalf("the process was not killed: %v\n%s", err, out)
	}
	if n := len(files(t, folder)); n != 6 {
		t.Fatalf("%v: want ours, the killed one's, and two others", files(t, folder))
	}
	next, err := inFolder(t, folder).Listen("")
	if err != nil {
		t.Fatal(err)
	}
	if n := len(files(t, folder)); n != 6 {
		t.Errorf("%v: want the two that live, and two others", files(t, folder))
	}
	next.Close()
	c, err := inFolder(t, folder).Dial(t.Context(), living.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
}
