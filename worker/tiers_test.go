package worker_test

import (
	"context"
	"fmt"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/worker"
)

// stories are prompts of some 200 tokens, which begin alike.
func stories(n int) []string {
	list := make([]string, n)
	for i := range list {
		list[i] = "Once upon a time there was a little girl. " + strings.Repeat(fmt.Sprintf("She saw %d birds and %d dogs. ", i+2, i+5), 12)
	}
	return list
}

// storyBody asks for more of a story.
func storyBody(prompt string) string {
	return fmt.Sprintf(`{"model":"stories260k","prompt":%q,"max_tokens":12,"temperature":0.8,"seed":5,"return_token_ids":true}`, prompt)
}

// TestTiers: what the pool has lost comes back from host memory and, after a
// restart, from the SSD; tokens are those of a worker that computes everything.
func TestTiers(t *testing.T) {
	prompts := stories(5)
	plain := start(t, nil)
	want := make([][]int32, len(prompts))
	for i, p := range prompts {
		want[i] = complete(t, plain, nil, storyBody(p)).Choices[0].TokenIDs
	}
	for _, blockTokens := range []int{1, 16, 24, 64, 256} {
		t.Run(fmt.Sprint(blockTokens), func(t *testing.T) {
			unit := kvcache.UnitTokens(blockTokens)
			tiers := func(c *worker.Config) {
				c.BlockTokens, c.Blocks = blockTokens, max(2, 320/blockTokens) // one prompt's worth and a bit
				c.KV.HostMemory, c.KV.SSDDir, c.KV.SSDSize = 4<<20, filepath.Join(c.KV.SSDDir, "kv"), 16<<20
				c.KV.LoadTimeout = time.Minute
			}
			dir := t.TempDir()
			run := func(w *worker.Worker, warm bool) {
				t.Helper()
				for i, p := range prompts {
					a := complete(t, w, nil, storyBody(p))
					settle(t, w) // before the next one takes its blocks
					if !reflect.DeepEqual(a.Choices[0].TokenIDs, want[i]) {
						t.Errorf("prompt %d: tokens %v, want %v", i, a.Choices[0].TokenIDs, want[i])
					}
					least := (a.Usage.Prompt - 1) / unit * unit
					if warm && a.Usage.Details.Cached != least {
						t.Errorf("prompt %d: %d of %d tokens cached, want %d", i, a.Usage.Details.Cached, a.Usage.Prompt, least)
					}
				}
			}
			began := func() *worker.Worker {
				return start(t, func(c *worker.Config) { c.KV.SSDDir = dir; tiers(c) })
			}
			w := began()
			run(w, false)
			run(w, true)
			empty(t, w)
			if err := w.Close(context.Background()); err != nil {
				t.Fatal(err)
			}
			run(began(), true)
		})
	}
}

// TestHostMemoryOfPool: host memory has as many times the pool's bytes as was said.
func TestHostMemoryOfPool(t *testing.T) {
	w := start(t, func(c *worker.Config) {
		c.Blocks = 200
		if err := c.KV.HostMemory.UnmarshalText([]byte("1.5x")); err != nil {
			t.Fatal(err)
		}
	})
	if c := cache(t, w, "GET", ""); len(c.Tiers) != 1 || c.Tiers[0].Capacity != 1.5*200*20<<10/c.Tiers[0].UnitBytes {
		t.Errorf("%+v beside a pool of 200 blocks of 20 KiB", c.Tiers)
	}
}

// TestTierPolicies: tokens are the same under the other write policies, with
// the other eviction orders, at each block size.
func TestTierPolicies(t *testing.T) {
	prompts := stories(8)
	plain := start(t, nil)
	want := make([][]int32, len(prompts))
	for i, p := range prompts {
		want[i] = complete(t, plain, nil, storyBody(p)).Choices[0].TokenIDs
	}
	for _, policy := range []struct {
		write, eviction string
		host            config.PoolSize
		times           int // that each prompt is sent
	}{{"selective", "lfu", 4 << 20, 3}, {"back", "s3fifo", 1 << 20, 1}} {
		for _, blockTokens := range []int{1, 16, 64, 256} {
			t.Run(fmt.Sprint(policy.write, "/", blockTokens), func(t *testing.T) {
				dir := filepath.Join(t.TempDir(), "kv")
				for _, restarted := range []bool{false, true} {
					w := start(t, func(c *worker.Config) {
						c.BlockTokens, c.Blocks = blockTokens, max(3, 960/blockTokens) // three prompts' worth and a bit
						c.KV.HostMemory, c.KV.SSDDir, c.KV.SSDSize = policy.host, dir, 16<<20
						c.KV.LoadTimeout, c.KV.WritePolicy, c.KV.Eviction = time.Minute, policy.write, policy.eviction
					})
					all := slices.Concat(prompts, prompts, prompts)
					if restarted {
						all = prompts
					}
					for i, p := range all {
						for range policy.times {
							a := complete(t, w, nil, storyBody(p))
							if got, want := a.Choices[0].TokenIDs, want[i%len(prompts)]; !reflect.DeepEqual(got, want) {
								t.Errorf("prompt %d: tokens %v, want %v", i, got, want)
							}
						}
						settle(t, w)
					}
					empty(t, w)
					if n := counter(t, w, "xpyd_kvtier_loaded_tokens_total"); n == 0 && blockTokens < 256 {
						t.Errorf("nothing was loaded (restarted: %t)", restarted)
					}
					if err := w.Close(context.Background()); err != nil {
						t.Fatal(err)
					}
				}
			})
		}
	}
}

// TestCachePriority: through a pair, what a request said that it is to be kept longest
// outlasts a storm of others, in decode's pool and host memory and in prefill's.
func TestCachePriority(t *testing.T) {
	prompts := stories(40)
	p, d := pair(t, func(pc, dc *worker.Config) {
		for _, c := range []*worker.Config{pc, dc} {
			c.Blocks, c.KV.HostMemory, c.KV.LoadTimeout, c.KV.Peers = 48, 1<<20, time.Minute, "off"
		}
	})
	n := 0
	run := func(prompt, more string) *answer {
		t.Helper()
		n++
		link := fmt.Sprintf("%032x", n)
		done := leg(p, link)
		a := complete(t, d, linked(p, link), strings.Replace(storyBody(prompt), "{", "{"+more, 1))
		if got := <-done; !strings.HasPrefix(got, "200 ") {
			t.Fatal(got)
		}
		for _, w := range []*worker.Worker{p, d} {
			settle(t, w)
		}
		return a
	}
	run(prompts[0], `"cache_priority":90,`)
	for _, prompt := range prompts[1:] {
		run(prompt, "")
	}
	for _, forgetful := range []*worker.Worker{nil, d} {
		for i, want := range []bool{true, false} {
			if forgetful != nil {
				cache(t, forgetful, "POST", "/flush")
			}
			if a := run(prompts[i], ""); a.Usage.Details.Cached > 32 != want { // they begin alike
				t.Errorf("prompt %d: %d of %d tokens cached", i, a.Usage.Details.Cached, a.Usage.Prompt)
			}
			for _, prompt := range prompts[20:] {
				run(prompt, "")
			}
		}
	}
}

// settle waits until nothing is on its way into a tier of w.
func settle(t *testing.T, w *worker.Worker) {
	t.Helper()
	soon(t, patience, func() error {
		if n := counter(t, w, "xpyd_kvtier_waiting_units"); n > 0 {
			return fmt.Errorf("%v units wait", n)
		}
		return nil
	})
}

// TestTiersPair: both halves of a pair find in their tiers what their pools
// have lost, and what comes from there is not pushed again.
func TestTiersPair(t *testing.T) {
	prompts := stories(5)
	plain := start(t, nil)
	p, d := pair(t, func(pc, dc *worker.Config) {
		for _, c := range []*worker.Config{pc, dc} {
			c.Blocks, c.KV.HostMemory, c.KV.LoadTimeout = 20, 4<<20, time.Minute
		}
	})
	for round := range 3 {
		for i, prompt := range prompts {
			link := fmt.Sprintf("%032x", 16*round+i)
			done := leg(p, link)
			a := complete(t, d, linked(p, link), storyBody(prompt))
			if got := <-done; !strings.HasPrefix(got, "200 ") || !strings.Contains(got, `"outcome":"done"`) {
				t.Fatal(got)
			}
			if want := complete(t, plain, nil, storyBody(prompt)).Choices[0].TokenIDs; !reflect.DeepEqual(a.Choices[0].TokenIDs, want) {
				t.Errorf("tokens %v, want %v", a.Choices[0].TokenIDs, want)
			}
			if round > 0 && a.Usage.Details.Cached != 192 {
				t.Errorf("prefill had %d tokens of %d", a.Usage.Details.Cached, a.Usage.Prompt)
			}
			for _, w := range []*worker.Worker{p, d} {
				settle(t, w)
			}
		}
	}
	for _, w := range []*worker.Worker{p, d} {
		empty(t, w)
		if n := counter(t, w, "xpyd_kvtier_loaded_tokens_total"); n < 2*5*128 {
			t.Errorf("%s has loaded %v tokens", w.ID(), n)
		}
	}
}
