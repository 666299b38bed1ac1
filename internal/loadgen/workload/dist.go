package workload

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"
)

// Dist is a distribution of lengths or times, at least 0.
type Dist struct {
	kind string // "", uniform, normal, lognormal, exp
	a, b float64
	text string
}

// ParseLengths reads a distribution of token counts, at least least: 512, 100-200 (uniform),
// normal:MEAN,STDDEV, lognormal:MEDIAN,SIGMA or exp:MEAN.
func ParseLengths(s string, least int) (Dist, error) {
	d, err := parse(s, func(s string) (float64, error) {
		n, err := strconv.ParseUint(s, 10, 24)
		if err != nil {
			err = fmt.Errorf("want whole numbers in 0..%d", maxDraw-1)
		}
		return float64(n), err
	})
	if err == nil && d.a < float64(least) {
		return Dist{}, fmt.Errorf("length %q: want at least %d", s, least)
	}
	return d, err
}

// ParseTimes reads a distribution of times: 2s, 1s-3s, normal:2s,500ms, lognormal:2s,0.5 or
// exp:2s.
func ParseTimes(s string) (Dist, error) {
	return parse(s, func(s string) (float64, error) {
		d, err := time.ParseDuration(s)
		switch {
		case err != nil:
			err = errors.New(`want durations such as "3s" or "250ms"`)
		case d < 0 || d > 24*time.Hour:
			err = fmt.Errorf("%v is not in 0..24h", d)
		}
		return d.Seconds(), err
	})
}

func parse(s string, one func(string) (float64, error)) (Dist, error) {
	d := Dist{text: s}
	kind, rest, given := strings.Cut(s, ":")
	sep := ","
	if !given {
		kind, rest, sep = "", s, "-"
	}
	first, second, two := strings.Cut(rest, sep)
	var err error
	d.a, err = one(first)
	switch d.kind = kind; {
	case err != nil:
	case kind == "" && !two, kind == "exp" && !two:
	case kind == "" && two:
		d.kind = "uniform"
		if d.b, err = one(second); err == nil && d.b < d.a {
			err = fmt.Errorf("%s is more than %s", first, second)
		}
	case kind == "normal" && two:
		d.b, err = one(second)
	case kind == "lognormal" && two:
		if d.b, err = strconv.ParseFloat(second, 64); err != nil || !(d.b >= 0 && d.b <= 10) {
			err = fmt.Errorf("sigma %s is not in 0..10", second)
		}
	default:
		err = fmt.Errorf("%q", kind)
	}
	if err != nil {
		return Dist{}, fmt.Errorf("%q is no distribution (N, A-B, normal:MEAN,STDDEV, lognormal:MEDIAN,SIGMA, exp:MEAN): %w", s, err)
	}
	return d, nil
}

// String is the distribution as it was given.
func (d Dist) String() string { return d.text }

// maxDraw cuts the tails of distributions.
const maxDraw = 1 << 24

// Draw draws a value.
func (d Dist) Draw(rng *rand.Rand) float64 {
	x := d.a
	switch d.kind {
	case "uniform":
		x += rng.Float64() * (d.b - d.a)
	case "normal":
		x += rng.NormFloat64() * d.b
	case "lognormal":
		x *= math.Exp(rng.NormFloat64() * d.b)
	case "exp":
		x *= rng.ExpFloat64()
	}
	return min(max(x, 0), maxDraw)
}

// Tokens draws a whole number, at least least. Uniform bounds are inclusive.
func (d Dist) Tokens(rng *rand.Rand, least int) int {
	if d.kind == "uniform" {
		return max(least, int(d.a)+rng.IntN(int(d.b-d.a)+1))
	}
	return max(least, int(math.Round(d.Draw(rng))))
}

// Time draws a time.
func (d Dist) Time(rng *rand.Rand) time.Duration {
	return time.Duration(d.Draw(rng) * float64(time.Second))
}
