//go:build cuda && cgo && linux

package worker_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/kernels/cuda"
)

// thinkEnv is how long a client thinks before it asks again, in the mean (exponential); such as "2s".
const thinkEnv = "XPYD_CUDA_THINK"

// multiturn holds conversations with an engine whose pool is 12 GiB and whose
// conversations take four times as much, with host memory for them and without.
func multiturn(t *testing.T, b *cuda.Backend) {
	think, name := time.Duration(0), ""
	if s := os.Getenv(thinkEnv); s != "" {
		var err error
		if think, err = time.ParseDuration(s); err != nil {
			t.Fatal(err)
		}
		name = ".think" + s
	}
	run := map[bool]talksRun{}
	for _, host := range []int64{56 << 30, 0} {
		run[host > 0] = talks(t, b, host, think)
	}
	with, without := run[true], run[false]
	for name, r := range map[string]talksRun{"with host memory": with, "without": without} {
		t.Logf("multiturn %s, thinking for %v: %d turns in %.1f s, %.2f turns/s, %.0f answer tokens/s, history %.0f tokens in the mean, of which %.0f came from host memory; first token p50 %.0f ms, p99 %.0f ms",
			name, think, r.turns, r.took.Seconds(), r.rate(), float64(r.answered)/r.took.Seconds(), float64(r.history)/float64(r.turns), float64(r.loaded)/float64(r.turns),
			r.first(50), r.first(99))
		t.Logf("multiturn %s: %.0f steps/s of %.2f ms, in each %.1f sequences that decode and %.0f tokens of prompts; %.1f requests have a place", name,
			r.steps/r.took.Seconds(), 1000*r.busy/r.steps, r.decoded/r.steps, r.prefilled/r.steps, r.running/float64(max(1, r.looks)))
		t.Logf("multiturn %s: %s", name, r.last)
	}
	result("hicache.multiturn_ratio"+name, "", []float64{with.rate() / without.rate()}, "device-only caching, turns a second", without.rate())
	result("hicache.multiturn_ttft_ratio"+name, "", []float64{with.first(50) / without.first(50)}, "device-only caching, p50 of the first token, ms", without.first(50))
}

const (
	talkClients = 64
	talkOpen    = 112 // conversations: 48 GiB of them
	talkTurns   = 10
	talkSays    = 600 // tokens of a turn's prompt beside its history
	talkHears   = 100 // of an answer
)

type talksRun struct {
	turns, answered, history, loaded int
	took                             time.Duration
	firsts                           []float64

	steps, busy, decoded, prefilled float64 // busy: seconds
	running                         float64 // the sum of so many looks
	looks                           int
	last                            string // of its steps, by kind
}

// kinds describes steps, as many as the engine remembers of each kind, in means.
func kinds(steps []engine.StepRecord) string {
	var list []string
	for _, kind := range []struct {
		name string
		is   func(s *engine.StepRecord) bool
	}{
		{"only decode", func(s *engine.StepRecord) bool { return s.Tokens == s.Seqs }},
		{"with prompts", func(s *engine.StepRecord) bool { return s.Tokens > s.Seqs && s.Arrivals == 0 }},
		{"with prompts behind prefixes that come", func(s *engine.StepRecord) bool { return s.Arrivals > 0 }},
	} {
		var sum engine.StepRecord
		n := 0
		for _, s := range steps {
			if kind.is(&s) {
				n++
				sum.Seqs, sum.Tokens, sum.Launch, sum.Took = sum.Seqs+s.Seqs, sum.Tokens+s.Tokens, sum.Launch+s.Launch, sum.Took+s.Took
				sum.Device, sum.Idle = sum.Device+s.Device, sum.Idle+s.Idle
			}
		}
		k := float64(max(1, n))
		list = append(list, fmt.Sprintf("%d %s: %.1f sequences, %.0f tokens, %.2f ms of which the device %.2f and idle before %.2f, the launch %.2f",
			n, kind.name, float64(sum.Seqs)/k, float64(sum.Tokens)/k, ms(sum.Took)/k, sum.Device/1e3/k, sum.Idle/1e3/k, ms(sum.Launch)/k))
	}
	return strings.Join(list, "; ")
}

func (r *talksRun) rate() float64 { return float64(r.turns) / r.took.Seconds() }
func (r *talksRun) first(p int) float64 {
	return slices.Sorted(slices.Values(r.firsts))[len(r.firsts)*p/100]
}

// talk is one conversation.
type talk struct {
	seed    uint64
	turn    int
	history []int32
}

func talks(t *testing.T, b *cuda.Backend, host int64, think time.Duration) (run talksRun) {
	r := newGPURig(t, b, host)
	defer r.end()
	vocab := b.Arch().Vocab
	open := make(chan *talk, talkOpen)
	var all sync.WaitGroup
	begin := make(chan *talk, talkOpen)
	for i := range talkOpen { // in the midst of it: at all turns alike
		c := &talk{seed: uint64(1000 * (i + 1)), turn: i % talkTurns}
		c.history = randomPrompt(c.seed, c.turn*(talkSays+talkHears), vocab)
		begin <- c
	}
	close(begin)
	for range talkClients {
		all.Go(func() {
			for c := range begin {
				// Without host memory only the last ones' would still be there.
				if len(c.history) > 0 && (host > 0 || len(begin) < talkOpen/3) {
					r.ask(append(slices.Clone(c.history), 1), 1)
				}
				open <- c
			}
		})
	}
	all.Wait()
	if host > 0 {
		r.saved()
	}
	var mu sync.Mutex
	began := time.Now()
	until := began.Add(talkWarm + talkTime)
	watched := func(at time.Time) bool { return at.After(began.Add(talkWarm)) && at.Before(until) }
	for i := range talkClients {
		all.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(i), 1))
			for time.Now().Before(until) {
				time.Sleep(time.Duration(rnd.ExpFloat64() * float64(think)))
				c := <-open // who has waited longest
				c.seed++
				prompt := append(slices.Clone(c.history), randomPrompt(c.seed, talkSays, vocab)...)
				asked := time.Now()
				a := r.ask(prompt, talkHears)
				mu.Lock()
				if watched(asked.Add(a.first)) {
					run.firsts = append(run.firsts, ms(a.first))
				}
				if watched(time.Now()) {
					run.turns++
					run.answered += len(a.tokens)
					run.history += len(c.history)
					run.loaded += a.loaded
				}
				mu.Unlock()
				if c.turn++; c.turn == talkTurns {
					c.turn, c.history = 0, nil
				} else {
					c.history = append(prompt, a.tokens...)
				}
				open <- c
			}
		})
	}
	time.Sleep(talkWarm)
	before := r.stepsSoFar()
	for time.Now().Before(until) {
		time.Sleep(100 * time.Millisecond)
		run.running, run.looks = run.running+float64(r.engine.Stats().Running), run.looks+1
	}
	after := r.stepsSoFar()
	run.steps, run.busy, run.decoded, run.prefilled = after[0]-before[0], after[1]-before[1], after[2]-before[2], after[3]-before[3]
	run.last = kinds(r.engine.Steps())
	all.Wait()
	run.took = talkTime
	return run
}

// stepsSoFar counts steps, their seconds, and what they computed: tokens of answers, and
// of prompts.
func (r *gpuRig) stepsSoFar() (sums [4]float64) {
	r.t.Helper()
	all, err := r.reg.Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	for _, f := range all {
		switch f.GetName() {
		case "xpyd_engine_step_seconds":
			h := f.Metric[0].GetHistogram()
			sums[0], sums[1] = float64(h.GetSampleCount()), h.GetSampleSum()
		case "xpyd_engine_tokens_total":
			for _, m := range f.Metric {
				if m.Label[0].GetValue() == "decode" {
					sums[2] = m.GetCounter().GetValue()
				} else {
					sums[3] = m.GetCounter().GetValue()
				}
			}
		}
	}
	return sums
}

// talkTime is how long conversations are watched, after talkWarm, in which what
// all clients ask at once at the begin spreads.
const talkWarm, talkTime = 10 * time.Second, 30 * time.Second
