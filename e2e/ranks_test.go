package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xpyd/xpyd/engine/tier/redis/redistest"
	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/router"
	"github.com/xpyd/xpyd/worker"
)

// manyRanks are the numbers of ranks that the tests pair: stories260k has 4 KV heads for 8 query
// heads, so that of 8 ranks two keep each.
var manyRanks = []int{1, 2, 4, 8}

// TestOracleRanks: every recorded case, token for token, by any number of ranks and any pair of
// them: cold, warm, and behind a foreign proxy, which leases the blocks.
func TestOracleRanks(t *testing.T) {
	o := readOracle(t)
	var p, d []*worker.Worker
	for i, n := range manyRanks {
		ranks := func(tokens int) func(*worker.Config) {
			return func(c *worker.Config) { c.TensorParallel, c.BlockTokens = n, tokens }
		}
		p = append(p, startWorker(t, fleet.Prefill, ranks(16)))
		d = append(d, startWorker(t, fleet.Decode, ranks([]int{16, 16, 7, 32}[i])))
	}
	for i, from := range manyRanks {
		for j, to := range manyRanks {
			for _, c := range o.Cases {
				body := fmt.Sprintf(`{"model":"stories260k","prompt":%q,"max_tokens":64,"temperature":0,"return_token_ids":true,"cache_salt":"%d-%d"}`, c.Prompt, from, to)
				check := func(how string, status int, out []byte) {
					t.Helper()
					var a answer
					if err := json.Unmarshal(out, &a); err != nil || status != 200 {
						t.Fatalf("%d to %d ranks, %s: %d %s", from, to, how, status, out)
					}
					if !equal(a.Choices[0].TokenIDs, c.Greedy) {
						t.Errorf("%d to %d ranks, %s, %q:\n got %v\nwant %v", from, to, how, c.Prompt, a.Choices[0].TokenIDs, c.Greedy)
					}
				}
				for range 2 {
					status, out := viaPair(t, p[i], d[j], body)
					check("pair", status, out)
				}
				check("foreign", 200, foreign(t, p[i], d[j], body))
				if i == j {
					status, out := post(t, d[j].URL()+"/v1/completions", nil, body)
					check("alone", status, out)
				}
			}
		}
	}
}

// TestDifferentialRanks: seeded random requests get the same answer, byte for byte, from every pair
// of numbers of ranks as from a worker of one, in small pools that evict and preempt, with tiers
// below some of them and a store for all. XPYD_SOAK_REQUESTS sets how many (64).
func TestDifferentialRanks(t *testing.T) {
	n := soakRequests(t, 64)
	alone := startWorker(t, fleet.Decode, nil)
	store := redistest.Start(t)
	var p, d []*worker.Worker
	for i, ranks := range manyRanks {
		small := func(tokens int, tiers bool) func(*worker.Config) {
			return func(c *worker.Config) {
				c.TensorParallel, c.BlockTokens, c.Blocks = ranks, tokens, 1100/tokens
				if tiers {
					c.KV.HostMemory, c.KV.SSDDir, c.KV.SSDSize, c.KV.MinLoadTokens = 1<<20, t.TempDir(), 4<<20, 0
					c.KV.Store = store.URL()
				}
			}
		}
		p = append(p, startWorker(t, fleet.Prefill, small(16, i%2 == 1)))
		d = append(d, startWorker(t, fleet.Decode, small([]int{16, 3, 16, 16}[i], i > 1)))
	}
	bodies := randomBodies(rand.New(rand.NewPCG(5, 6)), n)
	atOnce(n, func(i int) {
		from, to := i%len(p), i/len(p)%len(d)
		status, want := post(t, alone.URL()+"/v1/completions", nil, bodies[i])
		if status != 200 {
			t.Errorf("request %d alone: %d %s\n%s", i, status, want, bodies[i])
			return
		}
		status, got := viaPair(t, p[from], d[to], bodies[i])
		if status != 200 {
			t.Errorf("request %d, %d to %d ranks: %d %s\n%s", i, manyRanks[from], manyRanks[to], status, got, bodies[i])
			return
		}
		if g, w := comparable(t, got), comparable(t, want); g != w {
			t.Errorf("request %d, %d to %d ranks: %s\n got %s\nwant %s", i, manyRanks[from], manyRanks[to], bodies[i], g, w)
		}
	})
}

// TestDifferentialRanksShared is the same where prefills of every number of ranks write into the
// memory of decodes of every other.
func TestDifferentialRanksShared(t *testing.T) {
	n := soakRequests(t, 64)
	alone := startWorker(t, fleet.Decode, nil)
	started := map[string]int{}
	url := startCluster(t, len(manyRanks), len(manyRanks), func(c *worker.Config) {
		c.KV.Transport = "shm" // no other way is taken
		c.Blocks = 96
		c.TensorParallel = manyRanks[started[c.Role]]
		started[c.Role]++
	})
	sameAsAlone(t, alone.URL(), url, randomBodies(rand.New(rand.NewPCG(7, 8)), n))
}

// TestRandomModelsRanks: models of other families with random weights, whose two KV heads are each
// kept by two of four ranks, and whose one latent is kept by all: every pair of numbers of ranks draws what one rank draws alone.
func TestRandomModelsRanks(t *testing.T) {
	for _, family := range []string{"llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3"} {
		t.Run(family, func(t *testing.T) {
			dir := randomModel(t, family)
			of := func(ranks int) func(*worker.Config) {
				return func(c *worker.Config) { c.Model, c.ServedName, c.TensorParallel = dir, "random", ranks }
			}
			alone := startWorker(t, fleet.Decode, of(1))
			var p, d []*worker.Worker
			for _, n := range []int{1, 2, 4} {
				p, d = append(p, startWorker(t, fleet.Prefill, of(n))), append(d, startWorker(t, fleet.Decode, of(n)))
			}
			for i := range p {
				for j := range d {
					for n := range 3 {
						body := fmt.Sprintf(`{"model":"random","prompt":%q,"max_tokens":40,"temperature":1,"seed":%d,"logprobs":3,"ignore_eos":true,"return_token_ids":true}`,
							strings.Repeat("Once upon a time ", 1+3*n), 10*i+j)
						_, want := post(t, alone.URL()+"/v1/completions", nil, body)
						status, got := viaPair(t, p[i], d[j], body)
						if status != 200 || comparable(t, got) != comparable(t, want) {
							t.Errorf("prefill %d, decode %d:\n got %d %s\nwant %s", i, j, status, got, want)
						}
					}
				}
			}
		})
	}
}

// TestRanksRefused: a number of ranks that does not divide the model, or that the device has not, is
// the setting's error.
func TestRanksRefused(t *testing.T) {
	f := func(want string, change func(*worker.Config)) {
		t.Helper()
		cfg := worker.DefaultConfig(fleet.Decode)
		change(&cfg)
		w, err := worker.Start(t.Context(), cfg, worker.Deps{Log: testLog()})
		if err == nil {
			_ = w.Close(t.Context())
		}
		var key *config.KeyError
		if !errors.As(err, &key) || key.Key != "tensor_parallel" || !strings.Contains(key.Msg, want) {
			t.Errorf("%v, want tensor_parallel: %s", err, want)
		}
	}
	f("3 ranks do not divide the model's 8 query heads", func(c *worker.Config) { c.Device, c.TensorParallel = "cpu", 3 })
	f("0 is not in 1..64", func(c *worker.Config) { c.TensorParallel = 0 })
	f("65 is not in 1..64", func(c *worker.Config) { c.TensorParallel = 65 })
	f("9 is more than GPUs serve, 8", func(c *worker.Config) { c.Device, c.TensorParallel = "cuda", 9 })
}

// hanging is a backend whose first rank hangs when it is told to: after a layer it never comes to
// the next barrier.
type hanging struct {
	kernels.Backend
	now     atomic.Bool
	release chan struct{}
	pace    time.Duration // of a step, besides
}

func (h *hanging) Step(s *kernels.Step) ([]kernels.Result, error) {
	time.Sleep(h.pace)
	if h.now.Load() {
		hung := *s
		hung.OnLayer = func(int) { <-h.release }
		s = &hung
	}
	return h.Backend.Step(s)
}

// logged is what a worker has logged.
type logged struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logged) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// TestHungRank: when a rank hangs, the worker says which and is to end; its requests fail at once,
// a pair with another worker keeps nothing, and its end waits for nobody.
func TestHungRank(t *testing.T) {
	body := `{"model":"stories260k","prompt":"Once upon a time, there was a little girl","max_tokens":20,"temperature":0}`
	for _, role := range []fleet.Role{fleet.Prefill, fleet.Decode} {
		t.Run(string(role), func(t *testing.T) {
			h := &hanging{release: make(chan struct{})}
			t.Cleanup(func() { close(h.release) })
			var log logged
			sick := func(d *worker.Deps) {
				d.Log = slog.New(slog.NewTextHandler(&log, nil))
				d.Backend = func(b kernels.Backend) kernels.Backend { h.Backend = b; return h }
			}
			two := func(c *worker.Config) { c.TensorParallel = 2 }
			four := func(c *worker.Config) { c.TensorParallel = 4 }
			var p, d, ill, well *worker.Worker
			if role == fleet.Prefill {
				p, d = startWorker(t, fleet.Prefill, two, sick), startWorker(t, fleet.Decode, four)
				ill, well = p, d
			} else {
				p, d = startWorker(t, fleet.Prefill, four), startWorker(t, fleet.Decode, two, sick)
				ill, well = d, p
			}
			if status, out := viaPair(t, p, d, body); status != 200 {
				t.Fatalf("%d %s", status, out)
			}
			h.now.Store(true)
			status, out, _ := attempt(t, p, d, strings.Replace(body, "Once", "Twice", 1))
			if status < 500 {
				t.Errorf("answered %d %s", status, out)
			}
			err := <-ill.Failed()
			if !errors.Is(err, kernels.ErrHung) || !strings.Contains(err.Error(), "rank 0 of 2") {
				t.Error(err)
			}
			if said := log.String(); !strings.Contains(said, "rank 0 of 2: a rank hangs") {
				t.Errorf("logged %s", said)
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			if err := ill.Close(ctx); err != nil {
				t.Error(err)
			}
			waitFor(t, 30*time.Second, func() error {
				if l := well.Ledger(); !l.Empty() {
					return fmt.Errorf("the other worker holds %+v", l)
				}
				return nil
			})
			if status, out := post(t, well.URL()+"/v1/completions", nil, body); status != 200 {
				t.Errorf("the other worker answers %d %s", status, out)
			}
		})
	}
}

// TestHungRankStream: a stream whose decode worker has a rank that hangs goes on at another, of
// another number of ranks, without a token twice or missing.
func TestHungRankStream(t *testing.T) {
	watcher, nats := startFleet(t)
	in := func(ranks int) func(*worker.Config) {
		return func(c *worker.Config) { c.Fleet.URL, c.TensorParallel = nats, ranks }
	}
	startWorker(t, fleet.Prefill, in(1))
	sick := map[string]*hanging{}
	var decodes []*worker.Worker
	for _, ranks := range []int{2, 4} {
		h := &hanging{release: make(chan struct{}), pace: 5 * time.Millisecond}
		t.Cleanup(func() { close(h.release) })
		w := startWorker(t, fleet.Decode, in(ranks), func(d *worker.Deps) {
			d.Backend = func(b kernels.Backend) kernels.Backend { h.Backend = b; return h }
		})
		decodes, sick[w.ID()] = append(decodes, w), h
	}
	url := startRouter(t, router.Deps{Fleet: watcher})
	body := `{"model":"stories260k","prompt":"Once upon a time","max_tokens":120,"temperature":1,"seed":3,"stream":true,"ignore_eos":true}`
	tell := func(on func(events int)) string {
		resp, err := http.Post(url+"/v1/completions", "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		var text strings.Builder
		events := 0
		for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
			data, ok := strings.CutPrefix(lines.Text(), "data: ")
			if !ok || data == "[DONE]" {
				continue
			}
			var a answer
			if err := json.Unmarshal([]byte(data), &a); err != nil || len(a.Choices) == 0 {
				t.Fatalf("after %d events: %s", events, data)
			}
			text.WriteString(a.Choices[0].Text)
			events++
			on(events)
		}
		return text.String()
	}
	want := tell(func(int) {})
	var ill *worker.Worker
	got := tell(func(events int) {
		for _, w := range decodes {
			if ill == nil && events >= 10 && len(w.Ledger().Requests) > 0 {
				ill = w
				sick[w.ID()].now.Store(true)
			}
		}
	})
	if ill == nil || got != want {
		t.Errorf("%v hung, and the stream is\n%q\nnot\n%q", ill, got, want)
	}
	if err := <-ill.Failed(); !errors.Is(err, kernels.ErrHung) {
		t.Error(err)
	}
	if err := ill.Close(t.Context()); err != nil {
		t.Error(err)
	}
}
