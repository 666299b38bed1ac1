package worker_test

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/engine/tier"
	"github.com/xpyd/xpyd/engine/tier/redis/redistest"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/worker"
)

// withStore is a worker over host memory and a shared store.
func withStore(s *redistest.Server, role fleet.Role, blockTokens int) func(*worker.Config) {
	return func(c *worker.Config) {
		c.Role, c.BlockTokens, c.Blocks = string(role), blockTokens, max(2, 320/blockTokens)
		c.KV.HostMemory, c.KV.Store, c.KV.LoadTimeout, c.KV.StoreTimeout = 4<<20, s.URL(), time.Minute, time.Minute
	}
}

// TestStore: what prefill computed and wrote, decode reads, and a worker that
// starts later; tokens are those of a worker that computes everything.
func TestStore(t *testing.T) {
	prompts := stories(3)
	plain := start(t, nil)
	want := make([][]int32, len(prompts))
	for i, p := range prompts {
		want[i] = complete(t, plain, nil, storyBody(p)).Choices[0].TokenIDs
	}
	for _, blockTokens := range []int{1, 16, 64, 256} {
		t.Run(fmt.Sprint(blockTokens), func(t *testing.T) {
			s := redistest.Start(t)
			for i, role := range []fleet.Role{fleet.Prefill, fleet.Decode, fleet.Decode} {
				w := start(t, withStore(s, role, blockTokens))
				for k, p := range prompts {
					a := complete(t, w, nil, storyBody(p))
					settle(t, w)
					if !reflect.DeepEqual(a.Choices[0].TokenIDs, want[k]) {
						t.Errorf("worker %d, prompt %d: tokens %v, want %v", i, k, a.Choices[0].TokenIDs, want[k])
					}
					whole := (a.Usage.Prompt - 1) / max(blockTokens, 16) * max(blockTokens, 16)
					if i > 0 && a.Usage.Details.Cached != whole {
						t.Errorf("worker %d, prompt %d: %d of %d tokens cached, want %d", i, k, a.Usage.Details.Cached, a.Usage.Prompt, whole)
					}
				}
				empty(t, w)
				c := cache(t, w, "GET", "")
				if c.Store == nil || !c.Store.Reachable || c.Store.LastError != "" || i == 0 && int(c.Store.Written) != len(s.Keys()) {
					t.Errorf("%+v, %d keys", c.Store, len(s.Keys()))
				}
			}
		})
	}
}

type cacheAnswer struct {
	Tiers  []tier.Stats     `json:"tiers"`
	Store  *tier.StoreStats `json:"store"`
	Purged *int             `json:"store_purged_units"`
}

func cache(t *testing.T, w *worker.Worker, verb, path string) (c cacheAnswer) {
	t.Helper()
	resp, b := send(t, verb, w.URL()+"/xpyd/v1/cache"+path, nil, "")
	if err := json.Unmarshal(b, &c); err != nil || resp.StatusCode != 200 {
		t.Fatalf("%d %s", resp.StatusCode, b)
	}
	return c
}

// TestStoreFlush: a flush leaves the store alone, unless it is asked to.
func TestStoreFlush(t *testing.T) {
	s := redistest.Start(t)
	w := start(t, withStore(s, fleet.Decode, 16))
	p := stories(1)[0]
	cached := func() int {
		a := complete(t, w, nil, storyBody(p))
		settle(t, w)
		return a.Usage.Details.Cached
	}
	cached()
	keys := s.Keys()
	s.Set("not ours", []byte("v"))
	if c := cache(t, w, "POST", "/flush"); c.Purged != nil || len(keys) == 0 {
		t.Errorf("%d keys, purged %v", len(keys), c.Purged)
	}
	if cached() == 0 {
		t.Error("the store was flushed too")
	}
	if c := cache(t, w, "POST", "/flush?store=true"); c.Purged == nil || *c.Purged != len(keys) {
		t.Errorf("%d keys, purged %v", len(keys), c.Purged)
	}
	if left := s.Keys(); len(left) != 1 {
		t.Errorf("left: %v", left)
	}
	if n := cached(); n != 0 {
		t.Errorf("%d tokens cached", n)
	}
}

// TestStoreFaults: a store that is not there, hangs or is killed fails no
// request, and the tokens are the same; secrets are shown nowhere.
func TestStoreFaults(t *testing.T) {
	prompts := stories(3)
	plain := start(t, nil)
	s := redistest.Start(t, "--requirepass", "opensesame")
	hasty := func(c *worker.Config) {
		withStore(s, fleet.Decode, 16)(c)
		c.KV.Store, c.KV.StoreTimeout = strings.Replace(s.URL(), "unix://", "unix://:opensesame@", 1), 100*time.Millisecond
	}
	w := start(t, hasty)
	for i, fault := range []func(){func() {}, s.Stop, s.Continue, s.Kill, s.Run} {
		name := []string{"well", "hung", "back", "killed", "new"}[i]
		fault()
		cache(t, w, "POST", "/flush")
		for i, p := range prompts {
			a := complete(t, w, nil, storyBody(p))
			if want := complete(t, plain, nil, storyBody(p)); !reflect.DeepEqual(a.Choices[0].TokenIDs, want.Choices[0].TokenIDs) {
				t.Errorf("%s, prompt %d: tokens %v, want %v", name, i, a.Choices[0].TokenIDs, want.Choices[0].TokenIDs)
			}
		}
	}
	empty(t, w)
	if c := cache(t, w, "GET", ""); c.Store == nil || strings.Contains(fmt.Sprint(*c.Store), "opensesame") {
		t.Errorf("%+v", c.Store)
	}
}
