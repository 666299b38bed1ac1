//go:build cuda && cgo && linux

package cuda_test

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cuda"
)

// An insideLoad is 64 streams that decode at 1k, and prompts of 8k beside them.
const insideBatch, insideContext, insidePrompt = 64, 1024, 8192

// TestInside measures prefill and decode beside each other inside one GPU: in steps that mix them,
// and each on multiprocessors of its own (green contexts). Each way has a frontier: how much of the
// rate that prefill has alone it keeps, at which p99 of the streams' gaps over their median alone.
// Of the parted ones each part has weights and a pool of its own, which only takes memory.
func TestInside(t *testing.T) {
	if os.Getenv("XPYD_CUDA_BENCH") != "inside" {
		t.Skip("XPYD_CUDA_BENCH is not inside")
	}
	open := func(part int) *cuda.Backend {
		b, err := cuda.NewRandom(llama8B(), 1, cuda.Options{MaxTokens: 2048, MaxSeqs: 256, Tune: true, MemoryPart: 0.42}.Part(part))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	whole := open(0)
	streams := insideStreams(whole, 0)
	alone := insideGaps(t, whole, func(int) []kernels.Seq { return streams }, 200)
	base := alone[len(alone)/2]
	rate := insideAlone(t, whole)
	frontier := map[string][]insidePoint{}
	say := func(way string, at int, gaps []float64, tokens float64) {
		p := insidePoint{gap: gaps[len(gaps)*99/100] / base, prefill: tokens / rate}
		frontier[way] = append(frontier[way], p)
		fmt.Fprintf(os.Stdout, "INSIDE %s %d: gaps p50 %.3f, p99 %.3f of alone; prefill %.3f of alone\n", way, at, gaps[len(gaps)/2]/base, p.gap, p.prefill)
	}
	fmt.Fprintf(os.Stdout, "INSIDE alone: gaps p50 %.2f ms, p99 %.2f; prefill %.0f tokens/s\n", base, alone[len(alone)*99/100], rate)
	for _, chunk := range []int{32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 768, 1024} {
		pos, prompt := 0, insidePromptOf(whole, insideBatch)
		gaps, fed := insideMixed(t, whole, streams, prompt, chunk, &pos)
		say("mixed", chunk, gaps, fed)
	}
	whole.Close()
	for _, n := range []int{24, 32, 40, 48, 56, 64, 72, 80, 96} {
		decode, prefill := open(n), open(-n)
		streams := insideStreams(decode, 0)
		own := insideGaps(t, decode, func(int) []kernels.Seq { return streams }, 100)
		prompts := insideAlone(t, prefill)
		fmt.Fprintf(os.Stdout, "INSIDE parts of %d: gaps p50 %.2f ms with the other part idle; prefill %.0f tokens/s\n", n, own[len(own)/2], prompts)
		var stop atomic.Bool
		var tokens atomic.Int64
		ended := make(chan error, 1)
		go func() {
			ended <- insidePrefill(prefill, func() bool { return !stop.Load() }, func(n int) { tokens.Add(int64(n)) })
		}()
		insideGaps(t, decode, func(int) []kernels.Seq { return streams }, 50) // both are under way
		before, at := tokens.Load(), time.Now()
		gaps := insideGaps(t, decode, func(int) []kernels.Seq { return streams }, 500)
		fed := float64(tokens.Load()-before) / time.Since(at).Seconds()
		stop.Store(true)
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		say("parts", n, gaps, fed)
		decode.Close()
		prefill.Close()
	}
	for _, gap := range []float64{1.25, 1.5, 2, 3} {
		parts, mixed := insideBest(frontier["parts"], gap), insideBest(frontier["mixed"], gap)
		line, _ := json.Marshal(map[string]any{"name": fmt.Sprintf("inside.prefill_ratio.gap%.0f", 100*gap), "unit": "of prefill alone, 8k", "value": parts, "p1": parts, "p99": parts,
			"runs": 1, "peer": "in steps that mix, under the same p99 of gaps", "peer_value": mixed})
		fmt.Fprintf(os.Stdout, "RESULT %s\n", line)
	}
}

// An insidePoint is of a frontier: p99 of the streams' gaps over their median alone, and prefill's
// share of its rate alone.
type insidePoint struct{ gap, prefill float64 }

// insideBest is the most prefill whose gaps are within a bound; 0: none are.
func insideBest(points []insidePoint, gap float64) (best float64) {
	for _, p := range points {
		if p.gap <= gap {
			best = max(best, p.prefill)
		}
	}
	return best
}

// insideBlocks is a block table, whose blocks lie apart in the pool.
func insideBlocks(b *cuda.Backend, first, positions int) (list []int32) {
	for i := range (positions + 15) / 16 {
		list = append(list, int32((first+i)*7919%b.Blocks()))
	}
	return list
}

func insideStreams(b *cuda.Backend, first int) (seqs []kernels.Seq) {
	each := (insideContext + 15) / 16
	for i := range insideBatch {
		seqs = append(seqs, kernels.Seq{Tokens: []int32{int32(i)}, Pos: insideContext - 1, Blocks: insideBlocks(b, first+i*each, insideContext),
			Samples: []kernels.Sample{{Seed: uint64(i), Temperature: 0.8, TopP: 0.95, Repetition: 1, Logprobs: -1}}})
	}
	return seqs
}

// insidePromptOf is a prompt behind the blocks of so many streams.
func insidePromptOf(b *cuda.Backend, streams int) kernels.Seq {
	q := kernels.Seq{Blocks: insideBlocks(b, streams*insideContext/16, insidePrompt)}
	for i := range insidePrompt {
		q.Tokens = append(q.Tokens, int32(i*104729%b.Arch().Vocab))
	}
	return q
}

// piece is n tokens of a prompt from pos on; the last draws.
func piece(prompt kernels.Seq, pos, n int) kernels.Seq {
	q := kernels.Seq{Tokens: prompt.Tokens[pos : pos+n], Pos: pos, Blocks: prompt.Blocks}
	if pos+n == len(prompt.Tokens) {
		q.Samples = []kernels.Sample{{TopP: 1, Repetition: 1, Logprobs: -1}}
	}
	return q
}

// insideGaps returns the times of n steps in ms, sorted; 20 more go first.
func insideGaps(t *testing.T, b *cuda.Backend, step func(int) []kernels.Seq, n int) (took []float64) {
	t.Helper()
	for i := range n + 20 {
		at := time.Now()
		mustStep(t, b, step(i)...)
		if i >= 20 {
			took = append(took, float64(time.Since(at).Microseconds())/1000)
		}
	}
	slices.Sort(took)
	return took
}

// insideMixed steps the streams with a chunk of a prompt each, and returns the gaps and prefill's rate.
func insideMixed(t *testing.T, b *cuda.Backend, streams []kernels.Seq, prompt kernels.Seq, chunk int, pos *int) (gaps []float64, rate float64) {
	t.Helper()
	steps := max(insidePrompt/chunk, 200) // the whole of a prompt, as attention grows
	fed := 0
	gaps = insideGaps(t, b, func(i int) []kernels.Seq {
		n := min(chunk, insidePrompt-*pos)
		q := piece(prompt, *pos, n)
		if *pos = (*pos + n) % insidePrompt; i >= 20 {
			fed += n
		}
		return append(slices.Clone(streams), q)
	}, steps)
	took := 0.0
	for _, ms := range gaps {
		took += ms / 1000
	}
	return gaps, float64(fed) / took
}

// insideAlone is prefill's rate with nothing beside it, in tokens a second: of six prompts, behind two.
func insideAlone(t *testing.T, b *cuda.Backend) float64 {
	t.Helper()
	var began time.Time
	tokens := 0
	err := insidePrefill(b, func() bool { return tokens < 8*insidePrompt }, func(n int) {
		if tokens += n; tokens == 2*insidePrompt {
			began = time.Now()
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	return 6 * insidePrompt / time.Since(began).Seconds()
}

// insidePrefill computes prompts of 8k in chunks of 2,048, one launched ahead, and tells of each that is done.
func insidePrefill(b *cuda.Backend, more func() bool, done func(tokens int)) error {
	const chunk = 2048
	prompt := insidePromptOf(b, 0)
	await := func() error {
		_, err := b.Await()
		if err == nil {
			done(chunk)
		}
		return err
	}
	for pos, ahead := 0, false; ; pos, ahead = (pos+chunk)%insidePrompt, true {
		on := more()
		if on {
			if err := b.Launch(&kernels.Step{Seqs: []kernels.Seq{piece(prompt, pos, chunk)}}); err != nil {
				return err
			}
		}
		if ahead {
			if err := await(); err != nil {
				return err
			}
		}
		if !on {
			return nil
		}
	}
}
