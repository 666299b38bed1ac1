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

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cuda"
)

// llama8B is Llama-3-8B's shape.
func llama8B() arch.Config {
	a := shape(32, 4096, 14336, 32, 8, 128, 128256)
	a.MaxPositions, a.RopeTheta, a.TiedHead = 40960, 500000, false
	return a
}

// qwen30B is Qwen3-30B-A3B's shape.
func qwen30B() arch.Config {
	a := shape(48, 2048, 6144, 32, 4, 128, 151936)
	a.ModelType, a.QKNorm, a.MaxPositions, a.RopeTheta, a.TiedHead = "qwen3_moe", true, 40960, 1e6, false
	a.Experts, a.ExpertsPerToken, a.ExpertWidth, a.NormExperts = 128, 8, 768, true
	return a
}

// TestSpeed prints one JSON line a figure: host time of a step, from one end to
// the next as steps overlap, with the device's own beside it. XPYD_CUDA_BENCH names what to run: "b1 b8 b64 b256 2k 8k 32k
// 8k@4096 mixed hit16@8k" (tokens of a chunk, 2048 if not given; and of what is cached before it). "b64l4" has contexts of 4k; "masks"
// is 64 draws that grammars bind beside 64 that nothing does.
// XPYD_CUDA_FP16 computes in fp16; XPYD_CUDA_KV8 keeps KV in FP8, XPYD_CUDA_W8 weights. XPYD_CUDA_MOE takes a mixture of experts' shape. "quality" compares logits with bf16's.
func TestSpeed(t *testing.T) {
	what := strings.Fields(os.Getenv("XPYD_CUDA_BENCH"))
	if len(what) == 0 {
		t.Skip("XPYD_CUDA_BENCH is not set")
	}
	opt := cuda.Options{MaxTokens: 2048, MaxSeqs: 256, NoPDL: os.Getenv("XPYD_CUDA_NO_PDL") != "", NoGraphs: os.Getenv("XPYD_CUDA_NO_GRAPHS") != "", Tune: os.Getenv("XPYD_CUDA_NO_TUNE") == "",
		BatchInvariant: os.Getenv("XPYD_CUDA_INVARIANT") != "", KVFP8: os.Getenv("XPYD_CUDA_KV8") != "", WeightsFP8: os.Getenv("XPYD_CUDA_W8") != "", FP16: inFP16()}
	switch {
	case opt.FP16:
		prefix = "gpu.fp16_"
	case opt.KVFP8 && opt.WeightsFP8:
		prefix = "gpu.w8kv8_"
	case opt.KVFP8:
		prefix = "gpu.kv8_"
	case opt.WeightsFP8:
		prefix = "gpu.w8_"
	}
	if what[0] == "quality" {
		quality(t, opt)
		return
	}
	for _, w := range what {
		if _, chunk := prompt(w); chunk > opt.MaxTokens {
			opt.MaxTokens = chunk
		}
	}
	if opt.BatchInvariant {
		prefix += "invariant_"
	}
	shape := llama8B()
	if os.Getenv("XPYD_CUDA_MOE") != "" {
		shape, prefix = qwen30B(), strings.Replace(prefix, "gpu.", "moe.", 1)
	}
	began := time.Now()
	b, err := cuda.NewRandom(shape, 1, opt)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	t.Logf("%s: opened in %.1f s, %d blocks of 16", b.Info().Device, time.Since(began).Seconds(), b.Blocks())
	if os.Getenv("XPYD_CUDA_PROFILE") != "" { // one step of each, in a profiler range
		profiled = b.Profile
	}
	for _, w := range what {
		if n, ok := strings.CutPrefix(w, "hit"); ok {
			n, after, _ := strings.Cut(n, "@")
			tokens, _ := strconv.Atoi(n)
			k, _ := strconv.Atoi(strings.TrimSuffix(after, "k"))
			hitSpeed(t, b, tokens, k*1024)
		} else if w == "mixed" {
			mixedSpeed(t, b)
		} else if w == "masks" {
			maskedSpeed(t, b)
		} else if n, ok := strings.CutPrefix(w, "b"); ok {
			n, k, _ := strings.Cut(n, "l")
			batch, _ := strconv.Atoi(n)
			length, _ := strconv.Atoi(k)
			decodeSpeed(t, b, batch, max(length, 1)*1024)
		} else {
			length, chunk := prompt(w)
			prefillSpeed(t, b, length, chunk)
		}
	}
}

// prompt reads "8k@4096": a prompt's tokens and a chunk's.
func prompt(w string) (length, chunk int) {
	k, n, ok := strings.Cut(w, "k@")
	if chunk = 2048; ok {
		chunk, _ = strconv.Atoi(n)
	}
	length, _ = strconv.Atoi(strings.TrimSuffix(k, "k"))
	return length * 1024, min(chunk, length*1024)
}

// prefix begins a figure's name.
var prefix = "gpu."

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

func decodeSpeed(t *testing.T, b *cuda.Backend, batch, length int) {
	chunk := b.Arch().MaxPositions
	if length > 1024 {
		chunk = 2048
	}
	blocks := (length + 256) / 16
	var seqs []kernels.Seq
	next := int32(0)
	for i := range batch {
		q := kernels.Seq{Pos: length, Samples: []kernels.Sample{{TopP: 1, Repetition: 1, Logprobs: -1}}}
		for range blocks {
			q.Blocks = append(q.Blocks, (next*7919)%int32(b.Blocks()))
			next++
		}
		fill := make([]int32, length)
		for j := range fill {
			fill[j] = int32((i*7919 + j*104729) % b.Arch().Vocab)
		}
		for pos := 0; i < 8 && pos < length; pos += chunk { // the others attend to what lies there: any finite rows do
			mustStep(t, b, kernels.Seq{Tokens: fill[pos:min(pos+chunk, length)], Pos: pos, Blocks: q.Blocks})
		}
		q.Tokens = []int32{int32(i)}
		seqs = append(seqs, q)
	}
	measure := func(name string) {
		if profiled != nil {
			profile(t, b, seqs...)
			return
		}
		var host, device, gaps []float64
		halves := [2][]kernels.Seq{slices.Clone(seqs), slices.Clone(seqs)}
		last := time.Now()
		for step := range 321 {
			half := halves[step%2]
			for i := range half {
				if half[i].Pos = length - 100 + step%200; step > 0 { // length on average
					half[i].After = i + 1
				}
			}
			mustLaunch(t, b, half...)
			if step == 0 {
				continue
			}
			mustAwait(t, b)
			at := time.Now()
			us, idle, err := b.LastStepTime()
			if err != nil {
				t.Fatal(err)
			}
			if step > 20 {
				took := float64(at.Sub(last).Microseconds()) / 1000
				host, device, gaps = append(host, took), append(device, us/1000), append(gaps, idle)
			}
			last = at
		}
		mustAwait(t, b)
		report(name, "ms", host, device)
		if batch == 64 && name == "gpu.decode_step_ms.b64" {
			slices.Sort(gaps)
			result("gpu.host_gap_us.p50", "us", gaps[len(gaps)/2], gaps, nil)
			result("gpu.host_gap_us.p99", "us", gaps[len(gaps)*99/100], gaps, nil)
		}
	}
	if length != 1024 {
		measure(fmt.Sprintf(prefix+"decode_step_ms.b%d_l%dk", batch, length/1024))
		return
	}
	measure(fmt.Sprintf(prefix+"decode_step_ms.b%d", batch))
	if batch == 64 {
		for i := range seqs {
			seqs[i].Samples = []kernels.Sample{{Seed: uint64(i), Temperature: 0.8, TopP: 0.95, Repetition: 1, Logprobs: -1}}
		}
		measure(fmt.Sprintf(prefix+"decode_step_ms.b%d_top_p", batch))
	}
}

func prefillSpeed(t *testing.T, b *cuda.Backend, length, chunk int) {
	var blocks []int32
	for i := range length / 16 {
		blocks = append(blocks, int32(i*7919%b.Blocks()))
	}
	tokens := make([]int32, length)
	for i := range tokens {
		tokens[i] = int32(i * 104729 % b.Arch().Vocab)
	}
	if profiled != nil {
		profile(t, b, kernels.Seq{Tokens: tokens[:chunk], Blocks: blocks})
		return
	}
	rounds := max(4, 12*2048/length)
	var host, device []float64
	for round := range rounds + 2 {
		at := time.Now()
		var us float64
		await := func() {
			mustAwait(t, b)
			d, _, err := b.LastStepTime()
			if err != nil {
				t.Fatal(err)
			}
			us += d
		}
		for pos := 0; pos < length; pos += chunk {
			q := kernels.Seq{Tokens: tokens[pos : pos+chunk], Pos: pos, Blocks: blocks}
			if pos+chunk == length {
				q.Samples = []kernels.Sample{{TopP: 1, Repetition: 1, Logprobs: -1}}
			}
			if mustLaunch(t, b, q); pos > 0 {
				await()
			}
		}
		await()
		if round >= 2 {
			host = append(host, float64(length)/time.Since(at).Seconds())
			device = append(device, float64(length)/us*1e6)
		}
	}
	name := fmt.Sprintf(prefix+"prefill_tok_s.%dk", length/1024)
	if chunk != 2048 {
		name += fmt.Sprintf("_chunk%d", chunk)
	}
	report(name, "tok/s", host, device)
}

// hitSpeed computes the last tokens of prompts of the given length, of which all
// else is in the pool (any finite rows do).
func hitSpeed(t *testing.T, b *cuda.Backend, tokens, length int) {
	var blocks []int32
	for i := range length / 16 {
		blocks = append(blocks, int32(i*7919%b.Blocks()))
	}
	q := kernels.Seq{Tokens: make([]int32, tokens), Pos: length - tokens, Blocks: blocks, Samples: []kernels.Sample{{TopP: 1, Repetition: 1, Logprobs: -1}}}
	if profiled != nil {
		profile(t, b, q)
		return
	}
	var host, device []float64
	for round := range 60 {
		at := time.Now()
		mustStep(t, b, q)
		took := float64(time.Since(at).Microseconds()) / 1000
		us, _, err := b.LastStepTime()
		if err != nil {
			t.Fatal(err)
		}
		if round >= 10 {
			host, device = append(host, took), append(device, us/1000)
		}
	}
	report(fmt.Sprintf(prefix+"hit_step_ms.%d_at_%dk", tokens, length/1024), "ms", host, device)
}

// mixedSpeed decodes 64 streams alone, then with a chunk of an 8k prompt in each
// step: the largest with which a step takes 1.92 times as long as without, in each
// half of the prompt, since attention takes more in the second.
func mixedSpeed(t *testing.T, b *cuda.Backend) {
	const batch, length, prompt, slower = 64, 1024, 8192, 1.92
	var seqs []kernels.Seq
	next := int32(0)
	blocks := func(positions int) (list []int32) {
		for range (positions + 15) / 16 {
			list = append(list, (next*7919)%int32(b.Blocks()))
			next++
		}
		return list
	}
	for i := range batch {
		seqs = append(seqs, kernels.Seq{Tokens: []int32{int32(i)}, Pos: length, Blocks: blocks(length + 256),
			Samples: []kernels.Sample{{Seed: uint64(i), Temperature: 0.8, TopP: 0.95, Repetition: 1, Logprobs: -1}}})
	}
	tokens, table := make([]int32, prompt), blocks(prompt)
	for i := range tokens {
		tokens[i] = int32(i * 104729 % b.Arch().Vocab)
	}
	step := func(pos, n int) float64 {
		all := seqs
		if n > 0 {
			q := kernels.Seq{Tokens: tokens[pos : pos+n], Pos: pos, Blocks: table}
			if pos+n == prompt {
				q.Samples = []kernels.Sample{{TopP: 1, Repetition: 1, Logprobs: -1}}
			}
			all = append(slices.Clone(seqs), q)
		}
		at := time.Now()
		mustStep(t, b, all...)
		return float64(time.Since(at).Microseconds()) / 1000
	}
	const warm = 20
	steps := func(n int, one func() float64) (took []float64) {
		for i := range n + warm {
			if d := one(); i >= warm {
				took = append(took, d)
			}
		}
		return took
	}
	sorted := func(d []float64) []float64 { return slices.Sorted(slices.Values(d)) }
	alone := sorted(steps(100, func() float64 { return step(0, 0) }))
	var chunks [2]int
	for half := range chunks {
		end := prompt / 2 * (half + 1)
		for n := 512; n > 0; n -= 32 {
			if took := sorted(steps(9, func() float64 { return step(end-n, n) })); took[4] <= slower*alone[50] {
				chunks[half] = n
				break
			}
		}
		if chunks[half] == 0 {
			t.Fatal("no chunk is short enough")
		}
	}
	pos, fed := 0, []int{}
	took := steps(200, func() float64 {
		n := min(chunks[min(pos/(prompt/2), 1)], prompt-pos)
		d := step(pos, n)
		pos, fed = (pos+n)%prompt, append(fed, n)
		return d
	})
	mixed, total, prefilled := sorted(took), 0.0, 0
	for i, d := range took {
		total, prefilled = total+d/1000, prefilled+fed[warm+i]
	}
	ratio := make([]float64, len(mixed))
	for i, v := range mixed {
		ratio[i] = v / alone[len(alone)/2]
	}
	p99 := ratio[len(ratio)*99/100]
	fmt.Fprintf(os.Stdout, "MIXED chunks of %d and %d: alone p50 %.2f ms, p99 %.2f; with prefill p50 %.2f, p99 %.2f\n", chunks[0], chunks[1], alone[50], alone[99], mixed[100], mixed[198])
	result("gpu.mixed_itl_ratio", "x", p99, ratio, nil)
	rate := float64(prefilled) / total
	result("gpu.mixed_prefill_tok_s", "tok/s", rate, []float64{rate}, nil)
}

// report prints a figure as the median of what the host saw, and the device.
func report(name, unit string, host, device []float64) {
	slices.Sort(host)
	slices.Sort(device)
	result(name, unit, host[len(host)/2], host, device)
}

// result prints a figure; sorted are the runs it comes from.
func result(name, unit string, value float64, sorted, device []float64) {
	m := map[string]any{"name": name, "unit": unit, "value": value, "p1": sorted[0], "p99": sorted[len(sorted)*99/100], "runs": len(sorted)}
	if len(device) > 0 {
		m["device_value"] = device[len(device)/2]
	}
	line, _ := json.Marshal(m)
	fmt.Fprintf(os.Stdout, "RESULT %s\n", line)
}
