// Package tiers tests that KV gives the same tokens from wherever it is loaded: on the CPU in its
// own tests, on a GPU in those of worker.
package tiers

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/model"
	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/internal/model/modeltest"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn/tcp"
	"github.com/xpyd/xpyd/kvconn/way"
	"github.com/xpyd/xpyd/worker"
)

// Bed is the setting that workers run in.
type Bed struct {
	Change func(*worker.Config)      // applies to every worker; may be nil
	Store  func(t *testing.T) string // starts an empty shared store and returns its URL
	Prompt int                       // tokens of a prompt
	Tokens int                       // of an answer
	// Temperature is high enough for answers to change with any part of a prompt, even with
	// random weights.
	Temperature float64
	SSD         config.Size // room for some 60 prompts
	Apart       []int       // block sizes that use another kernel than the first, so tokens may differ
}

// RandomModel writes a model with random weights and the embedded model's tokens, and returns its
// folder.
func RandomModel(t *testing.T, d kernels.DType, change func(*arch.Config)) string {
	t.Helper()
	tiny, err := model.Open(t.Context(), "", model.Options{Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer tiny.Close()
	c, dir := tiny.Config, filepath.Join(t.TempDir(), "model")
	change(&c)
	tokens, cfg, _ := tiny.TokenizerFiles()
	if err := modeltest.WriteHF(dir, c, modeltest.HFOptions{Seed: 1, DType: d, Files: map[string][]byte{"tokenizer.json": tokens, "tokenizer_config.json": cfg}}); err != nil {
		t.Fatal(err)
	}
	return dir
}

// node is a worker.
type node struct {
	*worker.Worker
	t   *testing.T
	bed *Bed
}

// startWorker starts a worker with a pool of blocks.
func (b *Bed) startWorker(t *testing.T, blockTokens, blocks int, change func(*worker.Config)) *node {
	t.Helper()
	cfg := worker.DefaultConfig(fleet.Decode)
	cfg.Threads, cfg.BlockTokens, cfg.Blocks = 1, blockTokens, blocks
	cfg.KV.LoadTimeout, cfg.KV.StoreTimeout, cfg.KV.MinLoadTokens = time.Minute, time.Minute, 0
	if b.Change != nil {
		b.Change(&cfg)
	}
	if change != nil {
		change(&cfg)
	}
	tr := tcp.New(nil)
	w, err := worker.Start(t.Context(), cfg, worker.Deps{Log: slog.New(slog.DiscardHandler), Registry: prometheus.NewRegistry(), Ways: []way.Kind{way.Network(tr)}, Build: "test"})
	if err != nil {
		t.Fatal(err)
	}
	n := &node{w, t, b}
	t.Cleanup(n.end)
	return n
}

// end checks that nothing is held and ends the worker. Further calls do nothing.
func (n *node) end() {
	n.t.Helper()
	n.holdsNothing()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := n.Close(ctx); err != nil {
		n.t.Error(err)
	}
}

// holdsNothing waits until all blocks are returned.
func (n *node) holdsNothing() {
	n.t.Helper()
	n.until("an empty ledger", func() error {
		if l := n.Ledger(); !l.Empty() {
			return fmt.Errorf("ledger: %+v", l)
		}
		return nil
	})
}

func (n *node) until(what string, f func() error) {
	n.t.Helper()
	if err := cluster.Poll(time.Minute, f); err != nil {
		n.t.Fatalf("%s: not within a minute: %v\n%s", what, err, standing())
	}
}

// standing is what every goroutine waits for, and in which system call each thread is.
func standing() string {
	all := make([]byte, 1<<20)
	all = all[:runtime.Stack(all, true)]
	tasks, _ := filepath.Glob("/proc/self/task/*")
	for _, t := range tasks {
		for _, file := range []string{"syscall", "wchan", "stack"} { // stack: of the kernel, to root alone
			if text, err := os.ReadFile(filepath.Join(t, file)); err == nil {
				all = fmt.Appendf(all, "%s/%s: %s\n", t, file, text)
			}
		}
	}
	return string(all)
}

// ask completes a prompt and returns the tokens and how many of the prompt were cached.
func (n *node) ask(prompt []int32, header string) (tokens []int32, cached int, err error) {
	ids, _ := json.Marshal(prompt)
	body := fmt.Sprintf(`{"prompt":%s,"max_tokens":%d,"temperature":%g,"seed":5,"ignore_eos":true,"return_token_ids":true}`, ids, n.bed.Tokens, n.bed.Temperature)
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

// metric reads a metric; 0 if there is none.
func (n *node) metric(name string) float64 {
	n.t.Helper()
	v, err := cluster.ReadMetric(http.DefaultClient, n.URL(), name)
	if err != nil {
		n.t.Fatal(err)
	}
	return v
}

// from is how many units came from a tier, directly or by way of host memory.
func (n *node) from(tier string) float64 {
	return n.metric(fmt.Sprintf("xpyd_kvtier_loaded_units_total{tier=%q}", tier)) + n.metric(fmt.Sprintf("xpyd_kvtier_prefetched_units_total{tier=%q}", tier))
}

// loaded returns how many tokens are loaded during do. A GPU counts them shortly after their use,
// so it waits a while for at least least.
func (n *node) loaded(least int, do func()) (tokens int) {
	n.t.Helper()
	const name = "xpyd_kvtier_loaded_tokens_total"
	before := n.metric(name)
	do()
	for by := time.Now().Add(5 * time.Second); ; time.Sleep(2 * time.Millisecond) {
		if tokens = int(n.metric(name) - before); tokens >= least || time.Now().After(by) {
			return tokens
		}
	}
}

// flush empties the pool, which must then be free, and the worker's own tiers.
func (n *node) flush() {
	n.t.Helper()
	n.until("a flush", func() error {
		resp, err := http.Post(n.URL()+"/xpyd/v1/cache/flush", "", nil)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		var c struct{ Pool struct{ Blocks, Free int } }
		if err := json.NewDecoder(resp.Body).Decode(&c); err != nil || c.Pool.Blocks == 0 || c.Pool.Free != c.Pool.Blocks {
			return fmt.Errorf("a flush: status %d, %+v, %w", resp.StatusCode, c, err)
		}
		return nil
	})
}

// drained waits until a metric is 0.
func (n *node) drained(metric string) {
	n.t.Helper()
	n.until(metric+" 0", func() error {
		if v := n.metric(metric); v > 0 {
			return fmt.Errorf("it is %v", v)
		}
		return nil
	})
}

const (
	waiting = "xpyd_kvtier_waiting_units"           // on their way into a tier
	given   = `xpyd_kvtier_peer_blocks{for="give"}` // held for peers
)

// crowd is how many concurrent requests share a prefix.
const crowd = 50

// talk is prompts, and the answers of a worker that computes everything.
type talk struct {
	prompts, ends [][]int32 // ends start like the first prompt and differ at the end
	shared        int       // tokens that ends have in common
	want, wants   [][]int32 // answers to prompts and ends
}

// cold makes the prompts and answers them one by one with an empty cache.
func (b *Bed) cold(t *testing.T, blockTokens int) *talk {
	t.Helper()
	gen := rand.New(rand.NewPCG(1, 1))
	random := func(to []int32) []int32 {
		for len(to) < b.Prompt {
			to = append(to, 260+gen.Int32N(240))
		}
		return to
	}
	k := &talk{shared: b.Prompt * 4 / 5}
	for range 4 {
		k.prompts = append(k.prompts, random([]int32{1}))
	}
	for range crowd {
		k.ends = append(k.ends, random(slices.Clone(k.prompts[0][:k.shared])))
	}
	plain := b.startWorker(t, blockTokens, b.pool(blockTokens), func(c *worker.Config) { c.KV.Peers = "off" })
	defer plain.end()
	all := func(prompts [][]int32) (answers [][]int32) {
		for _, p := range prompts {
			a, had, err := plain.ask(p, "")
			if err != nil || had != 0 || len(a) != b.Tokens {
				t.Fatalf("cold: %v, %d tokens cached, %v", a, had, err)
			}
			plain.flush()
			answers = append(answers, a)
		}
		return answers
	}
	k.want, k.wants = all(k.prompts), all(k.ends)
	return k
}

// pool is the blocks of one prompt and a bit more.
func (b *Bed) pool(blockTokens int) int { return max(3, b.Prompt*7/5/blockTokens) }

// SameTokens asks prompts cold and with KV from the pool, host memory, the SSD, a shared store, a
// peer and combinations, after eviction storms and restarts, and fifty at once that share a
// prefix. At each block size the tokens must be those of a worker that computes everything, and
// the same at all sizes but those Apart.
func SameTokens(t *testing.T, b Bed, blockTokens ...int) {
	var first *talk
	for _, size := range blockTokens {
		k := b.cold(t, size)
		t.Run(fmt.Sprint(size), func(t *testing.T) { b.everywhere(t, size, k) })
		if first == nil {
			first = k
		}
		if k == first || slices.Contains(b.Apart, size) {
			continue
		}
		t.Run(fmt.Sprint(size, " as ", blockTokens[0]), func(t *testing.T) {
			got, want := slices.Concat(k.want, k.wants), slices.Concat(first.want, first.wants)
			for i := range want {
				if !slices.Equal(got[i], want[i]) {
					t.Errorf("cold, prompt %d: tokens %v, want %v", i, got[i], want[i])
				}
			}
		})
	}
}

func (b *Bed) everywhere(t *testing.T, blockTokens int, k *talk) {
	unit := max(blockTokens, 16)
	whole := (b.Prompt - 1) / unit * unit // all but the last token
	store := b.Store(t)
	// Host memory for all prompts and ends, and for one prompt and a bit.
	const roomy, tight config.PoolSize = -16_000, -1_200
	start := func(host config.PoolSize, dir string, stored bool) *node {
		t.Helper()
		return b.startWorker(t, blockTokens, b.pool(blockTokens), func(c *worker.Config) {
			if c.KV.HostMemory = host; dir != "" {
				c.KV.SSDDir, c.KV.SSDSize = dir, b.SSD
			}
			if stored {
				c.KV.Store = store
			}
		})
	}
	check := func(n *node, what string, i, cached int, header string) {
		t.Helper()
		got, had, err := n.ask(k.prompts[i], header)
		if err != nil || !slices.Equal(got, k.want[i]) || had < cached {
			t.Errorf("%s, prompt %d: tokens %v, want %v; %d cached, want %d: %v", what, i, got, k.want[i], had, cached, err)
		}
		n.drained(waiting)
	}
	each := func(n *node, what string, cached int, header string) {
		t.Helper()
		for i := range k.prompts {
			check(n, what, i, cached, header)
		}
	}
	// storm asks all prompts, each of which evicts the others from the pool: whatever is cached was
	// loaded, some of it from there.
	storm := func(n *node, from string) {
		t.Helper()
		units := n.from(from)
		for i := range k.prompts {
			if got := n.loaded(whole, func() { check(n, "in a storm, from "+from, i, whole, "") }); got != whole {
				t.Errorf("in a storm, from %s, prompt %d: %d tokens loaded, want %d", from, i, got, whole)
			}
		}
		if n.from(from) == units {
			t.Errorf("in a storm nothing came from %s", from)
		}
	}
	dir := filepath.Join(t.TempDir(), "kv")
	all := start(roomy, dir, true)
	for i := range k.prompts {
		check(all, "cold", i, 0, "")
		check(all, "from the pool", i, whole, "")
	}
	for range 3 {
		storm(all, "host")
	}
	fifty := func(n *node, from string) {
		t.Helper()
		least := k.shared / unit * unit
		if got := n.loaded(least, func() { b.together(n, k, "from "+from, 0) }); got < least {
			t.Errorf("fifty at once, from %s: %d tokens loaded, they share %d", from, got, k.shared)
		}
		n.drained(waiting)
	}
	fifty(all, "host memory")
	each(all, "after fifty", whole, "")
	i := all.Instance()
	taker := start(0, "", false)
	for n := range k.prompts {
		check(taker, "from a peer", n, whole, fmt.Sprintf("%s %d %s %s %d", i.ID, i.Epoch, i.URL, i.KVAddr, whole))
		all.drained(given) // its pool has no room to give two
	}
	if taker.from("peer") == 0 {
		t.Error("nothing came from a peer")
	}
	taker.end()
	all.end()
	again := start(roomy, dir, false)
	each(again, "from the SSD, restarted", whole, "")
	if again.from("ssd") == 0 {
		t.Error("nothing came from the SSD")
	}
	again.end()
	stored := start(roomy, "", true)
	each(stored, "from the store", whole, "")
	if n := int(stored.from("store")); n < len(k.prompts)*whole/unit {
		t.Errorf("%d units came from the store, the prompts have %d", n, len(k.prompts)*whole/unit)
	}
	b.together(stored, k, "from the store too", 0) // the store serves 32 at a time; the others compute
	stored.end()

	// With little host memory, storms spill to the SSD.
	small := start(tight, filepath.Join(t.TempDir(), "kv"), false)
	each(small, "cold", 0, "")
	for range 2 {
		storm(small, "ssd")
	}
	fifty(small, "the SSD")
	small.end()

	// Another folder has only the prompts' prefixes, one of which is also in host memory. The store
	// has the rest.
	other := filepath.Join(t.TempDir(), "kv")
	part := start(roomy, other, false)
	begun := b.Prompt*2/5 + 2
	for _, p := range k.prompts {
		if _, _, err := part.ask(p[:begun], ""); err != nil {
			t.Fatal(err)
		}
		part.drained(waiting)
	}
	part.end()
	mixed := start(roomy, other, true)
	each(mixed, "from SSD and store", whole, "")
	each(mixed, "from host memory again", whole, "")
	if unit < begun && (mixed.from("ssd") == 0 || mixed.from("store") == 0 || mixed.from("host") == 0) {
		t.Errorf("%v units from the SSD, %v from the store, %v from host memory", mixed.from("ssd"), mixed.from("store"), mixed.from("host"))
	}
	mixed.end()

	// A pool with room for fifty only if they share their prefix.
	need := func(tokens int) int { return (tokens + blockTokens - 1) / blockTokens }
	common := k.shared / unit * unit / blockTokens
	own := need(b.Prompt+b.Tokens) - common
	full := b.startWorker(t, blockTokens, common+crowd*own+2, nil)
	check(full, "cold", 0, 0, "")
	if most := b.together(full, k, "from the pool", k.shared/unit*unit); most < crowd/5 {
		t.Errorf("no block was in more than %d hands", most)
	}
	full.flush()
	full.end()
}

// together asks all ends at once, each with at least cached tokens cached, and checks that all
// blocks are returned. It returns the most requests seen to hold one block.
func (b *Bed) together(n *node, k *talk, what string, cached int) (most int) {
	n.t.Helper()
	var all sync.WaitGroup
	for i, p := range k.ends {
		all.Go(func() {
			if got, had, err := n.ask(p, ""); err != nil || !slices.Equal(got, k.wants[i]) || had < cached {
				n.t.Errorf("fifty at once, %s, %d: tokens %v, want %v; %d cached, want %d: %v", what, i, got, k.wants[i], had, cached, err)
			}
		})
	}
	ctx, done := context.WithCancel(context.Background())
	go func() {
		all.Wait()
		done()
	}()
	for ; ctx.Err() == nil; time.Sleep(time.Millisecond) {
		hands := map[int32]int{}
		for _, h := range n.Ledger().Blocks {
			for _, id := range h.Blocks {
				hands[id]++
				most = max(most, hands[id])
			}
		}
	}
	n.holdsNothing()
	n.t.Logf("fifty at once, %s: up to %d seen to hold one block", what, most)
	return most
}
