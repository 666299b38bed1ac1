// Package cluster runs xpyd as real processes, for tests. It builds the binary once per test run,
// starts and stops `xpyd up`, single commands and an external NATS server, and reads their state.
// Only tests import it.
//
// A test package that uses it has
//
//	func TestMain(m *testing.M) { os.Exit(cluster.Main(m)) }
//
// Everything started under a t is killed and waited for when t ends. XPYD_E2E_RACE=1 builds the
// binary with the race detector; XPYD_E2E_LOG=1 copies the processes' output to standard error.
package cluster

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// Main runs a package's tests and removes what they share. In a child of StartNATS it is the NATS
// server instead.
func Main(m *testing.M) int {
	if addr := os.Getenv(natsEnv); addr != "" {
		return serveNATS(addr)
	}
	code := m.Run()
	if dir := os.Getenv(sharedEnv); dir != "" {
		os.RemoveAll(dir)
	}
	return code
}

// sharedEnv names the shared folder, for Main to remove.
const sharedEnv = "XPYD_E2E_SHARED"

// shared is a folder for what all tests of a process share: the binary, and what Once makes.
var shared = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "xpyd-e2e-")
	if err != nil {
		return "", err
	}
	return dir, os.Setenv(sharedEnv, dir)
})

// Once returns a function that calls make once, to write something large to a folder called name,
// and returns the folder's path. Main removes it.
func Once(name string, make func(dir string) error) func(testing.TB) string {
	once := sync.OnceValues(func() (string, error) {
		dir, err := shared()
		if err != nil {
			return "", err
		}
		path := filepath.Join(dir, name)
		return path, make(path)
	})
	return func(t testing.TB) string {
		t.Helper()
		path, err := once()
		if err != nil {
			t.Fatal(err)
		}
		return path
	}
}

// binary is built like a release, but by go run, which alone caches linked programs: a run of all
// tests links it once.
var binary = sync.OnceValues(func() (string, error) { return link("xpyd", "-s -w") })

// OtherVersion is what the xpyd of Other says to be; its sources are the same.
const OtherVersion = "v0.0.0-other"

var other = sync.OnceValues(func() (string, error) {
	return link("xpyd-other", "-s -w -X main.stamped="+OtherVersion)
})

// Other is the path of a built xpyd of OtherVersion.
func Other(t testing.TB) string {
	t.Helper()
	path, err := other()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func link(name, flags string) (string, error) {
	dir, err := shared()
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, name)
	args, cgo := []string{"run", "-trimpath", "-ldflags", flags, "-exec", "cp"}, "CGO_ENABLED=0"
	if os.Getenv("XPYD_E2E_RACE") != "" {
		args, cgo = append(args, "-race"), "CGO_ENABLED=1"
	}
	if err := track(command); err != nil {
		return "", err
	}
	cmd := exec.Command("go", append(args, command, path)...)
	cmd.Env = append(os.Environ(), cgo)
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%v: %w\n%s", cmd, err, out)
	}
	return path, nil
}

const command = "github.com/xpyd/xpyd/cmd/xpyd"

// track opens every folder and embedded file that a program is built from. The cache of go test
// tracks what a test opens and the variables it reads, but not what its child processes do. Without
// this a result would stay "ok (cached)" however xpyd changed.
func track(program string) error {
	os.Getenv("GOFLAGS") // may name an overlay
	const inputs = `{{with .Module}}{{if .Main}}{{.GoMod}}{{"\n"}}{{$.Dir}}{{range $.EmbedFiles}}{{"\n"}}{{$.Dir}}/{{.}}{{end}}{{end}}{{end}}`
	list, err := exec.Command("go", "list", "-deps", "-f", inputs, program).Output()
	if err != nil {
		return fmt.Errorf("go list -deps %s: %w", program, err)
	}
	for path := range strings.Lines(string(list)) {
		f, err := os.Open(strings.TrimSpace(path))
		if err != nil {
			return err
		}
		f.Close()
	}
	return nil
}

// Binary is the path of the built xpyd. A cached test result is valid until xpyd's sources change
// (see track).
func Binary(t testing.TB) string {
	t.Helper()
	path, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// Wait polls f until it returns nil, or fails the test with f's last error after limit, which a
// starved machine may exceed (see Late).
func Wait(t testing.TB, limit time.Duration, what string, f func() error) {
	t.Helper()
	if err := Poll(limit, f); err != nil {
		t.Fatalf("%s: not within %v: %v", what, limit, err)
	}
}

// Poll is Wait for other goroutines, which must not call Fatal.
func Poll(limit time.Duration, f func() error) error { return PollSince(time.Now(), limit, f) }

// PollSince is Poll with a limit that counts from start.
func PollSince(start time.Time, limit time.Duration, f func() error) error {
	for ; ; time.Sleep(5 * time.Millisecond) {
		err := f()
		if err == nil || Late(time.Since(start), limit) {
			return err
		}
	}
}
