package e2e

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/xpyd/xpyd/engine/tier/redis/redistest"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/worker"
)

// randomBody makes one valid completion request: mixed lengths, batches, n,
// sampling, stops, penalties, log probabilities, echo.
func randomBody(r *rand.Rand, i int) string {
	word := func() string {
		words := []string{"Once", "upon", "a", "time", "there", "was", "little", "dog", "Lily", "the", "park", "big", "red", "ball", "and", "she", "he", "said", "mom", "day", "é", "🙂", "123", "\\n"}
		return words[r.IntN(len(words))]
	}
	text := func() string {
		n := 1 + r.IntN(8)
		if r.IntN(5) == 0 {
			n = 20 + r.IntN(60)
		}
		if r.IntN(3) == 0 { // shared prefixes
			return "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. " + word()
		}
		var b []string
		for range n {
			b = append(b, word())
		}
		return strings.Join(b, " ")
	}
	prompt := strconv.Quote(strings.ReplaceAll(text(), "\\n", "\n"))
	switch r.IntN(6) {
	case 0:
		prompt = fmt.Sprintf(`[%q,%q]`, text(), text())
	case 1:
		ids := []string{"1"}
		for range 1 + r.IntN(40) {
			ids = append(ids, strconv.Itoa(3+r.IntN(509)))
		}
		prompt = "[" + strings.Join(ids, ",") + "]"
	}
	fields := []string{`"model":"stories260k"`, `"prompt":` + prompt, fmt.Sprintf(`"max_tokens":%d`, 1+r.IntN(48)),
		fmt.Sprintf(`"seed":%d`, i), `"return_token_ids":true`}
	maybe := func(odds int, format string, args ...any) {
		if r.IntN(odds) == 0 {
			fields = append(fields, fmt.Sprintf(format, args...))
		}
	}
	switch r.IntN(3) {
	case 0:
		fields = append(fields, `"temperature":0`)
	case 1:
		fields = append(fields, fmt.Sprintf(`"temperature":%.2f`, 0.2+1.5*r.Float64()))
	}
	maybe(3, `"n":%d`, 2+r.IntN(3))
	maybe(3, `"top_p":%.2f`, 0.3+0.7*r.Float64())
	maybe(3, `"top_k":%d`, 1+r.IntN(60))
	maybe(4, `"min_p":%.3f`, 0.2*r.Float64())
	maybe(4, `"repetition_penalty":%.2f`, 0.8+r.Float64())
	maybe(4, `"presence_penalty":%.2f`, 2*r.Float64()-1)
	maybe(4, `"frequency_penalty":%.2f`, 2*r.Float64()-1)
	maybe(3, `"stop":[%q,%q]`, word(), ".")
	maybe(5, `"bad_words":[%q,%q,%q]`, word(), "little girl", "She loved")
	maybe(8, `"allowed_token_ids":[403,407,261,378,432,286,376,298,315,421,%d]`, 3+r.IntN(509))
	maybe(6, `"logprob_token_ids":[%d,%d],"logprobs":1`, 3+r.IntN(509), 3+r.IntN(509))
	maybe(5, `"min_tokens":%d`, 1)
	maybe(6, `"ignore_eos":true`)
	maybe(5, `"logit_bias":{"%d":%d,"%d":-100}`, 3+r.IntN(509), r.IntN(5), 3+r.IntN(509))
	maybe(3, `"logprobs":%d`, r.IntN(5))
	maybe(4, `"echo":true`)
	return "{" + strings.Join(fields, ",") + "}"
}

// comparable strips what may differ between two answers to one request.
func comparable(t testing.TB, raw []byte) string {
	t.Helper()
	var a map[string]any
	if err := json.Unmarshal(raw, &a); err != nil {
		t.Fatalf("%v: %s", err, raw)
	}
	delete(a, "id")
	delete(a, "created")
	if u, ok := a["usage"].(map[string]any); ok {
		delete(u, "prompt_tokens_details") // says what was cached
	}
	b, err := json.Marshal(a)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// soakRequests is how many requests a differential test makes.
func soakRequests(t *testing.T, n int) int {
	t.Helper()
	if s := os.Getenv("XPYD_SOAK_REQUESTS"); s != "" {
		var err error
		if n, err = strconv.Atoi(s); err != nil {
			t.Fatal(err)
		}
	}
	return n
}

// TestDifferential: seeded random requests get the same answer, byte for byte,
// from a pair and from a single worker that does both phases. The pair's pools
// are small, so that preemption and eviction happen on the way, and several
// requests run at once. XPYD_SOAK_REQUESTS sets how many (60).
func TestDifferential(t *testing.T) {
	n := soakRequests(t, 60)
	alone := startWorker(t, fleet.Decode, nil)
	store := redistest.Start(t)
	var pairs [][2]*worker.Worker
	for i, bt := range [][2]int{{16, 16}, {4, 16}, {16, 3}, {8, 16}} {
		small := func(tokens int) func(*worker.Config) {
			return func(c *worker.Config) {
				c.BlockTokens, c.Blocks = tokens, 1100/tokens
				if i == 3 { // with tiers below, which are small as well
					c.KV.HostMemory, c.KV.SSDDir, c.KV.SSDSize, c.KV.MinLoadTokens = 1<<20, t.TempDir(), 4<<20, 0
					c.KV.Store = store.URL()
				}
			}
		}
		pairs = append(pairs, [2]*worker.Worker{startWorker(t, fleet.Prefill, small(bt[0])), startWorker(t, fleet.Decode, small(bt[1]))})
	}
	r := rand.New(rand.NewPCG(1, 2))
	bodies := make([]string, n)
	for i := range bodies {
		bodies[i] = randomBody(r, i)
	}
	var wg sync.WaitGroup
	next := make(chan int)
	for c := range 24 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			pair := pairs[c%len(pairs)]
			for i := range next {
				status, want := post(t, alone.URL()+"/v1/completions", nil, bodies[i])
				if status != 200 {
					t.Errorf("request %d alone: %d %s\n%s", i, status, want, bodies[i])
					continue
				}
				status, got := viaPair(t, pair[0], pair[1], bodies[i])
				if status != 200 {
					t.Errorf("request %d by pair %d: %d %s\n%s", i, c%len(pairs), status, got, bodies[i])
					continue
				}
				if g, w := comparable(t, got), comparable(t, want); g != w {
					t.Errorf("request %d by pair %d: %s\n got %s\nwant %s", i, c%len(pairs), bodies[i], g, w)
				}
			}
		}()
	}
	for i := range n {
		next <- i
	}
	close(next)
	wg.Wait()
}
