package main

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/xpyd/xpyd/internal/loadgen/arrival"
	"github.com/xpyd/xpyd/internal/loadgen/workload"
	"github.com/xpyd/xpyd/internal/sim"
)

// drawn is a load made of a number: its lengths, how its prompts begin, and how its requests come are drawn.
type drawn struct {
	nth     uint64
	in, out float64 // mean tokens, of what is new in a prompt and of an answer
	spread  float64 // of their logarithms
	heads   int     // beginnings that prompts share, the first of them most often; 0: none
	head    int     // tokens of each, in whole blocks
	turns   float64 // of a talk, in the mean; each turn's prompt begins with all before
	bursts  float64 // burstiness of arrivals: 1 is Poisson, less comes in bursts
	wave    float64 // how much of the rate rises and falls, 0 to 1
}

const (
	drawnLoads  = 40
	drawnWindow = 90 * time.Second
	drawnMost   = 30_000           // tokens of a prompt
	drawnPause  = 5 * time.Second  // between an answer's beginning and the next turn, in the mean
	drawnWave   = 30 * time.Second // from crest to crest
)

// drawnLoad draws the nth.
func drawnLoad(nth int) drawn {
	rng := rand.New(rand.NewPCG(uint64(nth), drawnLoads))
	between := func(low, high float64) float64 { return low * math.Pow(high/low, rng.Float64()) }
	d := drawn{nth: uint64(nth), in: between(200, 8000), out: between(30, 600), spread: 0.2 + 0.8*rng.Float64(), turns: 1, bursts: 1}
	if nth%4&1 != 0 {
		d.heads, d.head = 2+rng.IntN(30), workload.BlockTokens*(1+rng.IntN(6))
	}
	if nth%4&2 != 0 {
		d.turns = between(2, 8)
		d.in /= d.turns / 2
	}
	switch nth % 5 {
	case 1:
		d.bursts = 0.5
	case 2:
		d.bursts = 0.25
	case 3:
		d.wave = 0.5
	case 4:
		d.bursts, d.wave = 0.5, 0.5
	}
	return d
}

func (d drawn) String() string {
	s := fmt.Sprintf("%d: %.0f new tokens, answers of %.0f, spread %.1f, burstiness %v", d.nth, d.in, d.out, d.spread, d.bursts)
	if d.heads > 0 {
		s += fmt.Sprintf(", %d beginnings of %d", d.heads, d.head)
	}
	if d.turns > 1 {
		s += fmt.Sprintf(", %.1f turns", d.turns)
	}
	if d.wave > 0 {
		s += fmt.Sprintf(", a wave of %v", d.wave)
	}
	return s
}

// requests are those that come at so many talks a second.
func (d drawn) requests(rate float64) []sim.Request {
	rng := rand.New(rand.NewPCG(d.nth, 7))
	tokens := func(mean float64) int {
		return int(max(1, mean*math.Exp(d.spread*rng.NormFloat64()-d.spread*d.spread/2)))
	}
	times := arrival.New(arrival.Config{Rate: rate * (1 + d.wave), Burstiness: d.bursts}, d.nth)
	var list []workload.Entry
	for talk := uint64(1); ; talk++ {
		at := times.Next()
		if at >= drawnWindow {
			break
		}
		low := (1 - d.wave) / (1 + d.wave) // of the crest
		if level := low + (1-low)*(1+math.Sin(2*math.Pi*float64(at)/float64(drawnWave)))/2; rng.Float64() > level {
			continue
		}
		var blocks []uint64
		if d.heads > 0 {
			nth := uint64(float64(d.heads) * math.Pow(rng.Float64(), 2))
			for b := range d.head / workload.BlockTokens {
				blocks = append(blocks, 1<<62|nth<<16|uint64(b))
			}
		}
		before := len(blocks) * workload.BlockTokens
		for turn := 0; ; turn++ {
			prompt, answer := before+tokens(d.in), tokens(d.out)
			if prompt > drawnMost || at >= drawnWindow {
				break
			}
			for b := len(blocks); (b+1)*workload.BlockTokens <= prompt; b++ {
				blocks = append(blocks, talk<<16|uint64(b))
			}
			list = append(list, workload.Entry{At: at, In: prompt, Out: answer, Blocks: slices.Clone(blocks)})
			if rng.Float64() > 1-1/d.turns {
				break
			}
			before = prompt + answer
			at += time.Duration(float64(drawnPause) * rng.ExpFloat64())
		}
	}
	slices.SortStableFunc(list, func(a, b workload.Entry) int { return cmp.Compare(a.At, b.At) })
	return sim.Trace(list, 1, drawnWindow)
}
