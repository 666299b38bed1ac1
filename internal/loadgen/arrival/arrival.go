// Package arrival makes the times at which an open loop sends its requests.
package arrival

import (
	"fmt"
	"math"
	"math/rand/v2"
	"time"
)

// Config is an arrival process.
type Config struct {
	Rate float64 // mean requests/s after the ramp
	// Burstiness is the shape of the gamma distribution of gaps, whose mean is 1/Rate: 1 is a
	// Poisson process, less is burstier, more is more even, +Inf is at fixed times. The
	// coefficient of variation is 1/√Burstiness.
	Burstiness float64
	// Ramp is how long the rate grows linearly from 0 to Rate.
	Ramp time.Duration
}

// leastBurstiness is where a thousand requests come at once, about.
const leastBurstiness = 0.001

// Validate refuses what New cannot work with.
func (c *Config) Validate() error {
	switch {
	case !(c.Rate > 0) || math.IsInf(c.Rate, 1):
		return fmt.Errorf("rate %v is not positive", c.Rate)
	case !(c.Burstiness >= leastBurstiness):
		return fmt.Errorf("burstiness %v is less than %v", c.Burstiness, leastBurstiness)
	case c.Ramp < 0:
		return fmt.Errorf("ramp %v is negative", c.Ramp)
	}
	return nil
}

// Process is a sequence of arrivals, the same for the same seed.
type Process struct {
	cfg Config
	rng *rand.Rand
	sum float64 // time in the process of rate 1
}

// New starts a process. cfg is valid.
func New(cfg Config, seed uint64) *Process {
	return &Process{cfg: cfg, rng: rand.New(rand.NewPCG(seed, 0x61727269))}
}

// Next is when the next request is due, from the start of the process. Gaps are drawn for
// rate 1 and stretched, so that a ramp keeps the process's character: with Λ(t) the integral
// of the rate, an arrival at u of the unit process is due at Λ⁻¹(u).
func (p *Process) Next() time.Duration {
	p.sum += p.gap()
	return time.Duration(p.cfg.inverse(p.sum) * float64(time.Second))
}

// inverse is Λ⁻¹, in seconds.
func (c *Config) inverse(u float64) float64 {
	ramp := c.Ramp.Seconds()
	during := c.Rate * ramp / 2 // arrivals expected in the ramp
	if u < during {
		return math.Sqrt(2 * u * ramp / c.Rate)
	}
	return ramp + (u-during)/c.Rate
}

// gap is a time between arrivals of the unit process.
func (p *Process) gap() float64 {
	switch k := p.cfg.Burstiness; {
	case math.IsInf(k, 1):
		return 1
	case k == 1:
		return p.rng.ExpFloat64()
	default:
		return gamma(p.rng, k) / k
	}
}

// gamma draws from the gamma distribution of shape k and scale 1, by Marsaglia
// and Tsang, "A simple method for generating gamma variables" (2000).
func gamma(rng *rand.Rand, k float64) float64 {
	if k < 1 {
		// 1-u is in (0,1], so that the power is finite.
		return gamma(rng, k+1) * math.Pow(1-rng.Float64(), 1/k)
	}
	d := k - 1.0/3
	c := 1 / math.Sqrt(9*d)
	for {
		x := rng.NormFloat64()
		v := 1 + c*x
		if v <= 0 {
			continue
		}
		v = v * v * v
		if math.Log(1-rng.Float64()) < x*x/2+d-d*v+d*math.Log(v) {
			return d * v
		}
	}
}
