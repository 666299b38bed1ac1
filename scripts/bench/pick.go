package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"path/filepath"
	"time"

	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/scripts/bench/harness"
)

// pickBench measures router/pick's TestScale: the router's choice among many workers and an
// exact index of many blocks, beside the same with 8 workers.
type pickBench struct {
	base
	blocks, workers int
	profile         string
}

func (b *pickBench) flags(f *flag.FlagSet) {
	f.IntVar(&b.blocks, "blocks", 10_000_000, "blocks in each index")
	f.IntVar(&b.workers, "workers", 4000, "workers of the large fleet")
	f.StringVar(&b.profile, "cpuprofile", "", "write a CPU profile to this file")
}

func (b *pickBench) parts() []part { return []part{{"pick", b.compare}} }

func (b *pickBench) compare(ctx context.Context) error {
	binary := filepath.Join(b.Dir, "pick.test")
	if err := harness.BuildTest(ctx, ".", binary, "./router/pick"); err != nil {
		return err
	}
	argv := []string{binary, "-test.run", "^TestScale$", "-test.timeout", "1h"}
	if b.profile != "" {
		argv = append(argv, "-test.cpuprofile", b.profile)
	}
	var out bytes.Buffer
	if _, err := b.Output(ctx, time.Hour, &out, []string{fmt.Sprint("XPYD_PICK_BLOCKS=", b.blocks), fmt.Sprint("XPYD_PICK_WORKERS=", b.workers), fmt.Sprint("XPYD_PICK_ROUNDS=", b.Rounds)}, argv...); err != nil {
		return err
	}
	var mean, p99 [2][]float64 // of the large fleet and of 8
	perBlock := 0.0
	for lines := json.NewDecoder(&out); ; {
		var r struct {
			Workers  int
			Mean     float64 `json:"mean_us"`
			P99      float64 `json:"p99_us"`
			PerBlock float64 `json:"bytes_per_block"`
		}
		if err := lines.Decode(&r); errors.Is(err, io.EOF) || len(mean[1]) == b.Rounds {
			break
		} else if err != nil {
			return fmt.Errorf("TestScale: %w", err)
		}
		i := 1
		if r.Workers == b.workers {
			i, perBlock = 0, r.PerBlock
		}
		mean[i], p99[i] = append(mean[i], r.Mean), append(p99[i], r.P99)
	}
	if len(mean[1]) != b.Rounds || len(mean[0]) != b.Rounds {
		return fmt.Errorf("TestScale printed %d and %d rounds of %d", len(mean[0]), len(mean[1]), b.Rounds)
	}
	about := fmt.Sprintf("%d workers, %d blocks, prompts of 1,024 to 2,088 tokens, lookup and choice, with churn", b.workers, b.blocks)
	return b.Add(figures.Figure{Name: "router.pick_ratio.4000", Unit: "us of thread time, mean", Peer: "the same with 8 workers", Model: about}.Ratios(mean[0], mean[1]),
		figures.Figure{Name: "router.pick_p99_ratio.4000", Unit: "us of thread time, p99", Peer: "the same with 8 workers", Model: about}.Ratios(p99[0], p99[1]),
		figures.Figure{Name: "router.index_bytes_per_block", Value: perBlock, Unit: "bytes of heap", Peer: "limit", PeerValue: 64, Ratio: perBlock / 64, Runs: 1, Spread: "one build", Model: about})
}
