package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router"
	"github.com/xpyd/xpyd/router/sense"
	"github.com/xpyd/xpyd/worker"
)

// TestOwnWorkersByForeignDialects: our workers behind our router, spoken to as
// if they were vLLM: the tokens are the recorded ones, and a drawn answer is
// that of the worker alone.
func TestOwnWorkersByForeignDialects(t *testing.T) {
	o := readOracle(t)
	for _, dialect := range []string{"vllm-nixl", "vllm-mooncake", "openai"} {
		t.Run(dialect, func(t *testing.T) {
			p := startWorker(t, fleet.Prefill, nil)
			d := startWorker(t, fleet.Decode, func(c *worker.Config) { c.BlockTokens = 4 })
			static := []sense.Static{{ID: "d", Role: fleet.Decode, URL: d.URL(), Dialect: dialect, Model: "stories260k"}}
			if dialect != "openai" {
				static = append(static, sense.Static{ID: "p", Role: fleet.Prefill, URL: p.URL(), Dialect: dialect, Model: "stories260k",
					Bootstrap: strings.TrimPrefix(p.URL(), "http://")})
			}
			url := startForeignRouter(t, static)
			for _, c := range o.Cases {
				body := fmt.Sprintf(`{"model":"stories260k","prompt":%q,"max_tokens":64,"temperature":0,"return_token_ids":true}`, c.Prompt)
				status, out := post(t, url+"/v1/completions", nil, body)
				var a answer
				if err := json.Unmarshal(out, &a); err != nil || status != 200 || !equal(a.Choices[0].TokenIDs, c.Greedy) {
					t.Fatalf("%q: %d %s\nwant %v", c.Prompt, status, out, c.Greedy)
				}
				if ids, _, finish := streamed(t, url, body, nil); !equal(ids, c.Greedy) || finish != "length" {
					t.Errorf("%q streamed: %v %s", c.Prompt, ids, finish)
				}
			}
			drawn := `{"model":"stories260k","prompt":"Once upon a time","max_tokens":32,"temperature":1,"seed":7,"return_token_ids":true}`
			var through, alone answer
			_, out := post(t, url+"/v1/completions", nil, drawn)
			_, want := post(t, d.URL()+"/v1/completions", nil, drawn)
			if json.Unmarshal(out, &through) != nil || json.Unmarshal(want, &alone) != nil || !equal(through.Choices[0].TokenIDs, alone.Choices[0].TokenIDs) {
				t.Errorf("drawn: %s\nwant %s", out, want)
			}
		})
	}
}

// startForeignRouter is a router without NATS in front of the engines, once
// it is ready.
func startForeignRouter(t testing.TB, static []sense.Static) string {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	watcher, err := fleet.Watch(fleet.WatcherConfig{Log: log})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(watcher.Close)
	cfg := router.DefaultConfig()
	cfg.Listen, cfg.AdminListen, cfg.Static = "127.0.0.1:0", "", static
	r, err := router.New(cfg, router.Deps{Fleet: watcher, Log: log, Registerer: prometheus.NewRegistry(), Version: "test"})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if err := r.Shutdown(ctx); err != nil {
			t.Errorf("shut the router down: %v", err)
		}
	})
	waitFor(t, 10*time.Second, func() error {
		if !r.Ready() {
			return fmt.Errorf("not ready: %+v", watcher.Snapshot().Members)
		}
		return nil
	})
	return "http://" + r.Addr().String()
}
