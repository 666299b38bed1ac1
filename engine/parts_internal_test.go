package engine

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/kernels"
)

// TestTakes: how long a step takes is predicted by what steps like it took.
func TestTakes(t *testing.T) {
	of := func(chunks ...int) (list []member) {
		for _, n := range chunks {
			list = append(list, member{chunk: n})
		}
		return list
	}
	var p pacer
	f := func(want time.Duration, chunks ...int) {
		t.Helper()
		if got := p.takes(of(chunks...)); (got - want).Abs() > time.Microsecond {
			t.Errorf("%v: %v, want %v", chunks, got, want)
		}
	}
	f(0, 1, 1)
	f(0, 100)
	p.step(8*time.Millisecond, of(1, 1))
	f(8*time.Millisecond, 1, 1, 1)
	f(0, 100)
	p.step(16*time.Millisecond, of(1))
	f(10*time.Millisecond, 1)
	p.step(2*time.Millisecond, of(1)) // a shorter one counts at once
	f(2*time.Millisecond, 1)
	p.step(100*time.Millisecond, of(1, 98, 1)) // 1000 a second
	f(100*time.Millisecond, 99, 1)
	f(175*time.Millisecond, 200) // a tile more costs a little less
	f(101*time.Millisecond, 99, 1, 1)
	f(2*time.Millisecond, 1)
	p.step(time.Second, of(leastChunk-1)) // too small to mean anything
	f(100*time.Millisecond, 99, 1)
	p.step(leastChunk*2*time.Millisecond, of(leastChunk)) // 500 a second
	rate := paceMemory*1000 + (1-paceMemory)*500
	f(time.Duration(100/rate*float64(time.Second)), 100)
	if prefill, total, _ := count(of(1, 5, 1, 2)); prefill != 7 || total != 9 {
		t.Errorf("%d of %d tokens are of prompts", prefill, total)
	}
}

// TestSlope: the line through points, whatever their height; points too close together change nothing.
func TestSlope(t *testing.T) {
	var s slope
	for i := range 100 {
		s.add(float64(5000+i%2), float64(i%2))
	}
	if s.is != 0 {
		t.Errorf("of points at one place: %v", s.is)
	}
	for i := range 200 {
		s.add(float64(i%10)*1000, 7+float64(i%10)*3)
	}
	if math.Abs(s.is-0.003) > 0.0001 {
		t.Errorf("%v a position, want 0.003", s.is)
	}
	for i := range 500 {
		s.add(float64(i%10)*1000, 7-float64(i%10))
	}
	if s.is != 0 {
		t.Errorf("of a line that falls: %v", s.is)
	}
}

// TestWithin: as many tokens as a step computes in a time, in whole tiles unless it is one.
func TestWithin(t *testing.T) {
	p := pacer{rates: []float64{1000, 2000}}
	for _, c := range []struct {
		total  int
		target time.Duration
		want   int
	}{
		{1000, time.Second, 1000}, {1000, 400 * time.Millisecond, 896}, {1000, 100 * time.Millisecond, 100}, {1000, 64 * time.Millisecond, 64},
		{1000, 128 * time.Millisecond, 256}, {1000, 127 * time.Millisecond, 127}, {1000, 0, 0}, {50, time.Second, 50}, {128, time.Second, 128}, {129, time.Second, 129}, {129, 64 * time.Millisecond, 64},
	} {
		if got := p.within(c.total, 0, c.target); got != c.want {
			t.Errorf("of %d tokens in %v: %d, want %d", c.total, c.target, got, c.want)
		}
	}
	var none pacer
	if a, b := none.within(firstChunk-1, 0, 1), none.within(firstChunk+1, 0, time.Hour); a != firstChunk-1 || b != firstChunk {
		t.Errorf("nothing is measured: %d and %d", a, b)
	}
}

// coming is a prefix of which some layers are here.
type coming struct {
	Arriving
	kernels.Arrival
	layers int
}

func (c coming) Move() kernels.Arrival { return c }
func (c coming) Layers() int           { return c.layers }

// TestHoldsUp: a prefix on its way may make others wait only for less than its tokens take to
// compute.
func TestHoldsUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, other := &sequence{asked: time.Now(), running: true}, &sequence{running: true}
		e := &Engine{now: time.Now, layers: 4, batch: []*sequence{other}, pace: pacer{rates: []float64{100, 100, 100, 100}}}
		time.Sleep(time.Second)
		f := func(what string, layers, tokens int, want bool) {
			t.Helper()
			q.arriving = coming{layers: layers}
			if got := e.holdsUp(q, tokens); got != want {
				t.Errorf("%s, %d layers: %t", what, layers, got)
			}
		}
		f("all is here", 4, 1, false)
		f("nothing is", 0, 1<<20, true)
		f("three seconds are left, four are computed", 1, 400, false)
		f("as long", 1, 300, false)
		f("three are left, two are computed", 1, 200, true)
		f("a second is left", 2, 100, false)
		f("a second is left", 2, 99, true)
		f("a third of one", 3, 34, false)
		f("a third of one", 3, 33, true)
		e.pace = pacer{}
		f("nothing is measured", 3, 1<<20, true)
		f("nothing is measured", 4, 1, false)
		e.pace, e.batch = pacer{rates: []float64{100}}, nil
		f("nobody else", 0, 1, false)
		e.flights = []*flight{{members: []member{{q: q}}}}
		f("its own step is under way", 0, 1, false)
		other.running = false
		e.flights = append(e.flights, &flight{members: []member{{q: other}}})
		f("another's that has ended", 0, 1, false)
		other.running = true
		f("another's", 0, 1, true)
		q.arriving = nil
		if e.holdsUp(q, 1) {
			t.Error("nothing arrives, and others wait")
		}
	})
}

// TestShortOnes: prompts that fit beside a long one, in order of age, as long as there is room.
func TestShortOnes(t *testing.T) {
	of := func(missing ...int) (list []*sequence) {
		for _, n := range missing {
			list = append(list, &sequence{tokens: make([]int32, n)})
		}
		return list
	}
	for _, c := range []struct {
		long    int
		younger []int
		most    int
		want    int
	}{
		{1000, nil, 100, 0}, {1000, []int{100}, 100, 100}, {1000, []int{101}, 100, 0}, {1000, []int{60, 50, 40}, 100, 100}, {1000, []int{60, 30, 20, 10}, 100, 100},
		{200, []int{10}, 100, 0}, {201, []int{10}, 100, 10}, {1000, []int{10}, 0, 0},
	} {
		if got := shortOnes(of(c.younger...), of(c.long)[0], c.most); got != c.want {
			t.Errorf("%+v: %d", c, got)
		}
	}
}

// TestResults: a backend that answers with another number of results than it was asked for has
// failed.
func TestResults(t *testing.T) {
	step := &kernels.Step{Seqs: []kernels.Seq{{Samples: make([]kernels.Sample, 2)}, {Targets: make([]int32, 3)}}}
	good := func() []kernels.Result {
		return []kernels.Result{{Samples: make([]kernels.Sampled, 2)}, {Prompt: make([]kernels.PromptLogprob, 3)}}
	}
	if err := checkResults(step, good()); err != nil {
		t.Error(err)
	}
	for name, change := range map[string]func([]kernels.Result) []kernels.Result{
		"none":          func([]kernels.Result) []kernels.Result { return nil },
		"one":           func(r []kernels.Result) []kernels.Result { return r[:1] },
		"three":         func(r []kernels.Result) []kernels.Result { return append(r, r[0]) },
		"a draw less":   func(r []kernels.Result) []kernels.Result { r[0].Samples = r[0].Samples[:1]; return r },
		"a draw more":   func(r []kernels.Result) []kernels.Result { r[1].Samples = r[0].Samples[:1]; return r },
		"an entry less": func(r []kernels.Result) []kernels.Result { r[1].Prompt = r[1].Prompt[:2]; return r },
		"an entry more": func(r []kernels.Result) []kernels.Result { r[0].Prompt = r[1].Prompt[:1]; return r },
	} {
		if err := checkResults(step, change(good())); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// TestSpoilt: a log probability that is no number, or a token outside the vocabulary, spoils a
// result at its position.
func TestSpoilt(t *testing.T) {
	e := &Engine{now: time.Now, vocab: 10}
	seq := &kernels.Seq{Pos: 20, Tokens: make([]int32, 3)}
	f := func(r kernels.Result, at int, bad bool) {
		t.Helper()
		if gotAt, got := e.spoilt(seq, &r); gotAt != at || got != bad {
			t.Errorf("%+v: at %d, %t", r, gotAt, got)
		}
	}
	entry := func(v float64) kernels.PromptLogprob {
		return kernels.PromptLogprob{Self: kernels.TokenLogprob{Logprob: float32(v)}}
	}
	f(kernels.Result{}, 0, false)
	f(kernels.Result{Samples: []kernels.Sampled{{Token: 0}, {Token: 9}}, Prompt: []kernels.PromptLogprob{entry(-1), entry(math.Inf(-1))}}, 0, false)
	f(kernels.Result{Samples: []kernels.Sampled{{Token: 0}, {Token: 10}}}, 23, true)
	f(kernels.Result{Samples: []kernels.Sampled{{Token: -1}}}, 23, true)
	f(kernels.Result{Prompt: []kernels.PromptLogprob{entry(-1), entry(math.NaN())}}, 22, true)
	f(kernels.Result{Prompt: []kernels.PromptLogprob{entry(math.NaN())}, Samples: []kernels.Sampled{{Token: -1}}}, 21, true)
}

// TestLimitsOfConfig: the least of each setting is taken, and a step carries what it may.
func TestLimitsOfConfig(t *testing.T) {
	least := Config{MaxRunning: 1, MaxWaiting: 1, StepTokens: 1, MaxBacklog: 1, MaxFailures: 1}
	if err := least.Validate(); err != nil {
		t.Error(err)
	}
	for name, change := range map[string]func(*Config){
		"prefill tokens": func(c *Config) { c.PrefillTokens = -1 }, "queue time": func(c *Config) { c.QueueTime = -1 }, "max step time": func(c *Config) { c.MaxStepTime = -1 },
	} {
		c := least
		if change(&c); c.Validate() == nil || !strings.Contains(c.Validate().Error(), name) {
			t.Errorf("%s: %v", name, c.Validate())
		}
	}
	if _, err := New(Config{}, nil, nil, nil, nil); err == nil {
		t.Error("an engine without limits")
	}
	for _, c := range []struct{ cfg, want int }{
		{(&Config{StepTokens: 900, PrefillTokens: 800, MaxRunning: 7}).MostTokens(), 900},
		{(&Config{StepTokens: 800, PrefillTokens: 900, MaxRunning: 7}).MostTokens(), 900},
		{(&Config{StepTokens: 8, PrefillTokens: 9, MaxRunning: 900}).MostTokens(), 900 + leastChunk},
	} {
		if c.cfg != c.want {
			t.Errorf("a step may carry %d tokens, want %d", c.cfg, c.want)
		}
	}
}

// TestGuard: what foreign code panics with is an error, and what it returns is a failed step once.
func TestGuard(t *testing.T) {
	x := errors.New("x")
	for _, c := range []struct {
		f        func() error
		panicked bool
	}{
		{func() error { return x }, false}, {func() error { return fmt.Errorf("y: %w", &StepError{Err: x}) }, false}, {func() error { panic(x) }, true},
	} {
		err := guard(c.f)
		var step *StepError
		if !errors.As(err, &step) || !errors.Is(err, x) || step.Panicked != c.panicked || strings.Count(err.Error(), "backend step") != 1 || strings.Contains(err.Error(), "panicked") != c.panicked {
			t.Errorf("%v", err)
		}
	}
	var step *StepError
	if err := guard(func() error { panic("text") }); !errors.As(err, &step) || !step.Panicked || !strings.Contains(err.Error(), "text") {
		t.Error(err)
	}
	if err := guard(func() error { return nil }); err != nil {
		t.Error(err)
	}
	if long := (&TooLongError{Prompt: 9, Max: 8}).Error(); !strings.Contains(long, "9 tokens") || !strings.Contains(long, "8 together") {
		t.Error(long)
	}
}

// TestHits: the blocks that the prefix cache had are told once, for every layer.
func TestHits(t *testing.T) {
	cache, err := kvcache.New(kvcache.Config{Blocks: 8, BlockTokens: 4})
	if err != nil {
		t.Fatal(err)
	}
	e := &Engine{now: time.Now, cache: cache, layers: 3, blockToks: 4}
	for _, c := range []struct{ computed, told int }{{0, 0}, {8, 2}} {
		var told [][]Ready
		q := &sequence{table: []int32{7, 5, 6}, computed: c.computed, h: &Handle{req: &Request{OnBlocks: func(layer int, r []Ready) {
			if layer != len(told) {
				t.Errorf("layer %d after %d", layer, len(told))
			}
			told = append(told, r)
		}}}}
		if err := e.announceHits(q); err != nil || q.told != c.told || len(told) != 3*min(c.told, 1) {
			t.Errorf("%d computed: told of %d in %d calls, %v", c.computed, q.told, len(told), err)
		}
		for _, r := range told {
			if len(r) != 2 || r[0] != (Ready{0, 7, 0, 4}) || r[1] != (Ready{1, 5, 4, 4}) {
				t.Errorf("%+v", r)
			}
		}
	}
	var step *StepError
	broken := &sequence{table: []int32{7}, computed: 4, h: &Handle{req: &Request{OnBlocks: func(int, []Ready) { panic("pusher") }}}}
	if err := e.announceHits(broken); !errors.As(err, &step) || !step.Panicked {
		t.Errorf("told in vain: %v", err)
	}
	q := &sequence{table: []int32{7, 5, 6}}
	if got := e.ready(q, 4, 11); len(got) != 2 || got[0] != (Ready{1, 5, 4, 4}) || got[1] != (Ready{2, 6, 8, 3}) {
		t.Errorf("%+v", got)
	}
}

// TestTraceOrder: the newest steps are told, the oldest of them first.
func TestTraceOrder(t *testing.T) {
	for _, n := range []int{0, 1, traced - 1, traced, traced + 1, 3*traced + 7} {
		var tr trace
		for i := range n {
			tr.add(StepRecord{Seqs: i})
		}
		list := tr.list()
		if len(list) != min(n, traced) {
			t.Fatalf("%d of %d steps", len(list), n)
		}
		for i, r := range list {
			if want := n - len(list) + i; r.Seqs != want {
				t.Fatalf("of %d steps number %d is %d, want %d", n, i, r.Seqs, want)
			}
		}
	}
}
