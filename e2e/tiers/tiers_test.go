// Package tiers tests that KV from wherever it lies gives the same tokens.
package tiers

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/tier/redis/redistest"
	"github.com/xpyd/xpyd/internal/worker"
	"github.com/xpyd/xpyd/kvconn/tcp"
)

// node is a worker with the embedded model.
type node struct {
	*worker.Worker
	t *testing.T
}

func start(t *testing.T, change func(*worker.Config)) *node {
	t.Helper()
	cfg := worker.DefaultConfig(fleet.Decode)
	cfg.Threads, cfg.KVMemory = 1, 8<<20
	cfg.KV.LoadTimeout, cfg.KV.StoreTimeout, cfg.KV.MinLoadTokens = time.Minute, time.Minute, 0
	if change != nil {
		change(&cfg)
	}
	tr, err := tcp.New(tcp.DefaultConfig())
	if err != nil {
		t.Fatal(err)
	}
	w, err := worker.Start(t.Context(), cfg, worker.Deps{Log: slog.New(slog.DiscardHandler), Registry: prometheus.NewRegistry(), Transport: tr, Build: "test"})
	if err != nil {
		t.Fatal(err)
	}
	n := &node{w, t}
	t.Cleanup(n.end)
	return n
}

// end checks that nothing is held, and ends the worker. Twice is once.
func (n *node) end() {
	n.t.Helper()
	n.until(func() error {
		if l := n.Ledger(); !l.Empty() {
			return fmt.Errorf("ledger: %+v", l)
		}
		return nil
	})
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := n.Close(ctx); err != nil {
		n.t.Error(err)
	}
}

// until waits for f, generously.
func (n *node) until(f func() error) {
	n.t.Helper()
	for by := time.Now().Add(time.Minute); ; time.Sleep(2 * time.Millisecond) {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(by) {
			n.t.Fatal(err)
		}
	}
}

// ask completes a prompt, and says how much of it was cached.
func (n *node) ask(prompt []int32, header string) (tokens []int32, cached int, err error) {
	ids, _ := json.Marshal(prompt)
	body := fmt.Sprintf(`{"prompt":%s,"max_tokens":8,"temperature":0.8,"seed":5,"ignore_eos":true,"return_token_ids":true}`, ids)
	req, err := http.NewRequestWithContext(n.t.Context(), "POST", n.URL()+"/v1/completions", strings.NewReader(body))
	if err != nil {
		return nil, 0, err
	}
	req.Header.Set("Content-Type", "application/json")
	if header != "" {
		req.Header.Set("x-xpyd-kv-peer", header)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, 0, err
	}
	defer resp.Body.Close()
	var a struct {
		Choices []struct {
			TokenIDs []int32 `json:"token_ids"`
		}
		Usage struct {
			Details struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		}
	}
	if err := json.NewDecoder(resp.Body).Decode(&a); err != nil || resp.StatusCode != 200 || len(a.Choices) != 1 {
		return nil, 0, fmt.Errorf("status %d: %w", resp.StatusCode, err)
	}
	return a.Choices[0].TokenIDs, a.Usage.Details.Cached, nil
}

// counter reads a metric; 0 where there is none.
func (n *node) counter(name string) (v float64) {
	n.t.Helper()
	resp, err := http.Get(n.URL() + "/metrics")
	if err != nil {
		n.t.Fatal(err)
	}
	defer resp.Body.Close()
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		if rest, ok := strings.CutPrefix(lines.Text(), name+" "); ok {
			if v, err = strconv.ParseFloat(rest, 64); err != nil {
				n.t.Fatal(err)
			}
		}
	}
	return v
}

func (n *node) loaded(tier string) float64 {
	return n.counter(fmt.Sprintf("xpyd_kvtier_loaded_units_total{tier=%q}", tier))
}

// settled waits until nothing is on its way into a tier.
func (n *node) settled() {
	n.t.Helper()
	n.until(func() error {
		if n.counter("xpyd_kvtier_waiting_units") > 0 || n.counter("xpyd_kvtier_store_waiting_units") > 0 {
			return errors.New("units wait for a minute")
		}
		return nil
	})
}

// gaveAll waits until nothing is held for peers.
func (n *node) gaveAll() {
	n.t.Helper()
	n.until(func() error {
		if v := n.counter(`xpyd_kvtier_peer_blocks{for="give"}`); v > 0 {
			return fmt.Errorf("%v blocks are held for peers", v)
		}
		return nil
	})
}

// TestSameTokens: prompts cold, from the pool, host memory, the SSD, a shared
// store, a peer and several of them, after eviction storms and restarts, and
// fifty at once: the tokens are those of a worker that computes everything, at
// each block size.
func TestSameTokens(t *testing.T) {
	gen := rand.New(rand.NewPCG(1, 1))
	prompts, want := make([][]int32, 4), make([][]int32, 4)
	plain := start(t, func(c *worker.Config) { c.KV.Peers = "off" })
	for i := range prompts {
		prompts[i] = []int32{1}
		for range 319 {
			prompts[i] = append(prompts[i], 260+gen.Int32N(240))
		}
		var err error
		if want[i], _, err = plain.ask(prompts[i], ""); err != nil || len(want[i]) != 8 {
			t.Fatal(want[i], err)
		}
	}
	for _, blockTokens := range []int{1, 16, 64, 256} {
		t.Run(fmt.Sprint(blockTokens), func(t *testing.T) { everywhere(t, blockTokens, prompts, want) })
	}
}

func everywhere(t *testing.T, blockTokens int, prompts, want [][]int32) {
	unit := max(blockTokens, 16)
	whole := 319 / unit * unit // all but the last token
	store := redistest.Start(t)
	with := func(host config.PoolSize, dir string, stored bool) func(*worker.Config) {
		return func(c *worker.Config) {
			c.BlockTokens, c.Blocks = blockTokens, max(3, 448/blockTokens) // of one prompt and a bit
			c.KV.HostMemory, c.KV.SSDDir, c.KV.SSDSize = host, dir, 32<<20
			if stored {
				c.KV.Store = store.URL()
			}
		}
	}
	check := func(n *node, what string, i, cached int, header string) {
		t.Helper()
		got, had, err := n.ask(prompts[i], header)
		if err != nil || !slices.Equal(got, want[i]) || had < cached {
			t.Errorf("%s, prompt %d: tokens %v, want %v; %d cached, want %d: %v", what, i, got, want[i], had, cached, err)
		}
		n.settled()
	}
	each := func(n *node, what string, cached int, header string) {
		t.Helper()
		for i := range prompts {
			check(n, what, i, cached, header)
		}
	}
	dir := filepath.Join(t.TempDir(), "kv")
	all := start(t, with(8<<20, dir, true))
	for i := range prompts {
		check(all, "cold", i, 0, "")
		check(all, "from the pool", i, whole, "")
	}
	for round := range 3 { // each pushes the others out of the pool
		each(all, fmt.Sprint("from host memory, storm ", round), whole, "")
	}
	if all.loaded("host") == 0 {
		t.Error("nothing came from host memory")
	}
	var crowd sync.WaitGroup
	for range 50 {
		crowd.Go(func() {
			if got, _, err := all.ask(prompts[0], ""); err != nil || !slices.Equal(got, want[0]) {
				t.Errorf("one of fifty: %v, want %v: %v", got, want[0], err)
			}
		})
	}
	crowd.Wait()
	i := all.Instance()
	taker := start(t, with(0, "", false))
	for n := range prompts {
		check(taker, "from a peer", n, whole, fmt.Sprintf("%s %d %s %s %d", i.ID, i.Epoch, i.URL, i.KVAddr, whole))
		all.gaveAll() // its pool has not room to give two
	}
	if taker.loaded("peer") == 0 {
		t.Error("nothing came from a peer")
	}
	taker.end()
	all.end()
	again := start(t, with(8<<20, dir, false))
	each(again, "from the SSD, restarted", whole, "")
	if again.loaded("ssd") == 0 {
		t.Error("nothing came from the SSD")
	}
	again.end()
	each(start(t, with(8<<20, "", true)), "from the store", whole, "")

	// Of another folder only the prompts' beginnings are there, of those one is
	// in host memory, and the rest is in the store.
	other := filepath.Join(t.TempDir(), "kv")
	part := start(t, with(8<<20, other, false))
	for _, p := range prompts {
		if _, _, err := part.ask(p[:130], ""); err != nil {
			t.Fatal(err)
		}
		part.settled()
	}
	part.end()
	mixed := start(t, with(8<<20, other, true))
	each(mixed, "from SSD and store", whole, "")
	each(mixed, "from host memory again", whole, "")
	if unit < 128 && (mixed.loaded("ssd") == 0 || mixed.loaded("store") == 0 || mixed.loaded("host") == 0) {
		t.Errorf("%v units from the SSD, %v from the store, %v from host memory", mixed.loaded("ssd"), mixed.loaded("store"), mixed.loaded("host"))
	}
}
