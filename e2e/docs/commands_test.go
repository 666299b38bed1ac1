package docs

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
)

func TestMain(m *testing.M) { os.Exit(cluster.Main(m)) }

// TestCommands runs the blocks of commands of every document, as printed and in order,
// except those marked as needing what is not here, in a folder that looks like the repository. Documents name the ports that
// are the default: where it may, each gets a network of its own.
func TestCommands(t *testing.T) {
	xpyd := cluster.Binary(t)
	gate := read(t, filepath.Join(root, ".ci/run")) + read(t, filepath.Join(root, "Makefile"))
	registry := os.Getenv("XPYD_DOCS_REGISTRY") != ""
	var alone sync.Mutex // whoever has no network of its own
	for _, file := range documents(t) {
		blocks, err := parse(file, read(t, file))
		if err != nil {
			t.Fatal(err)
		}
		t.Run(filepath.Base(file), func(t *testing.T) {
			t.Parallel()
			needs := func(b block) bool { return b.marked("registry") }
			if registry && slices.ContainsFunc(blocks, needs) || ownNetwork() != nil {
				t.Log("in the machine's network")
				alone.Lock()
				defer alone.Unlock()
			}
			d := newDesk(t, xpyd)
			for i := range blocks {
				b := &blocks[i]
				d.enter(b.section)
				switch {
				case b.marked("gate"):
					inGate(t, gate, b)
				case b.lang == "yaml" && len(b.marks) == 1:
					if err := os.WriteFile(filepath.Join(d.dir, b.marks[0]), []byte(b.text), 0o600); err != nil {
						t.Fatal(err)
					}
				case b.lang == "sh" && (len(b.marks) == 0 || registry && needs(*b)):
					d.run(b)
				}
			}
			d.enter(-1)
		})
	}
}

// inGate fails unless the gate has each of a block's commands.
func inGate(t *testing.T, gate string, b *block) {
	t.Helper()
	for line := range strings.Lines(b.text) {
		command, _, _ := strings.Cut(line, "#")
		if command = strings.TrimSpace(command); command != "" && !strings.Contains(gate, command) {
			t.Errorf("%v: neither .ci/run nor the Makefile has %q", b, command)
		}
	}
}

// desk is where a reader of one document sits: a folder, and what runs.
type desk struct {
	t       *testing.T
	dir     string
	env     []string
	section int
	running []*job
}

// job is a block that runs.
type job struct {
	block *block
	cmd   *exec.Cmd
	out   cluster.Output
	done  chan struct{}
}

// newDesk makes a folder with what the repository has in it, a home beside it, and a
// PATH that has xpyd.
func newDesk(t *testing.T, xpyd string) *desk {
	t.Helper()
	base := t.TempDir()
	d := &desk{t: t, dir: filepath.Join(base, "xpyd")}
	home, bin := filepath.Join(base, "home"), filepath.Join(base, "bin")
	for _, dir := range []string{d.dir, home, bin} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	top, err := filepath.Abs(root)
	if err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(top)
	if err != nil {
		t.Fatal(err)
	}
	links := map[string]string{filepath.Join(bin, "xpyd"): xpyd}
	for _, e := range entries {
		if !slices.Contains([]string{".git", ".cache", "bin", "dist"}, e.Name()) {
			links[filepath.Join(d.dir, e.Name())] = filepath.Join(top, e.Name())
		}
	}
	for at, to := range links {
		if err := os.Symlink(to, at); err != nil {
			t.Fatal(err)
		}
	}
	// An error of the server's is an error of curl's.
	if err := os.WriteFile(filepath.Join(home, ".curlrc"), []byte("fail\nno-progress-meter\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	d.env = append(slices.DeleteFunc(os.Environ(), func(kv string) bool {
		return strings.HasPrefix(kv, "XPYD_") || strings.HasPrefix(kv, "XDG_") || strings.HasPrefix(kv, "GOFLAGS=")
	}), goCaches(t)...)
	// Go builds what cluster.Binary has built.
	d.env = append(d.env, "HOME="+home, "PATH="+bin+":"+os.Getenv("PATH"), "GOBIN="+bin, "CGO_ENABLED=0", `GOFLAGS=-trimpath "-ldflags=-s -w"`)
	t.Cleanup(func() { // after a failure
		for _, j := range d.running {
			j.signal(syscall.SIGKILL)
			<-j.done
		}
	})
	return d
}

// goCaches keeps Go's caches where they are, whatever HOME is.
func goCaches(t *testing.T) []string {
	t.Helper()
	out, err := exec.Command("go", "env", "GOCACHE", "GOMODCACHE", "GOPATH").Output()
	v := strings.Split(string(out), "\n")
	if err != nil || len(v) < 3 {
		t.Fatalf("go env: %q, %v", out, err)
	}
	return []string{"GOCACHE=" + v[0], "GOMODCACHE=" + v[1], "GOPATH=" + v[2]}
}

// enter ends what the section before has started, the latest first, as Ctrl-C does.
func (d *desk) enter(section int) {
	d.t.Helper()
	if section == d.section {
		return
	}
	d.section = section
	for len(d.running) > 0 {
		j := d.running[len(d.running)-1]
		j.signal(syscall.SIGINT)
		cluster.Wait(d.t, 20*time.Second, j.block.String()+": its end after Ctrl-C", j.over)
		d.running = d.running[:len(d.running)-1]
	}
}

// started is what a server says when it serves.
var started = regexp.MustCompile(`(?m)^(ready|listening) |msg="worker is up"|Ready to accept connections`)

// run runs a block: to its end, or, if it is a server's, until it serves.
func (d *desk) run(b *block) {
	d.t.Helper()
	serves, err := b.serves()
	if err != nil {
		d.t.Fatal(err)
	}
	j := &job{block: b, cmd: exec.Command("bash", "-euo", "pipefail", "-c", b.text), done: make(chan struct{})}
	j.cmd.Dir, j.cmd.Env = d.dir, d.env
	j.cmd.Stdout, j.cmd.Stderr = &j.out, &j.out
	j.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	j.cmd.WaitDelay = 5 * time.Second
	if err := j.cmd.Start(); err != nil {
		d.t.Fatal(err)
	}
	go func() {
		defer close(j.done)
		_ = j.cmd.Wait() // the state says all
	}()
	d.running = append(d.running, j)
	begun, limit := time.Now(), time.Minute
	if b.marked("registry") {
		limit = 5 * time.Minute
	}
	cluster.Wait(d.t, limit, fmt.Sprintf("%v:\n%s", b, b.text), func() error {
		ended := j.over() == nil
		switch {
		case serves && ended:
			d.t.Fatalf("%v: the server ended (%v):\n%s\n%s", b, j.cmd.ProcessState, b.text, &j.out)
		case serves && started.MatchString(j.out.String()), ended:
			return nil
		}
		return fmt.Errorf("it still runs, and printed\n%s", &j.out)
	})
	if serves {
		return
	}
	d.running = d.running[:len(d.running)-1]
	if !j.cmd.ProcessState.Success() {
		d.t.Fatalf("%v: %v:\n%s\n%s", b, j.cmd.ProcessState, b.text, &j.out)
	}
	d.t.Logf("%v: %v\n%s\n%s", b, time.Since(begun).Round(time.Millisecond), b.text, &j.out)
}

func (j *job) over() error {
	select {
	case <-j.done:
		return nil
	default:
		return fmt.Errorf("it still runs, and printed\n%s", &j.out)
	}
}

// signal reaches all processes of the block.
func (j *job) signal(s syscall.Signal) { _ = syscall.Kill(-j.cmd.Process.Pid, s) }
