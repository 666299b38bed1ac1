// Package upgrade tests that one `xpyd up` takes over from another while requests run.
package upgrade

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/handover"
)

// fakeEnv has this program be a new process that fails in the middle: see TestUpgradeHalf.
const fakeEnv = "UPGRADE_TEST_FAKE"

func TestMain(m *testing.M) {
	if how := os.Getenv(fakeEnv); how != "" {
		os.Exit(fake(how))
	}
	os.Exit(cluster.Main(m))
}

// fake says that the running workers are its own and serve. Asked to take over, it does what how
// says.
func fake(how string) int {
	place, err := handover.Here()
	if err != nil || place.Heir() == nil {
		return 10
	}
	var offer struct{ Workers []struct{ ID string } }
	talk := place.Heir()
	if err := talk.Receive(&offer, time.Now().Add(limit)); err != nil {
		return 11
	}
	var ids []string
	for _, w := range offer.Workers {
		ids = append(ids, w.ID)
	}
	if err := talk.Send(map[string]any{"ready": ids}); err != nil {
		return 12
	}
	var take struct{ Take bool }
	if err := talk.Receive(&take, time.Now().Add(limit)); err != nil || !take.Take {
		return 13
	}
	if how == "fail" {
		if err := talk.Send(map[string]string{"failed": "of the test"}); err != nil {
			return 14
		}
		_ = talk.Receive(&take, time.Now().Add(limit))
	}
	return 4 // die
}

// limit is for what a starved machine still does.
const limit = time.Minute

// settings say when idle connections of clients end.
func settings(t *testing.T, idle time.Duration) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "up.yaml")
	if err := os.WriteFile(path, fmt.Appendf(nil, "idle_timeout: %v\n", idle), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// script writes a program that says an xpyd's version, and otherwise does what do says.
func script(t *testing.T, version, do string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "xpyd")
	if err := os.WriteFile(path, fmt.Appendf(nil, "#!/bin/sh\nif [ \"$1\" = version ]; then %s; exit; fi\n%s\n", version, do), 0o700); err != nil {
		t.Fatal(err)
	}
	return path
}

// bodies are asked in turn: streams, whole answers, several choices.
var bodies = []string{
	`{"model":"stories260k","prompt":"Once upon a time","max_tokens":450,"temperature":0,"ignore_eos":true,"stream":true}`,
	`{"model":"stories260k","prompt":"The little dog","max_tokens":300,"seed":3,"ignore_eos":true,"stream":true}`,
	`{"model":"stories260k","prompt":"Lily and her mom","max_tokens":120,"seed":4,"ignore_eos":true}`,
	`{"model":"stories260k","prompt":["Tim had","Sam saw"],"max_tokens":150,"seed":5,"ignore_eos":true,"stream":true}`,
	`{"model":"stories260k","prompt":"A big red ball","n":2,"max_tokens":150,"seed":6,"ignore_eos":true,"stream":true}`,
	`{"model":"stories260k","prompt":"Hello","max_tokens":2,"temperature":0}`,
}

// load asks until it is ended, on connections that are kept.
type load struct {
	asked, seams atomic.Int64
	end          func()
}

func startLoad(t *testing.T, r *cluster.Router, clients int) *load {
	t.Helper()
	l := &load{}
	want := make([]string, len(bodies))
	first := cluster.NewClient(t)
	for i, body := range bodies {
		got := cluster.Post(t.Context(), first, r.URL+"/v1/completions", body)
		if !got.Good() {
			t.Fatalf("undisturbed: %v", got)
		}
		want[i] = got.Text
	}
	quit := make(chan struct{})
	var wg sync.WaitGroup
	client := cluster.NewClient(t)
	for c := range clients {
		wg.Go(func() {
			for i := c; ; i++ {
				select {
				case <-quit:
					return
				default:
				}
				k := i % len(bodies)
				got := cluster.Post(t.Context(), client, r.URL+"/v1/completions", bodies[k])
				l.asked.Add(1)
				l.seams.Add(int64(got.Seams))
				// Choices and prompts of one stream come in any order.
				if !got.Good() || len(got.Text) != len(want[k]) || k < 3 && got.Text != want[k] {
					t.Errorf("%v\n%s\ngot  %q\nwant %q", got, bodies[k], got.Text, want[k])
					return
				}
			}
		})
	}
	once := sync.OnceFunc(func() {
		close(quit)
		wg.Wait()
		client.CloseIdleConnections()
	})
	t.Cleanup(once)
	l.end = once
	return l
}

// upgrade has r taken over by a binary, and fails unless want is in what is said.
func upgrade(t *testing.T, r *cluster.Router, code int, want, binary string, args ...string) {
	t.Helper()
	start := time.Now()
	out, errs, got := r.CLI(t, append([]string{"up", "--upgrade", binary}, args...)...)
	if got != code || !strings.Contains(out+errs, want) {
		t.Errorf("upgrade: exit code %d, want %d and %q:\n%s%s", got, code, want, out, errs)
	}
	t.Logf("%v: %s%s", time.Since(start).Round(time.Millisecond), errs, out)
}

// cached asks some long prompts, and counts the tokens whose KV was there.
func cached(t *testing.T, r *cluster.Router) (n int) {
	t.Helper()
	client := cluster.NewClient(t)
	for i := range 8 {
		body := fmt.Sprintf(`{"model":"stories260k","prompt":%q,"max_tokens":1}`, strings.Repeat(fmt.Sprintf("She saw %d birds and dogs. ", i), 12))
		resp, err := client.Post(r.URL+"/v1/completions", "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		var said struct {
			Usage struct {
				Details struct {
					Cached int `json:"cached_tokens"`
				} `json:"prompt_tokens_details"`
			}
		}
		err = json.NewDecoder(resp.Body).Decode(&said)
		if resp.Body.Close(); err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: %v", resp.Status, err)
		}
		n += said.Usage.Details.Cached
	}
	return n
}

// saved is nil when no worker still writes to its SSD what it has.
func saved(r *cluster.Router) error {
	f, err := r.Fleet()
	if err != nil {
		return err
	}
	all := 0.0
	for i := range f.Instances {
		n, err := r.WorkerMetric(f.Instances[i].ID, `xpyd_kvtier_units{tier="ssd"}`)
		if err != nil {
			return err
		}
		all += n
		if left, err := r.WorkerMetric(f.Instances[i].ID, "xpyd_kvtier_waiting_units"); err != nil || left > 0 {
			return fmt.Errorf("%v units wait: %w", left, err)
		}
	}
	if all < 64 { // a prompt has 15
		return fmt.Errorf("%v units", all)
	}
	return nil
}

// builds are the builds of the workers that serve.
func builds(t *testing.T, r *cluster.Router) string {
	t.Helper()
	f, err := r.Fleet()
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]int{}
	for i := range f.Instances {
		if m := &f.Instances[i]; m.Serves() {
			v, _, _ := strings.Cut(m.Build, "+")
			seen[v+" "+string(m.Role)]++
		}
	}
	return fmt.Sprint(seen)
}

// TestUpgrade: under load another version takes over, fails to several times, and the first one
// comes back. No request fails, streams move, a scale is kept, what the first one's workers wrote to
// their SSD is found again, and Ctrl-C at what was started first ends all and leaves nothing.
func TestUpgrade(t *testing.T) {
	t.Parallel()
	first, other := cluster.Binary(t), cluster.Other(t)
	r := cluster.Up(t, "--prefill", "1", "--decode", "2", "--config", settings(t, 5*time.Second),
		"--kv-host-memory", "4MiB", "--kv-ssd-dir", filepath.Join(t.TempDir(), "kv"), "--kv-ssd-size", "32MiB")
	if out, errs, code := r.CLI(t, "scale", "prefill=2", "--wait"); code != 0 {
		t.Fatalf("%s%s", out, errs)
	}
	r.WaitServing(t, limit, 2, 2)
	if n := cached(t, r); n != 0 {
		t.Errorf("%d tokens of new prompts are cached", n)
	}
	cluster.Wait(t, limit, "KV on the SSD", func() error { return saved(r) })
	l := startLoad(t, r, 6)
	upgrade(t, r, 0, "to "+cluster.OtherVersion+": done", other)
	if got := builds(t, r); got != fmt.Sprintf("map[%s decode:2 %s prefill:2]", cluster.OtherVersion, cluster.OtherVersion) {
		t.Errorf("after the upgrade: %s", got)
	}
	if _, err := os.ReadFile(filepath.Join(r.Data, "upgrade-binary")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the binary's name is left: %v", err)
	}
	says := other + " version"
	upgrade(t, r, 1, "not ready in 1s", script(t, says, "exec sleep 1000"), "--upgrade-timeout", "1s")
	upgrade(t, r, 1, "the new process ended: exit status 3", script(t, says, "exit 3"))
	upgrade(t, r, 1, "no such file", script(t, says, "exec "+other+` "$@" --model /nowhere`))
	if out, _, _ := r.CLI(t, "status"); !strings.Contains(out, "failed after") || !strings.Contains(out, "no such file") {
		t.Errorf("status does not say that an upgrade failed:\n%s", out)
	}
	seams := l.seams.Load()
	upgrade(t, r, 0, "done", first)
	if f, err := r.Fleet(); err != nil || f.Get("decode-0") == nil || f.Get("prefill-1") == nil || !f.Get("decode-0").Serves() {
		t.Errorf("the first names are not used again: %v", err)
	}
	l.end()
	if cached(t, r) == 0 {
		t.Error("nothing of what was on the SSD before is used")
	}
	t.Logf("%d requests, %d seams", l.asked.Load(), l.seams.Load())
	if l.seams.Load() == 0 || seams == l.seams.Load() {
		t.Error("no stream moved")
	}
	cluster.Wait(t, limit, "ledgers empty", r.Idle)
	children, err := r.Children()
	if err != nil {
		t.Fatal(err)
	}
	r.Signal(syscall.SIGHUP) // would end a process that does not expect it
	r.WaitServing(t, limit, 2, 2)
	r.Signal(os.Interrupt)
	if code := r.Exit(t, limit); code != 0 {
		t.Errorf("exit code %d", code)
	}
	for _, c := range children {
		if cluster.Alive(c.PID) {
			t.Errorf("%s lives", c.Name)
		}
	}
	if _, err := os.Stat(r.Data); !os.IsNotExist(err) {
		t.Errorf("the data folder is left: %v", err)
	}
}

// TestUpgradeWaits: a connection of the old router is served to its end, and a stream there moves to
// a new worker. Meanwhile `status` says what is waited for, and no second upgrade begins.
func TestUpgradeWaits(t *testing.T) {
	t.Parallel()
	nats := cluster.StartNATS(t) // an external one does not change hands
	r := cluster.Up(t, "--config", settings(t, limit), "--nats", nats.URL)
	conn, err := net.Dial("tcp", strings.TrimPrefix(r.URL, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	in := bufio.NewReader(conn)
	ask := func() *http.Response {
		t.Helper()
		body := bodies[5]
		if _, err := fmt.Fprintf(conn, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body); err != nil {
			t.Fatal(err)
		}
		resp, err := http.ReadResponse(in, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, resp.Body); err != nil {
			t.Fatal(err)
		}
		return resp
	}
	if resp := ask(); resp.StatusCode != 200 || resp.Close {
		t.Fatalf("before: %+v", resp)
	}
	var wg sync.WaitGroup
	wg.Go(func() { upgrade(t, r, 0, "done", cluster.Other(t)) })
	cluster.Wait(t, limit, "the new process serves", func() error {
		f, err := r.Fleet()
		if err == nil && f.Get("decode-1") == nil {
			err = errors.New("no new worker")
		}
		var doing struct{ Doing string }
		if err == nil {
			err = r.Call("GET", "/admin/v1/instances", nil, &doing)
		}
		if err == nil && !strings.Contains(doing.Doing, "the old one finishes (0 requests, 1 connection)") {
			err = fmt.Errorf("status says %q", doing.Doing)
		}
		return err
	})
	if _, errs, code := r.CLI(t, "up", "--upgrade", cluster.Binary(t)); code != 1 || !strings.Contains(errs, "try again when it is over") {
		t.Errorf("a second upgrade: %d %s", code, errs)
	}
	if _, errs, code := r.CLI(t, "scale", "decode=2"); code != 1 || !strings.Contains(errs, "try again when it is over") {
		t.Errorf("scale meanwhile: %d %s", code, errs)
	}
	if resp := ask(); resp.StatusCode != 200 || !resp.Close || resp.Header.Get("x-xpyd-decode") != "decode-1" {
		t.Errorf("the old connection: %+v", resp)
	}
	wg.Wait()
	if out, errs, code := r.CLI(t, "scale", "decode=2", "--wait"); code != 0 {
		t.Errorf("scale afterwards: %s%s", out, errs)
	}
}

// TestUpgradeHalf: a new process fails when the running one has given it NATS. The running one takes
// that back and goes on, and no request fails.
func TestUpgradeHalf(t *testing.T) {
	t.Parallel()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	r := cluster.Up(t, "--decode", "2", "--config", settings(t, 5*time.Second))
	l := startLoad(t, r, 3)
	for how, want := range map[string]string{"die": "the new process ended: exit status 4", "fail": "take over: of the test"} {
		upgrade(t, r, 1, want, script(t, cluster.Binary(t)+" version", fakeEnv+"="+how+" exec "+self+` "$@"`))
		cluster.Wait(t, limit, "NATS is back", func() error {
			f, err := r.Fleet()
			if err == nil && (!f.Link.Up || time.Since(f.Link.Since) > time.Minute) {
				err = fmt.Errorf("link %+v", f.Link)
			}
			return err
		})
		r.WaitServing(t, limit, 1, 2)
		if out, errs, code := r.CLI(t, "drain", "decode-0", "--wait-only"); code != 0 {
			t.Errorf("an order afterwards: %s%s", out, errs)
		}
		if out, errs, code := r.CLI(t, "undrain", "decode-0"); code != 0 {
			t.Errorf("an order afterwards: %s%s", out, errs)
		}
	}
	l.end()
	upgrade(t, r, 0, "done", cluster.Binary(t))
}

// TestUpgradeEnds: the new process ends with the first one, however that ends; and when the new one
// dies, so does the first.
func TestUpgradeEnds(t *testing.T) {
	t.Parallel()
	for _, of := range []string{"first", "new"} {
		t.Run(of, func(t *testing.T) {
			t.Parallel()
			r := cluster.Up(t, "--config", settings(t, 5*time.Second))
			upgrade(t, r, 0, "done", cluster.Other(t))
			f, err := r.Fleet()
			if err != nil {
				t.Fatal(err)
			}
			var pids []int
			for i := range f.Instances {
				if m := &f.Instances[i]; m.State == fleet.Live {
					pids = append(pids, m.PID)
				}
			}
			if len(pids) != 2 {
				t.Fatalf("workers %v", pids)
			}
			next, err := parent(pids[0])
			if err != nil || next == r.PID() {
				t.Fatalf("the workers' parent is %d: %v", next, err)
			}
			if of == "first" {
				r.Kill()
			} else if err := syscall.Kill(next, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			if code := r.Exit(t, limit); code == 0 {
				t.Error("exit code 0")
			}
			cluster.Wait(t, limit, "no process left", func() error {
				for _, pid := range append(pids, next) {
					if cluster.Alive(pid) {
						return fmt.Errorf("pid %d lives", pid)
					}
				}
				return nil
			})
		})
	}
}

func parent(pid int) (ppid int, err error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(b), "\nPPid:")
	_, err = fmt.Sscan(rest, &ppid)
	return ppid, err
}

// TestUpgradeInterrupted: Ctrl-C while the new process starts ends both, and neither terminal is told that
// something goes on.
func TestUpgradeInterrupted(t *testing.T) {
	t.Parallel()
	r := cluster.Up(t)
	file := filepath.Join(t.TempDir(), "pid")
	binary := script(t, cluster.Binary(t)+" version", "echo $$ > "+file+".new; mv "+file+".new "+file+"; exec sleep 1000")
	var wg sync.WaitGroup
	var said string
	wg.Go(func() {
		out, errs, code := r.CLI(t, "up", "--upgrade", binary)
		if said = out + errs; code != 1 {
			t.Errorf("upgrade: exit code %d", code)
		}
	})
	var pid int
	cluster.Wait(t, limit, "the new process starts", func() error {
		b, err := os.ReadFile(file)
		if err == nil {
			_, err = fmt.Sscan(string(b), &pid)
		}
		return err
	})
	r.Signal(os.Interrupt)
	if code := r.Exit(t, limit); code != 0 {
		t.Errorf("exit code %d", code)
	}
	if cluster.Alive(pid) {
		t.Error("the new process lives")
	}
	wg.Wait()
	if log := r.Stderr.String(); strings.Contains(said+log, "goes on") || !strings.Contains(log, "the running one was stopped") {
		t.Errorf("the upgrade says %q, the first process %q", said, log)
	}
}

// TestUpgradeRefused: what is refused beforehand changes nothing.
func TestUpgradeRefused(t *testing.T) {
	t.Parallel()
	r := cluster.Up(t)
	refused := func(code int, want, binary string, args ...string) {
		t.Helper()
		upgrade(t, r, code, want, binary, args...)
	}
	refused(1, "v9, KV protocol 7-8, and this is xpyd ", script(t, "echo 'xpyd v9, KV protocol 7-8'", ""))
	refused(1, "for its version", script(t, "exit 1", ""))
	refused(1, "it says", script(t, "echo hello", ""))
	refused(2, "--upgrade", filepath.Join(t.TempDir(), "none"))
	refused(2, "--prefill", cluster.Binary(t), "--prefill", "2")
	refused(2, "--upgrade-timeout 2h0m0s", cluster.Binary(t), "--upgrade-timeout", "2h")
	if err := r.Call("POST", "/admin/v1/upgrade", nil, nil); err == nil || !strings.Contains(err.Error(), "which binary?") {
		t.Errorf("an order without a binary: %v", err)
	}
	var left []string
	for _, name := range []string{"upgrade-binary", ".upgrade-binary"} {
		if _, err := os.Stat(filepath.Join(r.Data, name)); err == nil {
			left = append(left, name)
		}
	}
	if len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	if got := cluster.Post(ctx, cluster.NewClient(t), r.URL+"/v1/completions", bodies[5]); !got.Good() {
		t.Errorf("afterwards: %v", got)
	}
}
