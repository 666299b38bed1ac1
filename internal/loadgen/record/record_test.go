package record

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/loadgen/client"
)

// TestHist: quantiles are within half a percent of the exact ones.
func TestHist(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var h Hist
	var all []int64
	for range 20_000 {
		v := int64(math.Exp(rng.NormFloat64()*2 + 12))
		h.Add(v)
		all = append(all, v)
	}
	slices.Sort(all)
	for _, q := range []float64{0.001, 0.5, 0.9, 0.99, 0.999, 1} {
		want := float64(all[max(0, int(math.Ceil(q*float64(len(all))))-1)])
		if got := h.Quantile(q); math.Abs(got-want) > 0.005*want {
			t.Errorf("quantile %v: %v, want %v", q, got, want)
		}
	}
	if h.Min != all[0] || h.Max != all[len(all)-1] || h.Count != 20_000 {
		t.Errorf("%d %d %d", h.Min, h.Max, h.Count)
	}
	edges, counts := h.Bins(60, 0.995)
	sum := 0.0
	for _, c := range counts {
		sum += c
	}
	if len(edges) != 61 || math.Abs(sum-20_000) > 0.01 {
		t.Errorf("%d edges, %v in bins", len(edges), sum)
	}
}

func TestHistEdges(t *testing.T) {
	for _, v := range []int64{0, 1, 255, 511, 512, 513, 1023, 1024, 1 << 40, math.MaxInt64} {
		i := bucket(v)
		if lower(i) > v || (v < math.MaxInt64/2 && lower(i+1) <= v) {
			t.Errorf("%d is in bucket %d from %d to %d", v, i, lower(i), lower(i+1))
		}
		if i > 0 && bucket(lower(i)-1) != i-1 {
			t.Errorf("bucket before %d's is not %d", v, i-1)
		}
	}
	var none, one Hist
	one.Add(-5)
	if none.Quantile(0.5) != 0 || none.Mean != 0 || one.Quantile(0.5) != 0 || one.Count != 1 {
		t.Error("edges")
	}
	if e, c := none.Bins(10, 0.5); e != nil || c != nil {
		t.Error("bins of nothing")
	}
	if _, c := one.Bins(10, 0.5); c[0] != 1 {
		t.Errorf("bins of one value: %v", c)
	}
	var same Hist
	for range 9 {
		same.Add(123456789)
	}
	if q := same.Quantile(0.9); q != 123456789 || same.StdDev() > 1 {
		t.Errorf("%v %v", q, same.StdDev())
	}
}

// TestTimeline: bins merge in a long run without losing counts.
func TestTimeline(t *testing.T) {
	var l timeline
	for s := range 1000 {
		l.at(time.Duration(s)*time.Second).Started++
		l.tokens(time.Duration(s)*time.Second, time.Duration(s+10)*time.Second, 11)
	}
	if l.width != 3200*time.Millisecond || len(l.bins) != 316 {
		t.Errorf("%d bins of %v", len(l.bins), l.width)
	}
	n, tokens := 0, 0.0
	for _, b := range l.bins {
		n += b.Started
		tokens += b.Tokens
	}
	if n != 1000 || math.Abs(tokens-11000) > 1e-6 {
		t.Errorf("%d started, %v tokens", n, tokens)
	}
}

func TestPhase(t *testing.T) {
	begin := time.Now()
	p := NewPhase(SLO{TTFT: 100 * time.Millisecond, ITL: 20 * time.Millisecond}, begin)
	ms := time.Millisecond
	end := func(o Observation) {
		p.Start(o.Result.Start)
		p.End(&o)
	}
	answer := func(at, ttft time.Duration, gaps ...time.Duration) *client.Result {
		r := &client.Result{Start: begin.Add(at), FirstToken: ttft, LastToken: ttft, Chunks: 1 + len(gaps), Gaps: gaps}
		for _, g := range gaps {
			r.LastToken += g
		}
		r.End = r.LastToken
		return r
	}
	end(Observation{Result: answer(0, 50*ms, 10*ms), Ramp: true})
	end(Observation{Result: answer(1000*ms, 50*ms, 10*ms, 20*ms), In: 9, Turn: 1})                                        // good
	end(Observation{Result: answer(1100*ms, 50*ms, 10*ms, 30*ms), In: 9, Turn: 2})                                        // a gap too long
	end(Observation{Result: answer(1200*ms, 50*ms), Scheduled: begin.Add(1100 * ms), In: 9, Turn: 100})                   // late
	end(Observation{Result: &client.Result{Start: begin.Add(1300 * ms), End: 700 * ms, Kind: "http_503", Message: "no"}}) // failed
	end(Observation{Result: &client.Result{Start: begin.Add(1300 * ms), End: 700 * ms, Kind: "http_503", Message: "x"}})
	end(Observation{Result: &client.Result{Start: begin.Add(1300 * ms), End: 9000 * ms, Kind: client.Cancelled}})
	withUsage := answer(1400*ms, 60*ms, 10*ms)
	withUsage.HasUsage, withUsage.Usage = true, client.Usage{Prompt: 7, Completion: 3, Cached: 4}
	end(Observation{Result: withUsage, In: 9, Turn: 1})

	if now := p.Now(begin.Add(time.Second)); now.InFlight != 0 || now.Started != 8 || now.Done != 5 || now.Failed != 2 {
		t.Errorf("%+v", now)
	}
	s := p.Stats()
	if s.Started != 8 || s.Ramped != 1 || s.Completed != 4 || s.Failed != 2 || s.Cancelled != 1 || s.Good != 2 {
		t.Errorf("started %d, ramp %d, completed %d, failed %d, cancelled %d, good %d", s.Started, s.Ramped, s.Completed, s.Failed, s.Cancelled, s.Good)
	}
	if len(s.Errors) != 1 || s.Errors[0] != (Error{"http_503", 2, "no"}) {
		t.Errorf("%+v", s.Errors)
	}
	if got := s.Last.Sub(s.First); got != time.Second {
		t.Errorf("window %v", got)
	}
	if s.ITL.Count != 5 || s.TTFT.Count != 4 || s.SchedTTFT.Count != 1 || s.SchedTTFT.Max != int64(150*ms) || s.Late.Max != int64(100*ms) {
		t.Errorf("ITL %d, TTFT %d, scheduled %d", s.ITL.Count, s.TTFT.Count, s.SchedTTFT.Count)
	}
	if s.Usage != 1 || s.Counted != 3 || s.In.Sum != 9*3+7 || s.Out.Sum != 3+3+1+3 || s.Cached != 4 {
		t.Errorf("usage %d, counted %d, in %v, out %v", s.Usage, s.Counted, s.In.Sum, s.Out.Sum)
	}
	if len(s.Turns) != maxTurns || s.Turns[0].E2E.Count != 2 || s.Turns[0].Cached != 4 || s.Turns[maxTurns-1].E2E.Count != 1 {
		t.Errorf("%d turns", len(s.Turns))
	}
	if len(s.Points) != 6 {
		t.Errorf("%d points", len(s.Points))
	}
}

// TestSample: the sample is bounded and covers the whole run.
func TestSample(t *testing.T) {
	begin := time.Now()
	p := NewPhase(SLO{}, begin)
	const n = 5 * maxPoints
	for i := range n {
		p.End(&Observation{Result: &client.Result{Start: begin.Add(time.Duration(i))}})
	}
	late := 0
	for _, pt := range p.Stats().Points {
		if pt.Start >= n/2 {
			late++
		}
	}
	if len(p.Stats().Points) != maxPoints || math.Abs(float64(late)/maxPoints-0.5) > 0.05 {
		t.Errorf("%d points, %d of the second half", len(p.Stats().Points), late)
	}
}
