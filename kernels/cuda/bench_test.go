//go:build cuda && cgo && linux

package cuda_test

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cuda"
)

// llama8B is Llama-3-8B's shape.
func llama8B() kernels.Arch {
	a := shape(32, 4096, 14336, 32, 8, 128, 128256)
	a.MaxPositions, a.RopeTheta, a.TiedHead = 40960, 500000, false
	return a
}

// TestSpeed prints one JSON line a figure: host time of Step, with the device's
// own beside it. XPYD_CUDA_BENCH names what to run: "b1 b8 b64 b256 2k 8k 32k".
func TestSpeed(t *testing.T) {
	what := strings.Fields(os.Getenv("XPYD_CUDA_BENCH"))
	if len(what) == 0 {
		t.Skip("XPYD_CUDA_BENCH is not set")
	}
	opt := cuda.Options{MaxTokens: 2048, MaxSeqs: 256, NoPDL: os.Getenv("XPYD_CUDA_NO_PDL") != "", NoGraphs: os.Getenv("XPYD_CUDA_NO_GRAPHS") != "", Tune: os.Getenv("XPYD_CUDA_TUNE") != ""}
	began := time.Now()
	b, err := cuda.NewRandom(llama8B(), 1, opt)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	t.Logf("%s: opened in %.1f s, %d blocks of 16", b.Info().Device, time.Since(began).Seconds(), b.Blocks())
	if os.Getenv("XPYD_CUDA_PROFILE") != "" { // one step of each, in a profiler range
		profiled = b.Profile
	}
	for _, w := range what {
		if n, ok := strings.CutPrefix(w, "b"); ok {
			batch, _ := strconv.Atoi(n)
			decodeSpeed(t, b, batch)
		} else {
			k, _ := strconv.Atoi(strings.TrimSuffix(w, "k"))
			prefillSpeed(t, b, k*1024)
		}
	}
}

// profiled brackets the one step that a profiler is to see; nil when none is.
var profiled func(on bool) error

func profile(t *testing.T, b *cuda.Backend, seqs ...kernels.Seq) {
	mustStep(t, b, seqs...)
	if err := profiled(true); err != nil {
		t.Fatal(err)
	}
	mustStep(t, b, seqs...)
	if err := profiled(false); err != nil {
		t.Fatal(err)
	}
}

func decodeSpeed(t *testing.T, b *cuda.Backend, batch int) {
	const length = 1024
	blocks := (length + 256) / 16
	var seqs []kernels.Seq
	next := int32(0)
	for i := range batch {
		q := kernels.Seq{Pos: length, Samples: []kernels.Sample{{TopP: 1, Repetition: 1, Logprobs: -1}}}
		for range blocks {
			q.Blocks = append(q.Blocks, (next*7919)%int32(b.Blocks()))
			next++
		}
		fill := kernels.Seq{Tokens: make([]int32, length), Blocks: q.Blocks}
		for j := range fill.Tokens {
			fill.Tokens[j] = int32((i*7919 + j*104729) % b.Arch().Vocab)
		}
		if i < 8 { // the others attend to what lies there: any finite rows do
			mustStep(t, b, fill)
		}
		q.Tokens = []int32{int32(i)}
		seqs = append(seqs, q)
	}
	measure := func(name string) {
		if profiled != nil {
			profile(t, b, seqs...)
			return
		}
		var host, device []float64
		for step := range 120 {
			for i := range seqs {
				seqs[i].Pos = length + step%200
			}
			at := time.Now()
			res := mustStep(t, b, seqs...)
			took := float64(time.Since(at).Microseconds()) / 1000
			us, err := b.LastStepTime()
			if err != nil {
				t.Fatal(err)
			}
			for i := range seqs {
				seqs[i].Tokens[0] = res[i].Samples[0].Token
			}
			if step >= 20 {
				host, device = append(host, took), append(device, us/1000)
			}
		}
		report(name, "ms", host, device)
	}
	measure(fmt.Sprintf("gpu.decode_step_ms.b%d", batch))
	if batch == 64 {
		for i := range seqs {
			seqs[i].Samples = []kernels.Sample{{Seed: uint64(i), Temperature: 0.8, TopP: 0.95, Repetition: 1, Logprobs: -1}}
		}
		measure(fmt.Sprintf("gpu.decode_step_ms.b%d_top_p", batch))
	}
}

func prefillSpeed(t *testing.T, b *cuda.Backend, length int) {
	var blocks []int32
	for i := range length / 16 {
		blocks = append(blocks, int32(i*7919%b.Blocks()))
	}
	tokens := make([]int32, length)
	for i := range tokens {
		tokens[i] = int32(i * 104729 % b.Arch().Vocab)
	}
	if profiled != nil {
		profile(t, b, kernels.Seq{Tokens: tokens[:2048], Blocks: blocks})
		return
	}
	rounds := max(4, 12*2048/length)
	var host, device []float64
	for round := range rounds + 2 {
		at := time.Now()
		var us float64
		for pos := 0; pos < length; pos += 2048 {
			q := kernels.Seq{Tokens: tokens[pos : pos+2048], Pos: pos, Blocks: blocks}
			if pos+2048 == length {
				q.Samples = []kernels.Sample{{TopP: 1, Repetition: 1, Logprobs: -1}}
			}
			mustStep(t, b, q)
			d, err := b.LastStepTime()
			if err != nil {
				t.Fatal(err)
			}
			us += d
		}
		if round >= 2 {
			host = append(host, float64(length)/time.Since(at).Seconds())
			device = append(device, float64(length)/us*1e6)
		}
	}
	report(fmt.Sprintf("gpu.prefill_tok_s.%dk", length/1024), "tok/s", host, device)
}

func report(name, unit string, host, device []float64) {
	slices.Sort(host)
	slices.Sort(device)
	line, _ := json.Marshal(map[string]any{
		"name": name, "unit": unit, "value": host[len(host)/2], "p1": host[0], "p99": host[len(host)*99/100],
		"device_value": device[len(device)/2], "runs": len(host),
	})
	fmt.Fprintf(os.Stdout, "RESULT %s\n", line)
}
