package engine

import "time"

const (
	firstChunk   = 128 // tokens, before anything was measured
	leastChunk   = 16  // tokens, however slow
	paceMemory   = 0.7 // weight of the past in the moving average
	leastMeasure = 16  // tokens; a smaller step says little
	tile         = 128 // tokens that a GPU's projections compute at once
	wholeTiles   = 512 // tokens of a step from which on it ends with a tile
)

// pacer measures how fast steps compute tokens, to size prefill chunks.
type pacer struct {
	rate float64 // tokens a second; 0 when not measured
}

// budget is how many prefill tokens fit into a step beside its decodes: within the step's total
// tokens and, at the measured rate, within target.
func (p *pacer) budget(total int, target time.Duration, decodes int) int {
	n := total
	if target > 0 {
		timed := firstChunk
		if p.rate > 0 {
			timed = int(min(p.rate*target.Seconds(), 1<<30))
		}
		n = min(n, timed)
	}
	if n >= wholeTiles {
		n -= n % tile
	}
	return max(n-decodes, min(leastChunk, total))
}

// step records a step that carried prefill.
func (p *pacer) step(took time.Duration, members []member) {
	prefill, total := 0, 0
	for _, m := range members {
		total += m.chunk
		if m.chunk > 1 {
			prefill += m.chunk
		}
	}
	if prefill > 0 {
		p.observe(total, took)
	}
}

// observe records a step with a prefill chunk.
func (p *pacer) observe(tokens int, took time.Duration) {
	if tokens < leastMeasure || took <= 0 {
		return
	}
	rate := float64(tokens) / took.Seconds()
	if p.rate > 0 {
		rate = paceMemory*p.rate + (1-paceMemory)*rate
	}
	p.rate = rate
}
