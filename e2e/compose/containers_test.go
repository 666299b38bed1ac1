//go:build containers

package compose

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/e2e/unbroken"
	"github.com/xpyd/xpyd/router/pick"
)

// containers is docker-compose.yml as a project of its own, with images that scripts/compose-test
// has built.
type containers struct {
	docker, project, override, base string
	client                          *http.Client
	scale                           map[string]int
}

const image = "xpyd-compose-test/xpyd"

// override replaces what would be pulled or built.
const override = `
x-image: &image { image: ` + image + `, pull_policy: never }
services:
  nats:
    image: xpyd-compose-test/nats
    pull_policy: never
    healthcheck: { test: ["CMD", "/xpyd", "health", "http://127.0.0.1:8222/healthz"] }
  router: *image
  prefill: *image
  decode: { <<: *image, cpus: 0.15 } # slow, so that streams are under way when it is struck
`

func newContainers(t *testing.T) *containers {
	t.Helper()
	_, port, _ := strings.Cut(cluster.Port(t), ":")
	c := &containers{docker: "docker", project: fmt.Sprintf("xpyd-compose-test-%d", os.Getpid()), override: filepath.Join(t.TempDir(), "override.yml"),
		base: "http://127.0.0.1:" + port, client: cluster.NewClient(t), scale: map[string]int{"prefill": 1, "decode": 1}}
	if d := os.Getenv("DOCKER"); d != "" {
		c.docker = d
	}
	t.Setenv("XPYD_PORT", port)
	t.Setenv("COMPOSE_PROFILES", "")
	if err := os.WriteFile(c.override, []byte(override), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(c.must(t, c.compose("logs", "--tail", "20")...))
		}
		c.must(t, c.compose("down", "--volumes", "--timeout", "5")...)
	})
	return c
}

func (c *containers) compose(args ...string) []string {
	return append([]string{"compose", "-p", c.project, "-f", filepath.Join(root, "docker-compose.yml"), "-f", c.override}, args...)
}

// must runs docker, and returns what it prints on standard output.
func (c *containers) must(t *testing.T, args ...string) string {
	t.Helper()
	cmd := exec.Command(c.docker, args...)
	var errs strings.Builder
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		t.Errorf("%s %s: %v\n%s", c.docker, strings.Join(args, " "), err, errs.String())
	}
	return strings.TrimSpace(string(out))
}

// up makes what is wanted run, and leaves what runs alone.
func (c *containers) up(t *testing.T) {
	t.Helper()
	args := []string{"up", "--detach", "--no-build", "--no-recreate", "--wait", "--wait-timeout", "120"}
	for role, n := range c.scale {
		args = append(args, "--scale", fmt.Sprintf("%s=%d", role, n))
	}
	c.must(t, c.compose(args...)...)
	c.settled(t)
}

// of lists the containers of a service that run.
func (c *containers) of(t *testing.T, service string) []string {
	t.Helper()
	ids := strings.Fields(c.must(t, c.compose("ps", "--quiet", service)...))
	slices.Sort(ids)
	if len(ids) == 0 {
		t.Fatalf("no container of %s", service)
	}
	return ids
}

// status is what `xpyd status --json` in the router's container says.
type status struct {
	Ready     bool
	Instances []struct {
		ID, Role, State, URL string
		Probed               bool
		KVPaths              string     `json:"kv_paths"`
		InFlight             pick.Loads `json:"in_flight"`
	}
}

// settled waits until the router has as many good workers as there are to be.
func (c *containers) settled(t *testing.T) (s status) {
	t.Helper()
	cluster.Wait(t, time.Minute, "the fleet to be as wanted", func() error {
		out, err := exec.Command(c.docker, c.compose("exec", "-T", "router", "xpyd", "status", "--json")...).Output()
		if err != nil {
			return err
		}
		s = status{}
		if err := json.Unmarshal(out, &s); err != nil {
			return err
		}
		good := map[string]int{}
		for _, i := range s.Instances {
			if i.State == "live" && i.Probed {
				good[i.Role]++
			}
		}
		if !s.Ready || good["prefill"] != c.scale["prefill"] || good["decode"] != c.scale["decode"] {
			return fmt.Errorf("wanted %v: %s", c.scale, out)
		}
		return nil
	})
	return s
}

// busiest is the container of the worker of that role that has most to do.
func (c *containers) busiest(t *testing.T, role string) (container string) {
	t.Helper()
	most, host := 0, ""
	for _, i := range c.settled(t).Instances {
		if u, err := url.Parse(i.URL); err == nil && i.Role == role && i.State == "live" && i.InFlight.Legs >= most {
			most, host = i.InFlight.Legs, u.Hostname()
		}
	}
	for _, id := range c.of(t, role) {
		if c.must(t, "inspect", "--format", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", id) == host {
			return id
		}
	}
	t.Fatalf("no container of %s has the address %q", role, host)
	return ""
}

// asks are what clients ask again and again.
var asks = func() (list []string) {
	for i, prompt := range []string{"Once upon a time", "The little dog", "One day, a girl named Lily", "Tom and his mother went to"} {
		for seed := range 2 {
			list = append(list, fmt.Sprintf(`{"model":"stories260k","prompt":%q,"max_tokens":400,"ignore_eos":true,"n":2,"seed":%d,"stream":%t}`, prompt, seed, i < 3))
		}
	}
	return list
}()

// load is clients that ask one after the other until they are told to stop.
type load struct {
	mu      sync.Mutex
	step    string
	counts  map[string]*tally // by step in which a request began
	stop    chan struct{}
	clients sync.WaitGroup
}

type tally struct {
	requests, seams int
	pause           time.Duration
	bad             []string
}

// begin starts one client for each of asks; wanted are their answers.
func (c *containers) begin(t *testing.T, wanted []*unbroken.Answer) *load {
	l := &load{counts: map[string]*tally{}, stop: make(chan struct{})}
	for i, body := range asks {
		l.clients.Go(func() {
			for {
				select {
				case <-l.stop:
					return
				default:
				}
				l.mu.Lock()
				step := l.step
				l.mu.Unlock()
				a := unbroken.Tell(t.Context(), c.client, c.base+"/v1/completions", fmt.Sprintf("compose-%d", i), body, func(string, int) {})
				l.add(step, a, wanted[i])
				if a.Err != nil { // a client that is refused comes back in a moment
					select {
					case <-l.stop:
					case <-time.After(100 * time.Millisecond):
					}
				}
			}
		})
	}
	t.Cleanup(l.end)
	return l
}

func (l *load) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case <-l.stop:
	default:
		close(l.stop)
	}
}

func (l *load) add(step string, a, want *unbroken.Answer) {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.counts[step]
	if c == nil {
		c = &tally{}
		l.counts[step] = c
	}
	c.requests++
	c.seams += a.Seams
	c.pause = max(c.pause, a.Pause)
	if d := a.Differs(want); d != "" {
		c.bad = append(c.bad, d)
	}
}

// TestContainers: containers come and go, die, are cut off and restarted, and no request of those that
// the router has accepted fails, nor has a token too few, too many or another. Only while the one router
// itself restarts, new ones are refused.
func TestContainers(t *testing.T) {
	c := newContainers(t)
	began := time.Now()
	c.up(t)
	t.Logf("up after %v", time.Since(began).Round(100*time.Millisecond))
	var wanted []*unbroken.Answer
	for i, body := range asks {
		a := unbroken.Tell(t.Context(), c.client, c.base+"/v1/completions", fmt.Sprintf("compose-%d", i), body, func(string, int) {})
		if a.Err != nil {
			t.Fatal(a.Err)
		}
		wanted = append(wanted, a)
	}
	l := c.begin(t, wanted)
	run := func(step string, do func()) {
		t.Helper()
		l.mu.Lock()
		l.step = step
		l.mu.Unlock()
		began := time.Now()
		do()
		l.enough(t, step)
		l.mu.Lock()
		defer l.mu.Unlock()
		n := l.counts[step]
		t.Logf("%-36s %5.1f s %5d requests, %d failed, %3d seams, longest pause %v", step, time.Since(began).Seconds(), n.requests, len(n.bad), n.seams, n.pause.Round(time.Millisecond))
	}
	scale := func(role string, n int) func() {
		return func() {
			c.scale[role] = n
			c.up(t)
		}
	}
	restart := func(service string) func() {
		return func() {
			for _, id := range c.of(t, service) {
				c.must(t, "restart", "--time", "45", id)
				c.settled(t)
			}
		}
	}
	run("nothing happens", func() {})
	run("prefill 1 to 3", scale("prefill", 3))
	run("decode 1 to 3", scale("decode", 3))
	for _, role := range []string{"decode", "prefill"} {
		run("a "+role+" worker is killed", func() {
			c.must(t, "kill", "--signal", "KILL", c.busiest(t, role))
			c.up(t)
		})
	}
	run("a decode worker is cut off, for 8 s", func() {
		id, network := c.busiest(t, "decode"), c.project+"_default"
		c.must(t, "network", "disconnect", network, id)
		time.Sleep(8 * time.Second) // how long it is away is what is tried
		c.must(t, "network", "connect", "--alias", "decode", network, id)
		c.settled(t)
	})
	for _, i := range c.settled(t).Instances {
		if i.Role == "decode" && i.State == "live" && !strings.Contains(i.KVPaths, " shm") {
			t.Errorf("%s collects KV by %q, not through shared memory", i.ID, i.KVPaths)
		}
	}
	run("each decode container restarts", restart("decode"))
	run("each prefill container restarts", restart("prefill"))
	run("NATS restarts", restart("nats"))
	run("decode 3 to 1", scale("decode", 1))
	run("prefill 3 to 1", scale("prefill", 1))
	run("a new image, beside the old one", func() { c.upgrade(t) })
	seams := 0
	for step, n := range l.counted() {
		seams += n.seams
		if len(n.bad) > 0 {
			t.Errorf("%s: %d of %d requests failed, as\n%s", step, len(n.bad), n.requests, n.bad[0])
		}
	}
	if seams == 0 {
		t.Error("no stream went on at another pair, so nothing was shown")
	}
	const last = "the router restarts"
	run(last, restart("router"))
	l.end()
	l.clients.Wait()
	for _, bad := range l.counted()[last].bad {
		if !strings.HasPrefix(bad, "Post ") && !strings.HasPrefix(bad, "status 503") { // no answer that had begun
			t.Errorf("%s: %s", last, bad)
		}
	}
}

// upgrade puts workers of a new image beside those of the old one, which then go.
func (c *containers) upgrade(t *testing.T) {
	t.Helper()
	build := exec.Command(c.docker, "build", "--quiet", "--tag", image, "-")
	build.Stdin = strings.NewReader("FROM " + image + "\nLABEL is=new\n")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	c.scale = map[string]int{"prefill": 2, "decode": 2}
	c.up(t)
	c.scale = map[string]int{"prefill": 1, "decode": 1}
	c.must(t, c.compose("up", "--detach", "--no-build", "--wait", "--no-deps", "--scale", "prefill=1", "--scale", "decode=1", "prefill", "decode")...)
	c.settled(t)
	for _, role := range []string{"prefill", "decode"} {
		for _, id := range c.of(t, role) {
			if is := c.must(t, "inspect", "--format", `{{index .Config.Labels "is"}}`, id); is != "new" {
				t.Errorf("a %s worker of the old image is left", role)
			}
		}
	}
}

// enough waits until each client has been answered in this step.
func (l *load) enough(t *testing.T, step string) {
	t.Helper()
	cluster.Wait(t, time.Minute, "requests of this step", func() error {
		l.mu.Lock()
		defer l.mu.Unlock()
		if n := l.counts[step]; n == nil || n.requests < len(asks) {
			return fmt.Errorf("%+v", n)
		}
		return nil
	})
}

// counted is a copy of what was counted by now.
func (l *load) counted() map[string]tally {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := map[string]tally{}
	for step, n := range l.counts {
		all[step] = *n
	}
	return all
}
