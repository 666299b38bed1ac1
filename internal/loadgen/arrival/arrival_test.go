package arrival_test

import (
	"math"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/loadgen/arrival"
)

// gaps returns mean and coefficient of variation of n gaps.
func gaps(t *testing.T, cfg arrival.Config, n int) (mean, cv float64) {
	t.Helper()
	if err := cfg.Validate(); err != nil {
		t.Fatal(err)
	}
	p := arrival.New(cfg, 1)
	last, sum, squares := 0.0, 0.0, 0.0
	for range n {
		at := p.Next().Seconds()
		g := at - last
		if last = at; g < 0 {
			t.Fatal("time goes backwards")
		}
		sum += g
		squares += g * g
	}
	mean = sum / float64(n)
	return mean, math.Sqrt(squares/float64(n)-mean*mean) / mean
}

func TestProcesses(t *testing.T) {
	const n = 200_000
	f := func(rate, burstiness float64) {
		t.Helper()
		mean, cv := gaps(t, arrival.Config{Rate: rate, Burstiness: burstiness}, n)
		if math.Abs(mean*rate-1) > 0.02 {
			t.Errorf("rate %v, burstiness %v: mean gap %v", rate, burstiness, mean)
		}
		if want := 1 / math.Sqrt(burstiness); math.Abs(cv-want) > 0.03*want+1e-6 {
			t.Errorf("rate %v, burstiness %v: coefficient of variation %v, want %v", rate, burstiness, cv, want)
		}
	}
	f(10, 1)
	f(1000, 1)
	f(10, 0.25)
	f(10, 0.7)
	f(10, 4)
	f(100, math.Inf(1))
}

func TestRamp(t *testing.T) {
	p := arrival.New(arrival.Config{Rate: 100, Burstiness: math.Inf(1), Ramp: 10 * time.Second}, 1)
	counts := make([]int, 12) // by second
	for {
		at := p.Next()
		if at >= 12*time.Second {
			break
		}
		counts[int(at/time.Second)]++
	}
	for s, n := range counts {
		want := 100.0
		if s < 10 {
			want = 10*float64(s) + 5
		}
		if math.Abs(float64(n)-want) > 1 {
			t.Errorf("second %d: %d arrivals, want %v", s, n, want)
		}
	}
}

// TestSeed: the same seed makes the same times.
func TestSeed(t *testing.T) {
	cfg := arrival.Config{Rate: 5, Burstiness: 0.5, Ramp: time.Second}
	a, b, c := arrival.New(cfg, 7), arrival.New(cfg, 7), arrival.New(cfg, 8)
	differs := false
	for range 100 {
		x := a.Next()
		if x != b.Next() {
			t.Fatal("not the same")
		}
		differs = differs || x != c.Next()
	}
	if !differs {
		t.Error("the seed does not matter")
	}
}

func TestValidate(t *testing.T) {
	for _, c := range []arrival.Config{{}, {Rate: 1}, {Rate: -1, Burstiness: 1}, {Rate: math.NaN(), Burstiness: 1}, {Rate: math.Inf(1), Burstiness: 1}, {Rate: 1, Burstiness: 1, Ramp: -1}} {
		if c.Validate() == nil {
			t.Errorf("%+v was taken", c)
		}
	}
}
