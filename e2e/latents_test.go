package e2e

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/model/modeltest"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/worker"
)

// randomModel writes Tiny of a family with the tokens of the embedded model, and returns its folder.
func randomModel(t *testing.T, family string) string {
	t.Helper()
	dir, files := t.TempDir(), map[string][]byte{}
	for _, name := range []string{"tokenizer.json", "tokenizer_config.json"} {
		b, err := os.ReadFile(filepath.Join("..", "internal", "model", "stories260k", name))
		if err != nil {
			t.Fatal(err)
		}
		files[name] = b
	}
	c := modeltest.Tiny(family)
	c.Vocab = 512
	if err := modeltest.WriteHF(dir, c, modeltest.HFOptions{Seed: 1, DType: kernels.BF16, Files: files}); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestLatents: fleets of 1P1D and 2P2D, whose small pools evict and preempt, and one of workers of unequal
// numbers of ranks that write into each other's memory, answer seeded random requests for models with latent
// attention as a worker does alone.
func TestLatents(t *testing.T) {
	for _, family := range []string{"deepseek_v2", "deepseek_v3"} {
		dir := randomModel(t, family)
		served := func(c *worker.Config) { c.Model, c.ServedName = dir, "stories260k" }
		alone := startWorker(t, fleet.Decode, served)
		for pools, tokens := range map[int]int{1: 16, 2: 5} {
			t.Run(fmt.Sprintf("%s %dP%dD", family, pools, pools), func(t *testing.T) {
				url := startCluster(t, pools, pools, func(c *worker.Config) {
					served(c)
					c.BlockTokens, c.Blocks = tokens, 1100/tokens
				})
				sameAsAlone(t, alone.URL(), url, randomBodies(rand.New(rand.NewPCG(7, uint64(pools))), soakRequests(t, 16)))
			})
		}
		t.Run(family+" ranks, shared memory", func(t *testing.T) {
			started := map[string]int{}
			url := startCluster(t, 3, 3, func(c *worker.Config) {
				served(c)
				c.KV.Transport, c.Blocks, c.TensorParallel = "shm", 96, []int{1, 2, 4}[started[c.Role]]
				started[c.Role]++
			})
			sameAsAlone(t, alone.URL(), url, randomBodies(rand.New(rand.NewPCG(7, 3)), soakRequests(t, 16)))
		})
	}
}

// TestLatentPushed: of each position a latent and a rotated key are pushed once for all heads, to any
// number of ranks from any other.
func TestLatentPushed(t *testing.T) {
	dir := randomModel(t, "deepseek_v3")
	c := modeltest.Tiny("deepseek_v3")
	for _, ranks := range [][2]int{{1, 1}, {2, 1}, {2, 4}} {
		of := func(n int) func(*worker.Config) {
			return func(c *worker.Config) { c.Model, c.ServedName, c.TensorParallel = dir, "random", n }
		}
		p, d := startWorker(t, fleet.Prefill, of(ranks[0])), startWorker(t, fleet.Decode, of(ranks[1]))
		status, out := viaPair(t, p, d, fmt.Sprintf(`{"model":"random","prompt":%q,"max_tokens":4,"temperature":0,"ignore_eos":true}`, strings.Repeat("Once upon a time ", 9)))
		var a answer
		if err := json.Unmarshal(out, &a); err != nil || status != 200 || a.Usage.Completion != 4 {
			t.Fatalf("%v: %d %s", err, status, out)
		}
		want := float64(a.Usage.Prompt * c.Layers * 4 * (c.KVRank + c.RopeDim))
		for _, w := range []*worker.Worker{p, d} {
			if got, err := cluster.ReadMetric(http.DefaultClient, w.URL(), "xpyd_kvconn_payload_bytes_total"); err != nil || got != want {
				t.Errorf("%v ranks: %v bytes of KV of %d positions, want %v: %v", ranks, got, a.Usage.Prompt, want, err)
			}
		}
	}
}
