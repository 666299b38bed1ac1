// Package hostile tests that a neighbour on the same machine, who holds no
// secret of the fleet, can neither take it down, nor read it, nor poison it:
// see TestHostile.
package hostile

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// stranger is the uid of the attacker, where the tests run as root; elsewhere
// he has ours, and what only another uid is refused is not tried.
const stranger = 65534

// act is one thing that the attacker does.
type act struct {
	Do     string // "http", "idle", "listen", "cmdlines", "squat" or "read"
	URL    string
	Method string
	Header map[string]string
	Body   string
	Addrs  []string
	Count  int
	Path   string
	Target string
}

// got is what he has of it.
type got struct {
	Status int
	Text   string
	Err    string
}

const actEnv = "XPYD_HOSTILE_ACT"

// attack is the attacker's process.
func attack(text string) int {
	var a act
	var g got
	err := json.Unmarshal([]byte(text), &a)
	if err == nil {
		g, err = a.run()
	}
	if err != nil {
		g.Err = err.Error()
	}
	if err := json.NewEncoder(os.Stdout).Encode(g); err != nil {
		return 1
	}
	return 0
}

// most is how much of an answer is kept.
const most = 64 << 10

func (a *act) run() (got, error) {
	switch a.Do {
	case "http":
		return a.http()
	case "idle":
		return a.idle()
	case "raw":
		return a.raw()
	case "cmdlines":
		return cmdlines()
	case "squat":
		return got{}, a.squat()
	case "read":
		b, err := os.ReadFile(a.Path)
		return got{Text: string(b)}, err
	}
	return got{}, fmt.Errorf("cannot %q", a.Do)
}

func (a *act) http() (g got, err error) {
	req, err := http.NewRequest(a.Method, a.URL, strings.NewReader(a.Body))
	if err != nil {
		return g, err
	}
	for k, v := range a.Header {
		req.Header.Set(k, v)
	}
	resp, err := (&http.Client{Timeout: 20 * time.Second}).Do(req)
	if err != nil {
		return g, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, most))
	return got{Status: resp.StatusCode, Text: string(b)}, err
}

// idle opens Count connections to each address, says nothing, and holds them
// until its standard input ends.
func (a *act) idle() (got, error) {
	var open []net.Conn
	for _, addr := range a.Addrs {
		for range a.Count {
			c, err := net.DialTimeout("tcp", addr, time.Second)
			if err != nil {
				break // the other side has no more
			}
			open = append(open, c)
		}
	}
	fmt.Fprintln(os.Stderr, "open", len(open))
	_, err := io.Copy(io.Discard, os.Stdin)
	for _, c := range open {
		c.Close()
	}
	return got{Status: len(open)}, err
}

// raw sends the body as it is and reads what comes.
func (a *act) raw() (g got, err error) {
	c, err := net.DialTimeout("tcp", a.Addrs[0], time.Second)
	if err != nil {
		return g, err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
		return g, err
	}
	if _, err := io.WriteString(c, a.Body); err != nil {
		return g, err
	}
	b, err := io.ReadAll(io.LimitReader(c, most))
	if errors.Is(err, os.ErrDeadlineExceeded) && len(b) > 0 {
		err = nil // it answered, and waits for more
	}
	return got{Text: string(b)}, err
}

// cmdlines is what everybody may read of all processes.
func cmdlines() (g got, err error) {
	for _, what := range []string{"cmdline", "environ"} {
		paths, err := filepath.Glob("/proc/[0-9]*/" + what)
		if err != nil {
			return g, err
		}
		for _, p := range paths {
			if p == fmt.Sprintf("/proc/%d/%s", os.Getpid(), what) {
				continue // his own orders
			}
			b, _ := os.ReadFile(p) // it may have ended, or be another's
			g.Text += string(b) + "\n"
		}
	}
	return g, nil
}

// squat makes the folder, and in it a link to Target at each name.
func (a *act) squat() error {
	if err := os.Mkdir(a.Path, 0o777); err != nil {
		return err
	}
	if err := os.Chmod(a.Path, 0o777); err != nil {
		return err
	}
	for _, name := range a.Addrs {
		if err := os.Symlink(a.Target, filepath.Join(a.Path, name)); err != nil {
			return err
		}
	}
	return nil
}

// binaryFor is a copy of a program that everybody may run.
func binaryFor(t testing.TB, path string) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "xpyd-hostile-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	to := filepath.Join(dir, filepath.Base(path))
	if err := os.WriteFile(to, b, 0o755); err != nil {
		t.Fatal(err)
	}
	return to
}

// credential is the attacker's, nil where we cannot give him one.
func credential() *syscall.Credential {
	if os.Geteuid() != 0 {
		return nil
	}
	return &syscall.Credential{Uid: stranger, Gid: stranger}
}

// attacker runs acts as another user.
type attacker struct {
	t    testing.TB
	self string
}

func newAttacker(t testing.TB) *attacker {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return &attacker{t, binaryFor(t, self)}
}

func (a *attacker) command(what act) *exec.Cmd {
	a.t.Helper()
	text, err := json.Marshal(what)
	if err != nil {
		a.t.Fatal(err)
	}
	cmd := exec.Command(a.self, "-test.run=^$")
	cmd.Env, cmd.Dir = []string{actEnv + "=" + string(text), "PATH=/usr/bin:/bin"}, "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: credential()}
	return cmd
}

// does waits for one act's end.
func (a *attacker) does(what act) got {
	a.t.Helper()
	cmd := a.command(what)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		a.t.Fatalf("the attacker's process: %v\n%s", err, stderr.Bytes())
	}
	var g got
	if err := json.Unmarshal(out, &g); err != nil {
		a.t.Fatalf("the attacker's process printed %q: %v", out, err)
	}
	return g
}

// asks is one HTTP request of his.
func (a *attacker) asks(method, url, body string, header map[string]string) got {
	a.t.Helper()
	g := a.does(act{Do: "http", Method: method, URL: url, Body: body, Header: header})
	if g.Err != "" {
		a.t.Errorf("%s %s: %s", method, url, g.Err)
	}
	return g
}

// holds opens idle connections and keeps them until release.
func (a *attacker) holds(count int, addrs ...string) (release func()) {
	a.t.Helper()
	cmd := a.command(act{Do: "idle", Addrs: addrs, Count: count})
	in, err := cmd.StdinPipe()
	if err != nil {
		a.t.Fatal(err)
	}
	said, err := cmd.StderrPipe()
	if err != nil {
		a.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		a.t.Fatal(err)
	}
	if _, err := io.ReadFull(said, make([]byte, len("open "))); err != nil {
		a.t.Fatal(err)
	}
	return func() {
		in.Close()
		_ = cmd.Wait() // it is the end that counts
	}
}
