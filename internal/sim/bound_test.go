package sim

import (
	"math"
	"testing"
	"time"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/internal/loadgen/record"
)

// TestMaximise: two programs of textbooks; at the second (Beale, Cycling in the dual simplex algorithm,
// 1955) a simplex method without a rule for ties goes round in circles.
func TestMaximise(t *testing.T) {
	for _, c := range []struct {
		gain    []float64
		columns [][]float64
		limits  []float64
		want    float64
	}{
		{[]float64{3, 5}, [][]float64{{1, 0, 3}, {0, 2, 2}}, []float64{4, 12, 18}, 36},
		{[]float64{0.75, -150, 0.02, -6}, [][]float64{{0.25, 0.5, 0}, {-60, -90, 0}, {-0.04, -0.02, 1}, {9, 3, 0}}, []float64{0, 0, 1}, 0.05},
		{[]float64{-1}, [][]float64{{1}}, []float64{3}, 0},
	} {
		if got, _ := maximise(c.gain, c.columns, c.limits); math.Abs(got-c.want) > 1e-9 {
			t.Errorf("%v: %v, want %v", c.gain, got, c.want)
		}
	}
}

// TestBound: where it can be told without a program.
func TestBound(t *testing.T) {
	w := like(Split{Whole: 1}).Worker
	most := max(w.Engine.StepTokens, w.Engine.PrefillTokens)
	full := (perStep + time.Duration(most)*perToken).Seconds()
	shared := every(0, 50, 1024, 1)
	for i := range shared {
		shared[i].Prompt.blocks = []uint64{1, uint64(2 + i)}
	}
	free := math.Floor(float64(w.Blocks*w.BlockTokens) / (1 + 1001./2)) // sequences
	for _, c := range []struct {
		name    string
		load    []Request
		promise Promise
		want    float64
	}{
		{"prompts alone", every(0, 10, 100, 1), Promise{Share: 1}, 3 * float64(most) / full / 100},
		{"of which a tenth may be lost", every(0, 10, 100, 1), Promise{Share: 0.9}, 3 * float64(most) / full / 100 / 0.9},
		{"half of which is the same", shared, Promise{Share: 1}, 3 * float64(most) / full / (512 + 512./50)},
		{"answers, mostly", every(0, 10, 1, 1001), Promise{Share: 1}, 3 * free / (1000*perStep.Seconds() + free*perToken.Seconds())},
		{"gaps that no step keeps", every(0, 10, 1, 1001), Promise{Share: 1, SLO: record.SLO{TPOT: perStep - 1}}, 0},
		{"each of them", every(0, 10, 1, 1001), Promise{Share: 1, SLO: record.SLO{ITL: perStep - 1}}, 0},
		{"nothing", nil, Promise{Share: 1}, 0},
	} {
		if got := Bound(&w, 3, c.load, c.promise); math.Abs(got-c.want) > 0.01*c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

// TestBoundHolds: a little above it no fleet keeps what is promised.
func TestBoundHolds(t *testing.T) {
	const window = 5 * time.Second
	for i, c := range []struct {
		prompt, output int
		slo            record.SLO
	}{
		{800, 1, record.SLO{TTFT: time.Second}},
		{400, 40, record.SLO{TTFT: time.Second, TPOT: 12 * time.Millisecond}},
		{50, 60, record.SLO{TTFT: time.Second, TPOT: 8 * time.Millisecond}},
		{400, 40, record.SLO{TTFT: time.Second, ITL: 9 * time.Millisecond}},
	} {
		promise := Promise{SLO: c.slo, Share: 0.9}
		load := func(rate float64) []Request {
			return every(time.Duration(float64(time.Second)/rate), int(window.Seconds()*rate), c.prompt, c.output)
		}
		for _, s := range []Split{{Whole: 2}, {Prefill: 1, Decode: 1}} {
			cfg := like(s)
			cfg.Worker.Engine.Promise = engine.Promise{TTFT: c.slo.TTFT, TPOT: c.slo.TPOT, ITL: c.slo.ITL}
			bound := Bound(&cfg.Worker, 2, load(1), promise)
			kept := func(rate float64) float64 {
				out, n := play(t, cfg, Load{Requests: load(rate)}), 0
				for i := range out {
					if promise.Kept(&out[i]) {
						n++
					}
				}
				return float64(n) / float64(len(out))
			}
			above := 1.02 * (window + c.slo.TTFT).Seconds() / window.Seconds() // what comes last may wait beyond the end
			if got := kept(above * bound); got >= promise.Share {
				t.Errorf("%d, %v: %v of the requests are good at %v a second, the bound is %v", i, s, got, above*bound, bound)
			}
		}
	}
}

// TestBoundLeavesOut: of requests that need not be good those count as left out that cost most.
func TestBoundLeavesOut(t *testing.T) {
	w := like(Split{}).Worker
	few, many := every(time.Second, 100, 100, 10), every(time.Second, 90, 100, 10)
	for i := range few {
		if i%10 == 0 {
			few[i].Prompt.tokens, few[i].Output = 1000, 50
		}
	}
	got, want := Bound(&w, 1, few, Promise{Share: 0.9}), Bound(&w, 1, many, Promise{Share: 1})/0.9
	if math.Abs(got/want-1) > 1e-9 {
		t.Errorf("%v, without what costs most %v", got, want)
	}
	if all := Bound(&w, 1, few, Promise{Share: 1}); all > got/2 {
		t.Errorf("%v of all, %v without what costs most", all, got)
	}
}
