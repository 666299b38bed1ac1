package faults

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/internal/fleet"
)

// childPIDs are the pids of an up's workers.
func childPIDs(t *testing.T, r *cluster.Router) []int {
	t.Helper()
	children, err := r.Children()
	if err != nil {
		t.Fatal(err)
	}
	var pids []int
	for _, c := range children {
		pids = append(pids, c.PID)
	}
	if len(pids) < 2 {
		t.Fatalf("children: %v", children)
	}
	return pids
}

// nothingLeft checks that an up which ended left no process, file or port.
func nothingLeft(t *testing.T, r *cluster.Router, pids []int, limit time.Duration) {
	t.Helper()
	cluster.Wait(t, limit, "no process left", func() error {
		for _, pid := range pids {
			if cluster.Alive(pid) {
				return fmt.Errorf("pid %d lives", pid)
			}
		}
		return nil
	})
	for _, url := range []string{r.URL, r.Admin, r.NATS} {
		addr := url[strings.LastIndexAny(url, "/@")+1:]
		if conn, err := net.DialTimeout("tcp", addr, time.Second); err == nil {
			conn.Close()
			t.Errorf("%s still listens", addr)
		}
	}
}

func noFiles(t *testing.T, r *cluster.Router) {
	t.Helper()
	if _, err := os.Stat(r.Data); !os.IsNotExist(err) {
		list, _ := filepath.Glob(filepath.Join(r.Data, "*"))
		t.Errorf("the data folder is left: %v %v", err, list)
	}
}

// TestUpReady: the time to the ready line is recorded; only a machine that is
// not itself slow may hold it against us.
func TestUpReady(t *testing.T) {
	cluster.Binary(t) // building is not part of it
	r := cluster.Launch(t, "up", "--device", "cpu")
	r.Line(t, 20*time.Second, "ready http://127.0.0.1:")
	took := time.Since(r.Started)
	t.Logf("ready after %v", took.Round(time.Millisecond))
	if cluster.Late(took, 5*time.Second) {
		t.Errorf("ready after %v", took)
	}
	if out := r.Stdout.String() + r.Stderr.String(); strings.Count(out, "\n") != 1 {
		t.Errorf("more than one line:\n%s", out)
	}
}

// TestUpInterrupt: Ctrl-C drains: running requests finish, and then nothing is
// left. A signal to the process alone and one to its whole group, as a
// terminal sends it, do the same.
func TestUpInterrupt(t *testing.T) {
	t.Parallel()
	for _, group := range []bool{false, true} {
		t.Run(fmt.Sprintf("group %v", group), func(t *testing.T) {
			r := cluster.Up(t, "--log-level", "info")
			list := recorded(t, r, 10)
			pids := childPIDs(t, r)
			l := startLoad(t, r, list, 10)
			l.warmTo(t, 10)
			l.quitOnce.Do(func() { close(l.quit) })
			var running int64
			cluster.Wait(t, 10*time.Second, "all requests have arrived", func() error {
				sent := l.inFlight.Load()
				held, err := r.Ledger()
				if running = l.inFlight.Load(); err == nil && (running != sent || int64(len(held.Requests)) != sent) {
					err = fmt.Errorf("%d and then %d are out, %d in the router", sent, running, len(held.Requests))
				}
				return err
			})
			pid := r.PID()
			if group {
				pid = -pid
			}
			if err := syscall.Kill(pid, syscall.SIGINT); err != nil {
				t.Fatal(err)
			}
			if code := r.Exit(t, 20*time.Second); code != 0 {
				t.Errorf("exit code %d", code)
			}
			for _, res := range l.stop() {
				if !res.Good() || res.Text != res.want {
					t.Errorf("cut by the drain: %v", res.Reply)
				}
			}
			nothingLeft(t, r, pids, 0)
			noFiles(t, r)
			t.Logf("%d requests were running", running)
		})
	}
}

// TestUpQuiet: with the default log level and a device named nothing but the ready line is said
// in a life without trouble: starting, serving, scaling, ending.
func TestUpQuiet(t *testing.T) {
	t.Parallel()
	r := cluster.Up(t, "--device", "cpu")
	traffic(t, r, recorded(t, r, 4))
	for _, counts := range [][]string{{"prefill=2", "decode=2"}, {"prefill=1", "decode=1"}} {
		if out, errs, code := r.CLI(t, "scale", counts[0], counts[1]); code != 0 || errs != "" {
			t.Errorf("scale: %d %s%s", code, out, errs)
		}
		cluster.Wait(t, 20*time.Second, "scaled", func() error {
			children, err := r.Children()
			if err == nil && len(children) != 2*int(counts[0][len(counts[0])-1]-'0') {
				err = fmt.Errorf("%v", children)
			}
			return err
		})
	}
	r.WaitServing(t, 20*time.Second, 1, 1)
	r.Signal(os.Interrupt)
	if code := r.Exit(t, 20*time.Second); code != 0 {
		t.Errorf("exit code %d", code)
	}
	if r.Stderr.String() != "" || r.Stdout.String() != "ready "+r.URL+"\n" {
		t.Errorf("printed %s%s", r.Stdout, r.Stderr)
	}
}

// TestUpTakesTheCPU: where --device auto finds no GPU to use, as this build never does,
// `up` says so in one line, and status shows it.
func TestUpTakesTheCPU(t *testing.T) {
	t.Parallel()
	r := cluster.Up(t)
	cluster.Wait(t, 20*time.Second, "a line on standard error", func() error { // which comes by a pipe of its own
		if said := r.Stderr.String(); !strings.HasPrefix(said, "device auto: on the CPU") || strings.Count(said, "\n") != 1 {
			return fmt.Errorf("printed %q", said)
		}
		return nil
	})
	out, errs, code := r.CLI(t, "status")
	if code != 0 || strings.Count(out, "  cpu  ") != 2 {
		t.Errorf("status: %d %s%s", code, out, errs)
	}
}

// unread is a model under a path from which nobody has loaded it: its bytes are
// still to be hashed.
func unread(t *testing.T, dir string) string {
	t.Helper()
	own := filepath.Join(t.TempDir(), "model")
	if err := os.Mkdir(own, 0o700); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if err := os.Link(f, filepath.Join(own, filepath.Base(f))); err != nil {
			t.Fatal(err)
		}
	}
	return own
}

// TestWorkerInterruptEarly: a worker that is told to stop while it starts does
// not call that a failure.
func TestWorkerInterruptEarly(t *testing.T) {
	t.Parallel()
	dir := unread(t, slowModel(t)) // loads for a while
	join := filepath.Join(t.TempDir(), "join")
	if out, _, _ := cluster.Run(t, "secret", "new"); os.WriteFile(join, []byte(out), 0o600) != nil {
		t.Fatal(out)
	}
	for wait := 10 * time.Millisecond; wait < 200*time.Millisecond; wait = wait * 3 / 2 {
		p := cluster.Start(t, nil, "decode", "--join-file", join, "--model", dir, "--log-level", "warn")
		time.Sleep(wait)
		p.Signal(syscall.SIGTERM)
		if code := p.Exit(t, 10*time.Second); code != -1 && code != 0 || p.Stderr.String() != "" {
			t.Errorf("after %v: exit code %d, printed %s", wait, code, p.Stderr)
		}
	}
}

// TestUpInterruptEarly: Ctrl-C at any moment of the start ends it cleanly.
func TestUpInterruptEarly(t *testing.T) {
	t.Parallel()
	cluster.Binary(t)
	for wait := 5 * time.Millisecond; wait < 100*time.Millisecond; wait = wait * 3 / 2 {
		r := cluster.Launch(t, "up", "--device", "cpu")
		time.Sleep(wait)
		r.Signal(os.Interrupt)
		code := r.Exit(t, 10*time.Second)
		if code == -1 { // before it could ask for the signal
			continue
		}
		if code != 0 || strings.Count(r.Stderr.String(), "\n") > 0 {
			t.Errorf("after %v: exit code %d, printed %s", wait, code, r.Stderr)
		}
		noFiles(t, r)
	}
}

// TestUpInterruptTwice: the second Ctrl-C does not wait for anything.
func TestUpInterruptTwice(t *testing.T) {
	t.Parallel()
	r := cluster.Up(t, "--model", slowModel(t))
	pids := childPIDs(t, r)
	client := cluster.NewClient(t)
	gone := make(chan *cluster.Reply, 1)
	go func() {
		gone <- cluster.Post(t.Context(), client, r.URL+"/v1/completions", slowBody(r, true, 1))
	}()
	cluster.Wait(t, 10*time.Second, "a running request", func() error {
		if l, err := r.Ledger(); err != nil || len(l.Requests) == 0 {
			return fmt.Errorf("no request, %v", err)
		}
		return nil
	})
	r.Signal(os.Interrupt)
	cluster.Wait(t, 5*time.Second, "draining", func() error {
		if r.Ready() == nil {
			return fmt.Errorf("still ready")
		}
		return nil
	})
	at := time.Now()
	r.Signal(os.Interrupt)
	if code := r.Exit(t, 5*time.Second); code != 1 {
		t.Errorf("exit code %d", code)
	}
	if d := time.Since(at); cluster.Late(d, time.Second) {
		t.Errorf("took %v", d)
	}
	<-gone
	nothingLeft(t, r, pids, time.Second+slack)
	noFiles(t, r)
}

// TestWorkerInterruptTwice: a worker alone drains too, and stops at once when
// asked again.
func TestWorkerInterruptTwice(t *testing.T) {
	t.Parallel()
	r := cluster.Alone(t)
	p := r.Worker(t, fleet.Prefill, "--model", slowModel(t), "--id", "p")
	d := r.Worker(t, fleet.Decode, "--id", "d", "--model", p.Cmd.Args[slices.Index(p.Cmd.Args, "--model")+1])
	r.WaitServing(t, 30*time.Second, 1, 1)
	cluster.Wait(t, 10*time.Second, "nothing is left of the probe", r.Idle)
	client := cluster.NewClient(t)
	answer := make(chan *cluster.Reply, 1)
	go func() { answer <- cluster.Post(t.Context(), client, r.URL+"/v1/completions", slowBody(r, true, 1)) }()
	cluster.Wait(t, 10*time.Second, "a running request", func() error {
		if l, err := r.Ledger(); err != nil || len(l.Fleet["d"].Tickets) == 0 {
			return fmt.Errorf("no ticket, %v", err)
		}
		return nil
	})
	d.Signal(syscall.SIGTERM)
	cluster.Wait(t, 5*time.Second, "draining", func() error {
		if f, err := r.Fleet(); err != nil || !f.Get("d").Draining {
			return fmt.Errorf("not draining, %v", err)
		}
		return nil
	})
	if !cluster.Alive(d.PID()) {
		t.Fatal("did not wait for its request")
	}
	at := time.Now()
	d.Signal(syscall.SIGTERM)
	if code := d.Exit(t, 5*time.Second); code != 1 {
		t.Errorf("exit code %d", code)
	}
	if took := time.Since(at); cluster.Late(took, time.Second) {
		t.Errorf("took %v", took)
	}
	if a := <-answer; a.Good() || a.Err != nil {
		t.Errorf("no clear error: %v", a)
	}
	p.Signal(syscall.SIGTERM)
	if code := p.Exit(t, 5*time.Second); code != 0 {
		t.Errorf("the idle one: exit code %d", code)
	}
	r.Signal(syscall.SIGTERM)
	if code := r.Exit(t, 5*time.Second); code != 0 {
		t.Errorf("the router: exit code %d", code)
	}
	if list, err := os.ReadDir(r.Data); err != nil || len(list) != 3 { // the fleet's secret, the join file, the scrape token
		t.Errorf("the data folder has %v, %v", list, err)
	}
}

// TestUpKilled: children die with their parent.
func TestUpKilled(t *testing.T) {
	t.Parallel()
	r := cluster.Up(t, "--prefill", "2", "--decode", "2")
	pids := childPIDs(t, r)
	r.Kill()
	r.Exit(t, 5*time.Second)
	nothingLeft(t, r, pids, time.Second)
	// The folder of a dead one can be taken over.
	again := cluster.Start(t, nil, "up", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--data", r.Data)
	again.Line(t, 20*time.Second, "ready ")
}

// TestUpRefuses: what cannot work is one clear line and the exit code of its
// kind, with nothing left behind.
func TestUpRefuses(t *testing.T) {
	t.Parallel()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	taken := ln.Addr().String()
	broken := t.TempDir()
	if err := os.WriteFile(filepath.Join(broken, "config.json"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	garbage := filepath.Join(t.TempDir(), "model.gguf")
	if err := os.WriteFile(garbage, []byte("no model at all"), 0o600); err != nil {
		t.Fatal(err)
	}
	badConfig := filepath.Join(t.TempDir(), "up.yaml")
	if err := os.WriteFile(badConfig, []byte("lisen: 127.0.0.1:1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	running := cluster.Up(t)
	for _, c := range []struct {
		name string
		args []string
		code int
		want string
	}{
		{"taken port", []string{"up", "--listen", taken}, 1, taken},
		{"taken admin port", []string{"up", "--admin", taken}, 1, taken},
		{"no model there", []string{"up", "--model", "/does/not/exist"}, 1, "/does/not/exist"},
		{"broken model", []string{"up", "--model", broken}, 1, "config.json"},
		{"garbage model", []string{"up", "--model", garbage}, 1, "model.gguf"},
		{"model of a worker", []string{"decode", "--join-file", running.Join, "--model", "/does/not/exist"}, 1, "/does/not/exist"},
		{"unknown flag", []string{"up", "--lisen", "x"}, 2, "--lisen"},
		{"bad count", []string{"up", "--prefill", "0"}, 2, "prefill"},
		{"no number", []string{"up", "--prefill", "two"}, 2, "prefill"},
		{"bad block size", []string{"up", "--block-tokens", "0"}, 2, "block-tokens"},
		{"bad address", []string{"up", "--listen", "nowhere"}, 2, "listen"},
		{"bad device", []string{"up", "--device", "abacus"}, 2, "abacus"},
		{"no config file", []string{"up", "--config", "/does/not/exist"}, 2, "/does/not/exist"},
		{"unknown key", []string{"up", "--config", badConfig}, 2, "lisen"},
		{"unknown command", []string{"down"}, 2, "down"},
		{"argument", []string{"up", "now"}, 2, "now"},
		{"scale without counts", []string{"scale"}, 2, ""},
		{"scale of nothing", []string{"scale", "router=2"}, 2, "router=2"},
		{"role of nothing", []string{"role", "decode-0", "both"}, 2, "both"},
		{"data folder in use", []string{"up", "--data", running.Data}, 1, running.Data},
		{"nobody there", []string{"status", "--admin", "127.0.0.1:1"}, 1, "127.0.0.1:1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			data := filepath.Join(t.TempDir(), "data")
			args := append([]string{}, c.args...)
			if c.args[0] == "up" {
				for _, def := range [][2]string{{"--listen", "127.0.0.1:0"}, {"--admin", "127.0.0.1:0"}} {
					if !contains(strings.Join(c.args, " "), def[0]+" ") {
						args = append(args, def[:]...)
					}
				}
				if !contains(strings.Join(c.args, " "), "--data ") {
					args = append(args, "--data", data)
				}
			}
			out, errs, code := cluster.Run(t, args...)
			if code != c.code {
				t.Errorf("exit code %d, want %d", code, c.code)
			}
			if out != "" || strings.Count(errs, "\n") != 1 || !contains(errs, c.want) {
				t.Errorf("want one line with %q, printed %q and\n%s", c.want, out, errs)
			}
			if _, err := os.Stat(data); err == nil {
				t.Errorf("%s is left", data)
			}
		})
	}
}

// TestUpScale: scale, drain, undrain and role under load lose no request.
func TestUpScale(t *testing.T) {
	t.Parallel()
	r := cluster.Up(t, "--prefill", "2", "--decode", "2")
	list := recorded(t, r, 30)
	l := startLoad(t, r, list, 16)
	run := func(args ...string) {
		t.Helper()
		if out, errs, code := r.CLI(t, args...); code != 0 {
			t.Errorf("%v: %d %s%s", args, code, out, errs)
		}
	}
	run("scale", "prefill=3", "decode=1")
	r.WaitServing(t, 20*time.Second, 3, 1)
	run("scale", "prefill=2", "decode=2")
	r.WaitServing(t, 20*time.Second, 2, 2)
	run("drain", "decode-0")
	r.WaitServing(t, 5*time.Second, 2, 1)
	run("undrain", "decode-0")
	r.WaitServing(t, 5*time.Second, 2, 2)
	run("role", "prefill-1", "decode")
	r.WaitServing(t, 5*time.Second, 1, 3)
	run("role", "prefill-1", "prefill")
	r.WaitServing(t, 5*time.Second, 2, 2)
	join := r.Worker(t, fleet.Decode, "--id", "late")
	r.WaitServing(t, 20*time.Second, 2, 3)
	l.answered(t, 1, func(res result) bool { return res.Decode == "late" })
	join.Signal(syscall.SIGTERM) // it drains
	if code := join.Exit(t, 20*time.Second); code != 0 {
		t.Errorf("the joined worker: exit code %d", code)
	}
	results := l.stop()
	for _, res := range results {
		if !res.Good() || res.Text != res.want {
			t.Errorf("%v\n got %q\nwant %q", res.Reply, res.Text, res.want)
		}
	}
	t.Logf("%d answered", len(results))
	cluster.Wait(t, afterKnown+slack, "ledgers empty", r.Idle)
}
