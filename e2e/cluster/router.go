package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/supervise"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/worker"
)

// Router is a running `xpyd up` or `xpyd router`.
type Router struct {
	*Process
	URL   string // public
	Admin string
	Token string
	Join  string // file that workers join with
	NATS  string // URL, of the join file
	Data  string // its --data folder

	client *http.Client
}

// Up starts `xpyd up` on free ports and returns when it is ready.
func Up(t testing.TB, args ...string) *Router {
	t.Helper()
	return Launch(t, "up", args...).serves(t, "ready ")
}

// Alone starts `xpyd router` with an embedded NATS on free ports and returns when it listens. Workers
// are to be started with Worker.
func Alone(t testing.TB, args ...string) *Router {
	t.Helper()
	if !slices.Contains(args, "--config") {
		config := filepath.Join(t.TempDir(), "nats.yaml")
		if err := os.WriteFile(config, []byte("fleet: {listen: \"127.0.0.1:0\"}\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		args = append([]string{"--config", config}, args...)
	}
	return Launch(t, "router", args...).serves(t, "listening ")
}

// UpWithFiles is Up where each process may have files open files.
func UpWithFiles(t testing.TB, files int, args ...string) *Router {
	t.Helper()
	limited := exec.Command("sh", "-c", `ulimit -n "$0" && exec "$@"`, strconv.Itoa(files), Binary(t))
	return launch(t, limited, filepath.Join(t.TempDir(), "data"), "up", args...).serves(t, "ready ")
}

// At is a router that something else has started.
func At(url, admin, token string, client *http.Client) *Router {
	return &Router{URL: url, Admin: admin, Token: token, client: client}
}

// Again starts `xpyd router` in the data folder of one that has ended.
func (r *Router) Again(t testing.TB, args ...string) *Router {
	t.Helper()
	return launch(t, exec.Command(Binary(t)), r.Data, "router", args...).serves(t, "listening ")
}

// Launch starts `xpyd up` or `xpyd router` on free ports and does not wait.
func Launch(t testing.TB, command string, args ...string) *Router {
	t.Helper()
	return launch(t, exec.Command(Binary(t)), filepath.Join(t.TempDir(), "data"), command, args...)
}

func launch(t testing.TB, xpyd *exec.Cmd, data, command string, args ...string) *Router {
	t.Helper()
	xpyd.Args = append(append(xpyd.Args, command, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--data", data), args...)
	return &Router{Process: StartCommand(t, xpyd, nil), Data: data, client: NewClient(t)}
}

// serves waits for the line with the URL, and reads the files of the data folder.
func (r *Router) serves(t testing.TB, line string) *Router {
	t.Helper()
	r.URL = r.Line(t, time.Minute, line)
	r.Join = filepath.Join(r.Data, "join-url")
	for name, to := range map[string]*string{"admin-url": &r.Admin, "admin-token": &r.Token} {
		b, err := os.ReadFile(filepath.Join(r.Data, name))
		if err != nil {
			t.Fatal(err)
		}
		*to = strings.TrimSpace(string(b))
	}
	r.NATS = r.JoinLine(t).URL
	return r
}

// Worker starts one worker that joins r with one flag.
func (r *Router) Worker(t testing.TB, role fleet.Role, args ...string) *Process {
	t.Helper()
	return Start(t, nil, append([]string{string(role), "--join-file", r.Join, "--threads", "1"}, args...)...)
}

// JoinLine reads the join file.
func (r *Router) JoinLine(t testing.TB) trust.Join {
	t.Helper()
	b, err := os.ReadFile(r.Join)
	if err != nil {
		t.Fatal(err)
	}
	j, err := trust.ParseJoin(string(b))
	if err != nil {
		t.Fatal(err)
	}
	return j
}

// Ring is the fleet's secrets, read from the join file.
func (r *Router) Ring(t testing.TB) *trust.Ring {
	t.Helper()
	ring, err := trust.NewRing(r.JoinLine(t).Secrets...)
	if err != nil {
		t.Fatal(err)
	}
	return ring
}

// AsMember returns a client that sends the fleet's token to its member m, as routers do.
func (r *Router) AsMember(t testing.TB, m *Instance) *http.Client {
	t.Helper()
	name, token := r.MemberToken(t, m)
	return &http.Client{Transport: authorized{r.client.Transport, name, token}}
}

type authorized struct {
	http.RoundTripper
	name, token string
}

func (a authorized) RoundTrip(q *http.Request) (*http.Response, error) {
	q = q.Clone(q.Context())
	q.Header.Set(a.name, a.token)
	return a.RoundTripper.RoundTrip(q)
}

// CLI runs an xpyd command such as "status" or "drain" against r.
func (r *Router) CLI(t testing.TB, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	return Run(t, append(args, "--data", r.Data)...)
}

// Call does one request at the admin listener; in and out are JSON, or nil.
func (r *Router) Call(method, path string, in, out any) error {
	var body []byte
	if in != nil {
		var err error
		if body, err = json.Marshal(in); err != nil {
			return err
		}
	}
	return fetch(r.client, method, r.Admin+path, r.Token, body, out)
}

// fetch decodes a JSON answer; out may be nil, or a *string for any answer.
func fetch(client *http.Client, method, url, token string, body []byte, out any) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(body))
	if err != nil {
		return err
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode >= 300 {
		return fmt.Errorf("%s %s: %s: %s", method, req.URL.Path, resp.Status, b)
	}
	switch to := out.(type) {
	case nil:
		return nil
	case *string:
		*to = string(b)
		return nil
	}
	return json.Unmarshal(b, out)
}

func get(client *http.Client, url string, out any) error {
	return fetch(client, http.MethodGet, url, "", nil, out)
}

// Ready is nil when GET /ready says 200.
func (r *Router) Ready() error { return get(r.client, r.URL+"/ready", nil) }

// Fleet is the answer of GET /admin/v1/instances.
type Fleet struct {
	Ready     bool
	Link      fleet.Link
	Refusals  []fleet.Refusal
	Instances []Instance
}

// Instance is one member as the router sees it.
type Instance struct {
	fleet.Member
	Probed   bool   `json:"probed"`
	Problem  string `json:"probe_error"`
	Draining bool   `json:"draining"`
}

// Get returns a member by id, or nil.
func (f *Fleet) Get(id string) *Instance {
	for i := range f.Instances {
		if f.Instances[i].ID == id {
			return &f.Instances[i]
		}
	}
	return nil
}

// Serving counts the members of a role that may get users' requests.
func (f *Fleet) Serving(role fleet.Role) (n int) {
	for i := range f.Instances {
		if m := &f.Instances[i]; m.Role == role && m.Serves() && m.Probed && !m.Draining {
			n++
		}
	}
	return n
}

// Fleet asks the router for the fleet.
func (r *Router) Fleet() (*Fleet, error) {
	var f Fleet
	return &f, r.Call(http.MethodGet, "/admin/v1/instances", nil, &f)
}

// WaitServing waits until ServingIs.
func (r *Router) WaitServing(t testing.TB, limit time.Duration, prefill, decode int) {
	t.Helper()
	Wait(t, limit, "workers serving", func() error { return r.ServingIs(prefill, decode) })
}

// ServingIs is nil when that many workers of each role serve.
func (r *Router) ServingIs(prefill, decode int) error {
	f, err := r.Fleet()
	if err != nil {
		return err
	}
	if p, d := f.Serving(fleet.Prefill), f.Serving(fleet.Decode); p != prefill || d != decode {
		return fmt.Errorf("%d prefill and %d decode serve, want %d and %d", p, d, prefill, decode)
	}
	return nil
}

// Children are the worker processes of an `up`, by name.
func (r *Router) Children() (map[string]supervise.Status, error) {
	var list []supervise.Status
	if err := r.Call(http.MethodGet, "/admin/v1/workers", nil, &list); err != nil {
		return nil, err
	}
	out := map[string]supervise.Status{}
	for _, s := range list {
		out[s.Name] = s
	}
	return out, nil
}

// Ledger is what the router and all its workers hold.
type Ledger struct {
	Requests  []json.RawMessage
	Legs      int
	Running   int
	Waiting   int
	ConnsBusy int `json:"upstream_conns_busy"`
	ConnsIdle int `json:"upstream_conns_idle"`
	Fleet     map[string]struct {
		worker.Ledger
		Error json.RawMessage `json:"error"` // why the worker could not be asked
	}
}

// Ledger asks all processes.
func (r *Router) Ledger() (*Ledger, error) {
	var l Ledger
	return &l, r.Call(http.MethodGet, "/debug/ledger?fleet=1", nil, &l)
}

// Idle is nil when no process holds anything, quarantined blocks aside.
func (r *Router) Idle() error {
	l, err := r.Ledger()
	if err != nil {
		return err
	}
	// The ledger is made before it asks the workers.
	if len(l.Requests)+l.Legs+l.Running+l.Waiting+l.ConnsBusy > 0 {
		return fmt.Errorf("the router holds %d requests, %d legs, %d running, %d waiting, %d connections: %s",
			len(l.Requests), l.Legs, l.Running, l.Waiting, l.ConnsBusy, l.Requests)
	}
	for id, w := range l.Fleet {
		if w.Error != nil {
			return fmt.Errorf("%s: %s", id, w.Error)
		}
		if !w.Empty() {
			b, err := json.Marshal(w.Ledger)
			return fmt.Errorf("%s holds %s %w", id, b, err)
		}
	}
	return nil
}

// Quarantined counts the blocks of all workers that are in quarantine.
func (l *Ledger) Quarantined() (n int) {
	for _, w := range l.Fleet {
		for _, h := range w.Blocks {
			if h.State == kvcache.StateQuarantined {
				n += len(h.Blocks)
			}
		}
	}
	return n
}
