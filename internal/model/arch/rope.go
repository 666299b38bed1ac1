package arch

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math"
)

// RopeScaling is how rotary frequencies are stretched. Its fields and keys
// are those of Hugging Face's rope_scaling; 0 means absent.
type RopeScaling struct {
	Kind            string  `json:"rope_type"` // "", "linear", "llama3" or "yarn"
	Factor          float64 `json:"factor"`
	LowFreqFactor   float64 `json:"low_freq_factor,omitempty"`                  // llama3
	HighFreqFactor  float64 `json:"high_freq_factor,omitempty"`                 // llama3
	OriginalMaxPos  float64 `json:"original_max_position_embeddings,omitempty"` // llama3, yarn; whole
	AttentionFactor float64 `json:"attention_factor,omitempty"`                 // yarn; 0: derived from Factor
	BetaFast        float64 `json:"beta_fast,omitempty"`                        // yarn; 0: 32
	BetaSlow        float64 `json:"beta_slow,omitempty"`                        // yarn; 0: 1
	MScale          float64 `json:"mscale,omitempty"`                           // yarn
	MScaleAllDim    float64 `json:"mscale_all_dim,omitempty"`                   // yarn
	NoTruncate      bool    `json:"-"`                                          // yarn; truncate=false
}

// readRope reads rope_scaling or rope_parameters into c. As in vLLM,
// max_position_embeddings is the length before stretching by linear and yarn, unless the
// file has another.
func readRope(raw json.RawMessage, c *Config) error {
	r := struct {
		RopeScaling
		LegacyType    string  `json:"type"`
		Theta         float64 `json:"rope_theta"`
		PartialRotary float64 `json:"partial_rotary_factor"`
		Truncate      bool    `json:"truncate"`
	}{Theta: c.RopeTheta, PartialRotary: 1, Truncate: true}
	if err := json.Unmarshal(raw, &r); err != nil {
		return err
	}
	c.RopeTheta = r.Theta
	if r.PartialRotary != 1 {
		return fmt.Errorf("partial_rotary_factor %v is not supported", r.PartialRotary)
	}
	s, stretched := r.RopeScaling, 0.0
	s.Kind = cmp.Or(s.Kind, r.LegacyType)
	switch s.Kind {
	case "", "default":
		return nil
	case "linear":
		s = RopeScaling{Kind: s.Kind, Factor: s.Factor}
		stretched = float64(c.MaxPositions) * s.Factor
	case "llama3":
		s = RopeScaling{Kind: s.Kind, Factor: s.Factor, LowFreqFactor: s.LowFreqFactor, HighFreqFactor: s.HighFreqFactor, OriginalMaxPos: math.Floor(s.OriginalMaxPos)}
	case "yarn":
		s.LowFreqFactor, s.HighFreqFactor, s.NoTruncate = 0, 0, !r.Truncate
		if s.OriginalMaxPos == 0 {
			s.OriginalMaxPos = float64(c.MaxPositions)
		}
		s.OriginalMaxPos = math.Floor(s.OriginalMaxPos)
		stretched = s.OriginalMaxPos * s.Factor
	}
	if err := s.validate(); err != nil {
		return err
	}
	c.Rope = s
	c.MaxPositions = max(c.MaxPositions, int(math.Min(stretched, maxPositions)))
	return nil
}

func (r *RopeScaling) validate() error {
	type parameter struct {
		name string
		v    float64
	}
	original := parameter{"original_max_position_embeddings", r.OriginalMaxPos}
	positive := []parameter{{"factor", r.Factor}}
	switch r.Kind {
	case "":
		return nil
	case "linear":
	case "llama3":
		positive = append(positive, parameter{"low_freq_factor", r.LowFreqFactor}, parameter{"high_freq_factor", r.HighFreqFactor}, original)
	case "yarn":
		positive = append(positive, original)
	default:
		return fmt.Errorf("rope scaling of type %.40q is not supported (linear, llama3, yarn are)", r.Kind)
	}
	for _, p := range positive {
		if !(p.v > 0) || math.IsInf(p.v, 0) {
			return fmt.Errorf("rope scaling %s: %s %v is not positive", r.Kind, p.name, p.v)
		}
	}
	for _, v := range []float64{r.AttentionFactor, r.BetaFast, r.BetaSlow, r.MScale, r.MScaleAllDim} {
		if !(v >= 0) || math.IsInf(v, 0) {
			return fmt.Errorf("rope scaling %s: parameter %v is negative", r.Kind, v)
		}
	}
	if r.OriginalMaxPos > maxPositions {
		return fmt.Errorf("rope scaling %s: original_max_position_embeddings %v is above %d", r.Kind, r.OriginalMaxPos, maxPositions)
	}
	if r.Kind == "llama3" && r.HighFreqFactor <= r.LowFreqFactor {
		return fmt.Errorf("rope scaling llama3: high_freq_factor %v is not above low_freq_factor %v", r.HighFreqFactor, r.LowFreqFactor)
	}
	return nil
}

// RopeFrequencies returns the rotary frequencies, Rotated()/2 of them in
// radians a position, and the factor on cos and sin. The formulas are those
// of Hugging Face transformers' ROPE_INIT_FUNCTIONS, in float64.
func (c *Config) RopeFrequencies() (freq []float64, scale float64, err error) {
	r := &c.Rope
	if err := r.validate(); err != nil {
		return nil, 0, err
	}
	dim := c.Rotated()
	if n := len(c.RopeFreqFactors); n != 0 && n != dim/2 {
		return nil, 0, fmt.Errorf("%d rope frequency factors for head dimension %d", n, dim)
	}
	freq = make([]float64, dim/2)
	for i := range freq {
		freq[i] = math.Pow(c.RopeTheta, -float64(2*i)/float64(dim))
	}
	scale = 1
	switch r.Kind {
	case "linear":
		for i := range freq {
			freq[i] /= r.Factor
		}
	case "llama3":
		for i, f := range freq {
			wavelen := 2 * math.Pi / f
			switch {
			case wavelen > r.OriginalMaxPos/r.LowFreqFactor:
				freq[i] = f / r.Factor
			case wavelen >= r.OriginalMaxPos/r.HighFreqFactor:
				s := (r.OriginalMaxPos/wavelen - r.LowFreqFactor) / (r.HighFreqFactor - r.LowFreqFactor)
				freq[i] = (1-s)*f/r.Factor + s*f
			}
		}
	case "yarn":
		scale = c.yarn(freq)
	}
	for i, f := range c.RopeFreqFactors {
		freq[i] /= float64(f)
	}
	return freq, scale, nil
}

// mscale is YaRN's factor of magnitudes, of a weight.
func (r *RopeScaling) mscale(weight float64) float64 {
	if r.Factor <= 1 {
		return 1
	}
	return 0.1*weight*math.Log(r.Factor) + 1
}

// yarn blends interpolated and original frequencies in place and returns the
// attention factor (Peng et al., "YaRN", 2023).
func (c *Config) yarn(freq []float64) float64 {
	r := &c.Rope
	scale := r.AttentionFactor
	switch {
	case scale != 0:
	case r.MScale != 0 && r.MScaleAllDim != 0:
		scale = r.mscale(r.MScale) / r.mscale(r.MScaleAllDim)
	default:
		scale = r.mscale(1)
	}
	fast, slow := cmp.Or(r.BetaFast, 32), cmp.Or(r.BetaSlow, 1)
	dim := float64(c.Rotated())
	correction := func(rotations float64) float64 {
		return dim * math.Log(r.OriginalMaxPos/(rotations*2*math.Pi)) / (2 * math.Log(c.RopeTheta))
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
