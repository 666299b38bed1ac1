package engine_test

import (
	"errors"
	"io"
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/enginetest"
	"github.com/xpyd/xpyd/engine/kvcache"
)

// TestDriven: an engine whose caller is its loop, on the caller's clock, gives each request what a
// running one does.
func TestDriven(t *testing.T) {
	const requests = 20
	ask := func(i int) *engine.Request {
		prompt := make([]int32, 5+7*i)
		for n := range prompt {
			prompt[n] = int32((n*13 + i) % 40)
		}
		return &engine.Request{ID: "r", Prompt: prompt, N: 1 + i%3, MaxTokens: 3 + i, IgnoreEOS: true, Sampling: engine.Sampling{Seed: uint64(i), Temperature: 1}, Logprobs: -1, PromptLogprobs: -1}
	}
	tokens := func(events []engine.Event, to map[int][]int32) {
		for _, ev := range events {
			to[ev.Choice] = append(to[ev.Choice], ev.Sampled.Token)
		}
	}
	for _, depth := range []int{1, 2} {
		cfg, shape := config(), enginetest.Config{Blocks: 200, BlockTokens: 16}
		cfg.StepTokens = 64
		backend := &enginetest.Pipelined{Backend: enginetest.New(shape)}
		cache, err := kvcache.New(kvcache.Config{Blocks: backend.Blocks(), BlockTokens: 16})
		if err != nil {
			t.Fatal(err)
		}
		now := time.Unix(1000, 0)
		d, err := engine.NewDriven(cfg, backend, depth, cache, slog.New(slog.DiscardHandler), prometheus.NewRegistry(), func() time.Time { return now })
		if err != nil {
			t.Fatal(err)
		}
		running := newRig(t, cfg, shape, nil)
		handles, got := make([]*engine.Handle, requests), make([]map[int][]int32, requests)
		for i := range handles {
			if handles[i], err = d.Submit(t.Context(), ask(i)); err != nil {
				t.Fatal(err)
			}
			got[i] = map[int][]int32{}
		}
		turns := 0
		for wait := engine.Landing; wait != engine.Idle; turns++ {
			if wait, _ = d.Turn(false); wait == engine.Landing {
				now = now.Add(time.Millisecond)
				d.Settle()
			}
			for i, h := range handles {
				events, err := d.Events(h)
				if err != nil && !errors.Is(err, io.EOF) {
					t.Fatal(err)
				}
				tokens(events, got[i])
			}
		}
		for i := range handles {
			want := map[int][]int32{}
			h, err := running.Submit(t.Context(), ask(i))
			for err == nil {
				var events []engine.Event
				events, err = h.Next(t.Context())
				tokens(events, want)
			}
			for c := range ask(i).N {
				if len(want[c]) != 3+i || !slices.Equal(got[i][c], want[c]) {
					t.Errorf("depth %d, request %d, choice %d: %v, want %v", depth, i, c, got[i][c], want[c])
				}
			}
		}
		if s := cache.Stats(); s.Held > 0 || turns < requests {
			t.Errorf("depth %d: %+v after %d turns", depth, s, turns)
		}
	}
}
