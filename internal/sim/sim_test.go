package sim

import (
	"os"
	"slices"
	"testing"
	"time"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/internal/loadgen/workload"
	"github.com/xpyd/xpyd/internal/steptable"
	"github.com/xpyd/xpyd/router/pick"
)

// line is a device with a time that is plain.
type line struct{}

func (line) Step(l steptable.Load) (mean, spread time.Duration) {
	us := 5000.0 + 20*float64(l.Decodes) + 0.0012*float64(l.Context)
	for _, p := range l.Pieces {
		n := float64(p.Tokens)
		us += n*20 + n*(float64(p.Position)+n/2)*0.0012
	}
	return time.Duration(us * 1000), 0
}

func config() Config {
	e := engine.DefaultConfig()
	e.StepTokens, e.PrefillTokens = 8192, 8192
	return Config{Worker: Worker{Engine: e, Blocks: 24000, BlockTokens: 16, Layers: 32, Steps: line{}, Overlaps: true},
		KV: Link{Bytes: 131072, Bandwidth: 100e9, Latency: 100 * time.Microsecond}, Front: time.Millisecond, Back: 200 * time.Microsecond,
		Pick: pick.DefaultConfig(), Heartbeat: 500 * time.Millisecond, Seed: 1}
}

func TestSpeed(t *testing.T) {
	f, err := os.Open(os.Getenv("TRACE"))
	if err != nil {
		t.Skip()
	}
	entries, err := workload.ReadTrace(f)
	if err != nil {
		t.Fatal(err)
	}
	for _, shape := range [][3]int{{16, 0, 0}} {
		cfg := config()
		cfg.Whole, cfg.Prefill, cfg.Decode = shape[0], shape[1], shape[2]
		load := Trace(entries, 1, 10*time.Minute)
		began := time.Now()
		out, err := Run(cfg, load, 2*time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		var ttft, gap []time.Duration
		failed, tokens := 0, 0
		for i := range out {
			tokens += out[i].Tokens
			if out[i].Failed {
				failed++
				continue
			}
			ttft, gap = append(ttft, out[i].TTFT()), append(gap, out[i].Gap())
		}
		slices.Sort(ttft)
		slices.Sort(gap)
		t.Log(shape, len(out), "requests", tokens, "tokens,", failed, "failed, took", time.Since(began), "ttft", ttft[len(ttft)/2], ttft[len(ttft)*99/100], "gap", gap[len(gap)/2], gap[len(gap)*99/100])
	}
}
