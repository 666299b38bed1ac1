package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/xpyd/xpyd/internal/model/modeltest"
	"github.com/xpyd/xpyd/kernels"
)

// mooncake measures what tiers below the pool gain on a Mooncake trace, split into
// conversations by its block ids: `xpyd up` with host memory and an SSD under small pools, and
// without. Blocks are cut to 16 tokens so that minutes of a CPU suffice; weights are random.
type mooncake struct {
	base
	trace, reports string
	requests       int
	model          string // its folder
}

// Sizes of each worker's pool and of the tiers under it.
const poolSize, hostSize, ssdSize = "6MiB", "96MiB", "1GiB"

func (b *mooncake) flags(f *flag.FlagSet) {
	f.StringVar(&b.trace, "trace", "", "FAST25-release/traces/conversation_trace.jsonl of github.com/kvcache-ai/Mooncake (Apache-2.0)")
	f.IntVar(&b.requests, "requests", 800, "requests of the trace to send")
	f.StringVar(&b.reports, "reports", "", "folder for the last round's reports and plots")
}

func (b *mooncake) parts() []part { return []part{{"mooncake", b.compare}} }

// open makes a model with room for the trace's prompts. One KV head gives 5,000 operations a
// byte of KV; six would be further still from large models (8B: 100,000).
func (b *mooncake) open(context.Context) (err error) {
	if b.trace == "" {
		return errors.New("name the trace: -trace")
	}
	if b.reports == "" {
		b.reports = b.Dir
	}
	b.model = filepath.Join(b.Dir, "model")
	c := modeltest.Stories15M()
	c.Vocab, c.MaxPositions, c.KVHeads = 512, 1024, 1
	files := map[string][]byte{}
	for _, name := range []string{"tokenizer.json", "tokenizer_config.json"} {
		if files[name], err = os.ReadFile(filepath.Join("internal/model/stories260k", name)); err != nil {
			return err
		}
	}
	return errors.Join(os.MkdirAll(b.reports, 0o755), modeltest.WriteHF(b.model, c, modeltest.HFOptions{Seed: 1, DType: kernels.F32, Files: files}))
}

func (b *mooncake) compare(ctx context.Context) error {
	about := fmt.Sprintf("15M shape with 1 KV head, 512 tokens, random weights; 1P1D, pools of %s, under them %s of host memory and %s of SSD; %d requests of the Mooncake conversation trace, its blocks 16 tokens, 4 clients",
		poolSize, hostSize, ssdSize, b.requests)
	return talks(b.Bench, "mooncake.", "ours with tiers off", about, [2]string{"tiers", "off"}, []string{"ttft_ms", "tokens_s", "cpu_s", "cached_pct"}, func(round int, way string) (talk, error) {
		name := fmt.Sprint("mooncake-", way, round)
		defer os.RemoveAll(filepath.Join(b.Dir, name)) // gigabytes
		args := []string{"--model", b.model, "--threads", "1", "--kv-memory", poolSize}
		if way == "tiers" {
			args = append(args, "--kv-host-memory", hostSize, "--kv-ssd-dir", filepath.Join(b.Dir, name, "kv"), "--kv-ssd-size", ssdSize)
		}
		t, err := measureTalk(ctx, b.Bench, name, time.Hour, args, []string{"--trace", b.trace, "--prompt-ids", "3-500", "--block-tokens", "16", "--max-context", "512",
			"--requests", strconv.Itoa(b.requests), "--clients", "4", "--html", filepath.Join(b.reports, way+".html")})
		if err == nil && t.Failed > 0 {
			err = fmt.Errorf("%d requests failed", t.Failed)
		}
		return t, err
	})
}
