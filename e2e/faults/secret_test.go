package faults

import (
	"bytes"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/trust"
)

// TestRouterRestarts: workers that were started apart come back by themselves to a
// router that was killed, or ended, and started again. Before, it had another NATS
// password, and they tried the old one for ever.
func TestRouterRestarts(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "router.yaml")
	if err := os.WriteFile(file, []byte("fleet: {listen: \""+cluster.Port(t)+"\"}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r := cluster.Alone(t, "--config", file)
	p := r.Worker(t, fleet.Prefill, "--id", "p")
	d := r.Worker(t, fleet.Decode, "--id", "d")
	r.WaitServing(t, time.Minute, 1, 1)
	join := r.JoinLine(t).Reveal()
	client := cluster.NewClient(t)
	for _, end := range []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM} {
		r.Signal(end)
		r.Exit(t, 30*time.Second)
		r = r.Again(t, "--config", file)
		if r.JoinLine(t).Reveal() != join {
			t.Error("the join line is another")
		}
		r.WaitServing(t, 30*time.Second, 1, 1)
		if a := cluster.Post(t.Context(), client, r.URL+"/v1/completions", `{"model":"stories260k","prompt":"Once","max_tokens":4}`); !a.Good() {
			t.Errorf("after %v: %v", end, a)
		}
	}
	if !cluster.Alive(p.PID()) || !cluster.Alive(d.PID()) {
		t.Error("a worker has ended")
	}
}

// TestRouterMoves: a router that comes back at another port is found there, as the
// join file says where.
func TestRouterMoves(t *testing.T) {
	t.Parallel()
	r := cluster.Alone(t, "--config", "/dev/null") // no port is asked for
	r.Worker(t, fleet.Prefill, "--id", "p")
	r.Worker(t, fleet.Decode, "--id", "d")
	r.WaitServing(t, time.Minute, 1, 1)
	r.Kill()
	r.Exit(t, 30*time.Second)
	u, err := url.Parse(r.NATS)
	if err != nil {
		t.Fatal(err)
	}
	squatter, err := net.Listen("tcp", u.Host)
	if err != nil {
		t.Fatal(err)
	}
	defer squatter.Close()
	again := r.Again(t)
	if again.NATS == r.NATS {
		t.Fatalf("%s again", again.NATS)
	}
	again.WaitServing(t, 30*time.Second, 1, 1)
}

// joinFile writes a line to a file.
func joinFile(t *testing.T, line trust.Join) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "join")
	if err := os.WriteFile(path, []byte(line.Reveal()+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestWrongSecret: a worker of another fleet is turned away, and both ends say so once,
// with what to do. Before, the router wrote twenty lines a second.
func TestWrongSecret(t *testing.T) {
	t.Parallel()
	r := cluster.Alone(t)
	line := r.JoinLine(t)
	line.Secrets = []trust.Secret{trust.NewSecret()}
	file := joinFile(t, line)
	stray := cluster.Start(t, nil, "decode", "--join-file", file, "--threads", "1", "--id", "stray")
	lines := func(p *cluster.Process, text string) int { return strings.Count(p.Stderr.String(), text) }
	cluster.Wait(t, 30*time.Second, "both ends say it", func() error {
		if a, b := lines(r.Process, "wrong fleet secret from 127.0.0.1 in"), lines(stray, "does not know this fleet secret"); a == 0 || b == 0 {
			return fmt.Errorf("%d and %d", a, b)
		}
		return nil
	})
	time.Sleep(2 * time.Second) // for some more attempts
	if a, b := lines(r.Process, "secret"), lines(stray, "secret"); a != 1 || b != 1 {
		t.Errorf("%d lines at the router, %d at the worker", a, b)
	}
	if f, err := r.Fleet(); err != nil || f.Get("stray") != nil {
		t.Errorf("it is in the fleet: %v", err)
	}
	if err := os.Rename(joinFile(t, r.JoinLine(t)), file); err != nil {
		t.Fatal(err)
	}
	stray.Signal(syscall.SIGHUP)
	cluster.Wait(t, 20*time.Second, "with the right one it is let in", func() error {
		f, err := r.Fleet()
		if err == nil && f.Get("stray") == nil {
			err = fmt.Errorf("%+v", f)
		}
		return err
	})
}

// TestSecretRotates: a fleet gets another secret under load, with nothing restarted
// and no request failed. A worker whose join line is a copy keeps the older one from
// being retired, and is shut out if it is all the same.
func TestSecretRotates(t *testing.T) {
	t.Parallel()
	r := cluster.Up(t)
	list := recorded(t, r, 12)
	pids := childPIDs(t, r)
	copied := cluster.Start(t, nil, "decode", "--join-file", joinFile(t, r.JoinLine(t)), "--threads", "1", "--id", "copied")
	r.WaitServing(t, 30*time.Second, 1, 2)
	l := startLoad(t, r, list, 8)
	l.answered(t, 40, nil)
	do := func(want int, words string, args ...string) {
		t.Helper()
		out, errs, code := r.CLI(t, args...)
		if code != want || !strings.Contains(out+errs, words) {
			t.Errorf("%v: exit code %d, %q %q", args, code, out, errs)
		}
	}
	old := r.JoinLine(t).Secrets[0]
	do(0, "older, accepted", "secret", "rotate")
	next := r.JoinLine(t).Secrets[0]
	cluster.Wait(t, 30*time.Second, "the others have it", func() error {
		f, err := r.Fleet()
		for _, id := range []string{"prefill-0", "decode-0"} {
			if err == nil && f.Get(id).Secrets != next.ID()+"+"+old.ID() {
				err = fmt.Errorf("%s has %s", id, f.Get(id).Secrets)
			}
		}
		return err
	})
	both := cluster.Start(t, nil, "prefill", "--join-file", joinFile(t, r.JoinLine(t)), "--threads", "1", "--id", "both")
	r.WaitServing(t, 30*time.Second, 2, 2)
	do(1, "members without "+next.ID()+" would be shut out: copied;", "secret", "retire")
	l.answered(t, 40, nil)
	do(0, "", "drain", "copied", "--wait")
	do(0, "in force", "secret", "retire", "--force")
	cluster.Wait(t, 30*time.Second, "the one with a copy is shut out", func() error {
		f, err := r.Fleet()
		if err == nil && f.Get("copied") != nil && f.Get("copied").State == fleet.Live {
			err = fmt.Errorf("it is live")
		}
		if err == nil && !strings.Contains(copied.Stderr.String(), "does not know this fleet secret") {
			err = fmt.Errorf("it was not told")
		}
		return err
	})
	// Whose copy names both has heard that one is retired.
	cluster.Wait(t, 30*time.Second, "the copy of both accepts the newer alone", func() error {
		f, err := r.Fleet()
		if err == nil && f.Get("both").Secrets != next.ID() {
			err = fmt.Errorf("%s", f.Get("both").Secrets)
		}
		return err
	})
	do(0, "", "drain", "both", "--wait")
	both.Signal(syscall.SIGTERM)
	if code := both.Exit(t, 20*time.Second); code != 0 {
		t.Errorf("exit code %d", code)
	}
	r.WaitServing(t, 30*time.Second, 1, 1)
	cluster.Wait(t, 30*time.Second, "its way to KV is shut, and decode-0's open", func() error {
		n, err := r.WorkerMetric("prefill-0", `xpyd_kvconn_sessions{side="sender"}`)
		if err == nil && n != 1 {
			err = fmt.Errorf("%v sessions", n)
		}
		return err
	})
	l.answered(t, 40, nil)
	for _, res := range l.stop() {
		if !res.Good() || res.Text != res.want {
			t.Errorf("%v\n got %q\nwant %q", res.Reply, res.Text, res.want)
		}
	}
	now := childPIDs(t, r)
	if len(now) != len(pids) || !cluster.Alive(pids[0]) || !cluster.Alive(pids[1]) {
		t.Errorf("processes %v, before %v", now, pids)
	}
}

// TestNothingSecretShows: neither in the command line of any process nor in what any
// of them says, also when they say all.
func TestNothingSecretShows(t *testing.T) {
	t.Parallel()
	up := cluster.Up(t, "--log-level", "debug")
	alone := cluster.Alone(t, "--log-level", "debug")
	worker := alone.Worker(t, fleet.Prefill, "--log-level", "debug")
	cluster.Wait(t, 30*time.Second, "the worker is up", func() error {
		if !strings.Contains(worker.Stderr.String(), "nats link is up") {
			return fmt.Errorf("printed %s", worker.Stderr)
		}
		return nil
	})
	pids := append(childPIDs(t, up), up.PID(), alone.PID(), worker.PID())
	for _, r := range []*cluster.Router{up, alone} {
		r.CLI(t, "secret", "rotate")
		secrets := []string{r.Token}
		for _, s := range r.JoinLine(t).Secrets {
			secrets = append(secrets, s.Reveal(), s.Token(trust.Scrape, ""), s.Token(trust.Cluster, ""), s.Token(trust.Query, ""))
		}
		for _, secret := range secrets {
			secret = secret[strings.LastIndex(secret, ".")+1:] // less the ID, which is none
			for _, pid := range pids {
				b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cmdline")
				if err != nil || len(b) == 0 {
					t.Fatal(pid, err)
				}
				if bytes.Contains(b, []byte(secret)) {
					t.Errorf("%s shows in %q", secret, b)
				}
			}
			for _, p := range []*cluster.Process{up.Process, alone.Process, worker} {
				if strings.Contains(p.Stdout.String()+p.Stderr.String(), secret) {
					t.Errorf("%s was printed by %v", secret, p.Cmd.Args)
				}
			}
		}
	}
}
