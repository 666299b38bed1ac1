package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router"
	"github.com/xpyd/xpyd/worker"
)

// startCluster runs NATS, x prefill and y decode workers and a router in this
// process, and returns the router's URL once it is ready.
func startCluster(t testing.TB, x, y int, change func(*worker.Config)) string {
	t.Helper()
	watcher, nats := startFleet(t)
	for role, n := range map[fleet.Role]int{fleet.Prefill: x, fleet.Decode: y} {
		for range n {
			startWorker(t, role, func(c *worker.Config) {
				c.Fleet.URL = nats
				if change != nil {
					change(c)
				}
			})
		}
	}
	return startRouter(t, router.Deps{Fleet: watcher})
}

// testLog discards the log, unless XPYD_E2E_LOG asks for it.
func testLog() *slog.Logger {
	if os.Getenv("XPYD_E2E_LOG") != "" {
		return slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	return slog.New(slog.DiscardHandler)
}

// startFleet runs NATS in this process, and watches who is there.
func startFleet(t testing.TB) (watcher *fleet.Watcher, natsURL string) {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	nats, err := fleet.StartServer(fleet.ServerConfig{Log: testLog()})
	must(err)
	t.Cleanup(nats.Close)
	conn, err := fleet.Connect(fleet.ConnConfig{URL: nats.ClientURL(), Name: "router", Log: testLog()})
	must(err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_ = conn.Close(ctx) // the server may be gone already
	})
	watcher, err = fleet.Watch(fleet.WatcherConfig{Conn: conn, Log: testLog()})
	must(err)
	t.Cleanup(watcher.Close)
	return watcher, nats.ClientURL()
}

// startRouter runs a router that is given a fleet, and returns its URL once it is
// ready.
func startRouter(t testing.TB, d router.Deps) string {
	t.Helper()
	d.Log, d.Registerer, d.Version = testLog(), prometheus.NewRegistry(), "test"
	cfg := router.DefaultConfig()
	cfg.Listen, cfg.AdminListen = "127.0.0.1:0", ""
	r, err := router.New(cfg, d)
	if err == nil {
		err = r.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if err := r.Shutdown(ctx); err != nil {
			t.Errorf("shut the router down: %v", err)
		}
	})
	waitFor(t, time.Minute, func() error {
		if !r.Ready() {
			return fmt.Errorf("not ready: %+v", d.Fleet.Snapshot().Members)
		}
		return nil
	})
	return "http://" + r.Addr().String()
}

// streamed reads a whole event stream: token ids, text and finish reason of
// choice 0.
func streamed(t testing.TB, url, body string, header map[string]string) (ids []int32, text, finish string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/v1/completions", strings.NewReader(strings.TrimSuffix(body, "}")+`,"stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	for k, v := range header {
		req.Header.Set(k, v)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Error(err)
		return
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok || data == "[DONE]" {
			continue
		}
		var a answer
		if err := json.Unmarshal([]byte(data), &a); err != nil || len(a.Choices) != 1 {
			t.Errorf("event %s: %v", data, err)
			return
		}
		ids = append(ids, a.Choices[0].TokenIDs...)
		text += a.Choices[0].Text
		if a.Choices[0].Finish != nil {
			finish = *a.Choices[0].Finish
		}
	}
	return ids, text, finish
}

// TestOracleRouter: every recorded case through a router over 1P1D and 2P2D,
// streaming and not, at block sizes 1, 4, 16 and 256; log probabilities agree
// with the recorded logits.
func TestOracleRouter(t *testing.T) {
	o := readOracle(t)
	for _, pools := range []int{1, 2} {
		for _, tokens := range []int{1, 4, 16, 256} {
			t.Run(fmt.Sprintf("%dP%dD blocks of %d", pools, pools, tokens), func(t *testing.T) {
				url := startCluster(t, pools, pools, func(c *worker.Config) { c.BlockTokens = tokens })
				for _, c := range o.Cases {
					body := fmt.Sprintf(`{"model":"stories260k","prompt":%q,"max_tokens":64,"temperature":0,"return_token_ids":true}`, c.Prompt)
					for range pools { // both pairs get their turn
						status, out := post(t, url+"/v1/completions", nil, body)
						var a answer
						if err := json.Unmarshal(out, &a); err != nil || status != 200 || !equal(a.Choices[0].TokenIDs, c.Greedy) {
							t.Errorf("%q: %d %s\nwant %v", c.Prompt, status, out, c.Greedy)
							continue
						}
						ids, text, finish := streamed(t, url, body, nil)
						if !equal(ids, c.Greedy) || text != a.Choices[0].Text || finish != "length" {
							t.Errorf("%q streamed: %v %q %s\nwant %v", c.Prompt, ids, text, finish, c.Greedy)
						}
					}
					checkLogits(t, url, c.Prompt, c.Top)
				}
			})
		}
	}
}

// checkLogits compares the first token's alternatives with recorded logits:
// log probabilities are logits less a constant, so differences must agree.
func checkLogits(t *testing.T, url, prompt string, top [][2]float64) {
	t.Helper()
	status, out := post(t, url+"/v1/completions", nil, fmt.Sprintf(`{"model":"stories260k","prompt":%q,"max_tokens":1,"temperature":0,"logprobs":10}`, prompt))
	var a struct {
		Choices []struct {
			Logprobs struct {
				TopLogprobs []map[string]float64 `json:"top_logprobs"`
			}
		}
	}
	if err := json.Unmarshal(out, &a); err != nil || status != 200 || len(a.Choices[0].Logprobs.TopLogprobs) != 1 {
		t.Errorf("%q: %d %s", prompt, status, out)
		return
	}
	got := []float64{}
	for _, lp := range a.Choices[0].Logprobs.TopLogprobs[0] {
		got = append(got, lp)
	}
	slices.Sort(got)
	slices.Reverse(got)
	for i := range min(len(got), len(top)) {
		if diff := (got[i] - got[0]) - (top[i][1] - top[0][1]); math.Abs(diff) > 1e-4 {
			t.Errorf("%q alternative %d: logit is off by %g", prompt, i, diff)
		}
	}
}

// TestSameRequestID: one prompt with one client's x-request-id 50 times at
// once, and again when other prompts have evicted it, gives the same tokens.
func TestSameRequestID(t *testing.T) {
	o := readOracle(t)
	url := startCluster(t, 2, 2, func(c *worker.Config) { c.Blocks = 40 }) // 640 tokens: little is kept
	c := o.Cases[0]
	body := fmt.Sprintf(`{"model":"stories260k","prompt":%q,"max_tokens":64,"temperature":0,"return_token_ids":true}`, c.Prompt)
	header := map[string]string{"x-request-id": "the-same"}
	round := func(when string) {
		var wg sync.WaitGroup
		for range 50 {
			wg.Go(func() {
				if ids, _, _ := streamed(t, url, body, header); !equal(ids, c.Greedy) {
					t.Errorf("%s: got %v, want %v", when, ids, c.Greedy)
				}
			})
		}
		wg.Wait()
	}
	round("cold")
	round("warm")
	for i := range 20 {
		post(t, url+"/v1/completions", nil, fmt.Sprintf(`{"model":"stories260k","prompt":"%d is a number that nobody else in the park had ever seen before","max_tokens":32}`, i))
	}
	round("after eviction")
}
