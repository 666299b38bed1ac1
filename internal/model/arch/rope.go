package kernels

import (
	"fmt"
	"math"
)

// RopeFrequencies returns the rotary frequencies, HeadDim/2 of them in
// radians a position, and the factor on cos and sin. The formulas are those
// of Hugging Face transformers' ROPE_INIT_FUNCTIONS, in float64.
func (a Arch) RopeFrequencies() (freq []float64, scale float64, err error) {
	half := a.HeadDim / 2
	freq = make([]float64, half)
	for i := range freq {
		freq[i] = math.Pow(a.RopeTheta, -float64(2*i)/float64(a.HeadDim))
	}
	scale = 1
	r := a.Rope
	if r.Kind != "" && !(r.Factor > 0) {
		return nil, 0, fmt.Errorf("rope %s: factor %v", r.Kind, r.Factor)
	}
	switch r.Kind {
	case "":
	case "linear":
		for i := range freq {
			freq[i] /= r.Factor
		}
	case "llama3":
		if r.OriginalMaxPos <= 0 || r.LowFreqFactor <= 0 || r.HighFreqFactor <= r.LowFreqFactor {
			return nil, 0, fmt.Errorf("rope llama3: original length %d, frequency factors %v to %v", r.OriginalMaxPos, r.LowFreqFactor, r.HighFreqFactor)
		}
		orig := float64(r.OriginalMaxPos)
		for i, f := range freq {
			wavelen := 2 * math.Pi / f
			switch {
			case wavelen > orig/r.LowFreqFactor:
				freq[i] = f / r.Factor
			case wavelen >= orig/r.HighFreqFactor:
				s := (orig/wavelen - r.LowFreqFactor) / (r.HighFreqFactor - r.LowFreqFactor)
				freq[i] = (1-s)*f/r.Factor + s*f
			}
		}
	case "yarn":
		if r.OriginalMaxPos <= 0 {
			return nil, 0, fmt.Errorf("rope yarn: original length %d", r.OriginalMaxPos)
		}
		scale = yarn(a, freq)
	default:
		return nil, 0, fmt.Errorf("rope: unknown scaling %q", r.Kind)
	}
	if f := a.RopeFreqFactors; f != nil {
		if len(f) != half {
			return nil, 0, fmt.Errorf("rope: %d frequency factors, want %d", len(f), half)
		}
		for i := range freq {
			freq[i] /= float64(f[i])
		}
	}
	return freq, scale, nil
}

// yarn blends interpolated and original frequencies in place and returns the
// attention factor (Peng et al., "YaRN", 2023).
func yarn(a Arch, freq []float64) float64 {
	r := a.Rope
	mscale := func(m float64) float64 {
		if r.Factor <= 1 {
			return 1
		}
		return 0.1*m*math.Log(r.Factor) + 1
	}
	scale := r.AttentionFactor
	switch {
	case scale != 0:
	case r.MScale != 0 && r.MScaleAllDim != 0:
		scale = mscale(r.MScale) / mscale(r.MScaleAllDim)
	default:
		scale = mscale(1)
	}
	fast, slow := r.BetaFast, r.BetaSlow
	if fast == 0 {
		fast = 32
	}
	if slow == 0 {
		slow = 1
	}
	dim := float64(a.HeadDim)
	correction := func(rotations float64) float64 {
		return dim * math.Log(float64(r.OriginalMaxPos)/(rotations*2*math.Pi)) / (2 * math.Log(a.RopeTheta))
	}
	low, high := correction(fast), correction(slow)
	if !r.NoTruncate {
		low, high = math.Floor(low), math.Ceil(high)
	}
	low, high = max(low, 0), min(high, dim-1)
	if low == high {
		high += 0.001
	}
	for i, f := range freq {
		ramp := min(max((float64(i)-low)/(high-low), 0), 1)
		freq[i] = f/r.Factor*ramp + f*(1-ramp)
	}
	return scale
}
