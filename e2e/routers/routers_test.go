// Package routers tests several routers in front of one fleet, as real
// processes.
package routers

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/internal/fleet"
)

func TestMain(m *testing.M) { os.Exit(cluster.Main(m)) }

// limit is for what a starved machine still does.
const limit = time.Minute

const long = `{"model":"stories260k","prompt":"Once upon a time","max_tokens":400,"temperature":0,"ignore_eos":true,"stream":true}`

// peers waits until a router hears so many others.
func peers(t *testing.T, r *cluster.Router, want float64) {
	t.Helper()
	cluster.Wait(t, limit, fmt.Sprintf("%g peers", want), func() error {
		got, err := r.Metric("xpyd_router_peers")
		if err == nil && got != want {
			err = fmt.Errorf("%g peers", got)
		}
		return err
	})
}

// TestOneDies: of two routers on one NATS one is killed. It takes its own open
// streams with it and nothing else: the other's go on to their end, what the
// dead one had at the workers is freed, its share is forgotten, and a router
// that takes its place is heard.
func TestOneDies(t *testing.T) {
	t.Parallel()
	nats := cluster.StartNATS(t)
	a := cluster.Alone(t, "--nats", nats.URL)
	b := cluster.Alone(t, "--join-file", a.Join)
	for i := range 2 {
		a.Worker(t, fleet.Prefill, "--id", fmt.Sprintf("p%d", i))
		a.Worker(t, fleet.Decode, "--id", fmt.Sprintf("d%d", i))
	}
	for _, r := range []*cluster.Router{a, b} {
		r.WaitServing(t, limit, 2, 2)
		peers(t, r, 1)
		if out, stderr, code := r.CLI(t, "status"); code != 0 || strings.Count(out, "\nrouter ") != 1 {
			t.Errorf("status: %d %s\n%s", code, stderr, out)
		}
	}
	client := cluster.NewClient(t)
	want := cluster.Post(t.Context(), client, b.URL+"/v1/completions", long)
	if !want.Good() {
		t.Fatal(want)
	}
	const each = 6
	var mu sync.Mutex
	var wg sync.WaitGroup
	began := 0
	results := map[*cluster.Router][]*cluster.Reply{}
	for _, r := range []*cluster.Router{a, b} {
		for range each {
			wg.Go(func() {
				reply := stream(t.Context(), client, r.URL, func() {
					mu.Lock()
					defer mu.Unlock()
					began++
				})
				mu.Lock()
				defer mu.Unlock()
				results[r] = append(results[r], reply)
			})
		}
	}
	cluster.Wait(t, limit, "streams open", func() error {
		mu.Lock()
		defer mu.Unlock()
		if began < 2*each {
			return fmt.Errorf("%d of %d", began, 2*each)
		}
		return nil
	})
	a.Kill()
	wg.Wait()
	for _, r := range results[b] {
		if !r.Good() || r.Text != want.Text {
			t.Errorf("the other router's stream: %v", r)
		}
	}
	t.Logf("%d of %d streams of the dead router were cut", count(results[a]), each)
	cluster.Wait(t, limit, "ledgers empty", b.Idle)
	peers(t, b, 0)
	if n, err := b.Metric("xpyd_router_peers_expired_total"); err != nil || n < 1 {
		t.Errorf("%g routers expired, %v", n, err)
	}
	if r := cluster.Post(t.Context(), client, b.URL+"/v1/completions", long); !r.Good() || r.Text != want.Text {
		t.Errorf("afterwards: %v", r)
	}
	if r := cluster.Post(t.Context(), client, b.URL+"/v1/completions", strings.Replace(long, "Once upon a time", strings.Repeat("Once upon a time ", 16), 1)); !r.Good() {
		t.Errorf("a long prompt: %v", r)
	}
	again := cluster.Alone(t, "--join-file", b.Join)
	again.WaitServing(t, limit, 2, 2)
	peers(t, again, 1)
	peers(t, b, 1)
	cluster.Wait(t, limit, "prefixes known before there was a request", func() error {
		n, err := again.Metric("xpyd_router_prefix_bytes")
		if err == nil && n == 0 {
			err = errors.New("none")
		}
		return err
	})
}

// stream is cluster.Post that says when the first byte is there.
func stream(ctx context.Context, client *http.Client, url string, begun func()) *cluster.Reply {
	done := sync.OnceFunc(begun)
	defer done() // also for one that failed
	return cluster.Post(ctx, &http.Client{Transport: firstByte{client.Transport, done}}, url+"/v1/completions", long)
}

// firstByte calls f when an answer's header is there; a router sends it with
// the first token.
type firstByte struct {
	http.RoundTripper
	f func()
}

func (b firstByte) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := b.RoundTripper.RoundTrip(r)
	b.f()
	return resp, err
}

func count(list []*cluster.Reply) (bad int) {
	for _, r := range list {
		if !r.Good() {
			bad++
		}
	}
	return bad
}

// TestSharedLoad: a router that has nothing in flight itself avoids the engine
// that another router keeps busy. The engines are of the configuration, whose
// epochs differ from router to router.
func TestSharedLoad(t *testing.T) {
	t.Parallel()
	nats := cluster.StartNATS(t)
	config := "pick: {policy: least_loaded}\nstatic:\n"
	for _, id := range []string{"e0", "e1"} {
		p := cluster.Start(t, nil, "mock", "--dialect", "openai", "--role", "decode", "--itl", "100ms", "--model", "m")
		url, _, _ := strings.Cut(p.Line(t, limit, "listening "), " ")
		config += fmt.Sprintf("  - {id: %s, role: decode, dialect: openai, model: m, url: %q}\n", id, url)
	}
	file := filepath.Join(t.TempDir(), "router.yaml")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	a, b := cluster.Alone(t, "--config", file, "--nats", nats.URL), cluster.Alone(t, "--config", file, "--nats", nats.URL)
	for _, r := range []*cluster.Router{a, b} {
		r.WaitServing(t, limit, 0, 2)
		peers(t, r, 1)
	}
	client := cluster.NewClient(t)
	for range 4 { // whom an idle router would choose changes with each request
		ctx, leave := context.WithCancel(t.Context())
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, a.URL+"/v1/completions",
			strings.NewReader(`{"model":"m","prompt":"x","max_tokens":100000,"stream":true}`))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		busy := resp.Header.Get("x-xpyd-decode")
		// Once b knows, it says so in its explanation, and never goes there.
		cluster.Wait(t, limit, "the other router knows", func() error {
			r := explain(t, client, b.URL)
			if !strings.Contains(r.explain, fmt.Sprintf(`"id":%q,"cost":1,"load":1`, busy)) {
				return fmt.Errorf("%s is busy; %s", busy, r.explain)
			}
			if r.decode == busy {
				t.Errorf("went to the busy %s: %s", busy, r.explain)
			}
			return nil
		})
		leave()
		resp.Body.Close()
		cluster.Wait(t, limit, "the other router knows of the end", func() error {
			if r := explain(t, client, b.URL); strings.Contains(r.explain, `"load":1`) {
				return fmt.Errorf("%s", r.explain)
			}
			return nil
		})
	}
}

type explained struct{ decode, explain string }

func explain(t *testing.T, client *http.Client, url string) explained {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/v1/completions", strings.NewReader(`{"model":"m","prompt":"x","max_tokens":1}`))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("x-xpyd-explain", "1")
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	return explained{resp.Header.Get("x-xpyd-decode"), resp.Header.Get("x-xpyd-explain")}
}

// TestCluster: two routers' embedded NATS servers form a cluster, and a worker
// that knows both outlives either.
func TestCluster(t *testing.T) {
	t.Parallel()
	var ports []string
	for range 4 { // NATS of each, and the cluster's of each
		ports = append(ports, cluster.Port(t))
	}
	var routers []*cluster.Router
	var urls []string
	for i := range 2 {
		file := filepath.Join(t.TempDir(), "router.yaml")
		text := fmt.Sprintf("fleet: {listen: %q, cluster_listen: %q, cluster_routes: [\"nats-route://%s\"]}\n", ports[i], ports[2+i], ports[3-i])
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		args := []string{"--config", file}
		if i > 0 {
			args = append(args, "--join-file", routers[0].Join)
		}
		routers = append(routers, cluster.Alone(t, args...))
		urls = append(urls, routers[i].NATS)
	}
	both := filepath.Join(t.TempDir(), "join")
	line := routers[0].JoinLine(t)
	line.URL = strings.Join(urls, ",")
	if err := os.WriteFile(both, []byte(line.Reveal()), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, role := range []fleet.Role{fleet.Prefill, fleet.Decode} {
		cluster.Start(t, nil, string(role), "--join-file", both, "--threads", "1")
	}
	for _, r := range routers {
		r.WaitServing(t, limit, 1, 1)
		peers(t, r, 1)
	}
	client := cluster.NewClient(t)
	routers[0].Kill()
	peers(t, routers[1], 0)
	routers[1].WaitServing(t, limit, 1, 1)
	if r := cluster.Post(t.Context(), client, routers[1].URL+"/v1/completions", long); !r.Good() {
		t.Errorf("after the other's death: %v", r)
	}
}

// TestDataFolder: two routers cannot have one folder; the second says so, and
// how to help it.
func TestDataFolder(t *testing.T) {
	t.Parallel()
	a := cluster.Alone(t)
	_, stderr, code := cluster.Run(t, "router", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--data", a.Data)
	if code != 1 || !strings.Contains(stderr, a.Data) || !strings.Contains(stderr, "--data") || strings.Count(strings.TrimSpace(stderr), "\n") > 0 {
		t.Errorf("%d %s", code, stderr)
	}
}
