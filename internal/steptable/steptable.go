// Package steptable predicts how long a step takes on a device from steps that were timed there
// (`xpyd bench step`), and keeps what was timed as a file.
//
// A step is pieces of prompts and sequences that decode. What it takes is the sum of four parts, as
// the device does them; each is interpolated between measured points, so that a measured step gets
// the time that was measured:
//
//   - dense(T): the projections of all T tokens, weights read once. From pieces at position 0, less
//     their attention. A GPU computes whole tiles of tokens, a CPU as many rows as its kernel has
//     registers for: points on both sides of such an edge keep the step in it.
//   - attention of a piece of n tokens after p others: n times the cost of a token, which grows with
//     p+n/2. From pieces at several positions.
//   - draws: logits and the choice of a token, by how many draws there are. From decode steps with
//     and without draws.
//   - the rest of b decodes with a mean context c: reads of KV, and what a sequence costs by itself.
//     From decode steps over batch and context, less dense and draws.
//
// The split into work by tokens, attention of prefill and attention of decodes is Vidur's (arXiv
// 2405.05465, section 4), measured in whole steps of the backend instead of single kernels. That the
// parts add up is an assumption: HeldOut is how far off it was for random mixed steps, from which
// nothing was derived.
//
// No step gets shorter by a later position, a longer context, another draw or another piece: what noise
// says otherwise is averaged. Beyond the measured sizes it goes on as over the last half of them.
//
// It knows no backend and no engine; internal/stepbench measures.
package steptable

import (
	"slices"
	"time"
)

// Version is that of the file. Read takes no other.
const Version = 1

// Table is what was measured. Fit makes it ready for Step; Read has done so.
type Table struct {
	Version int   `json:"version"`
	About   About `json:"about"`
	// Prefill are steps of one piece that draws nothing, Decode steps in which each sequence draws
	// a token, Undrawn the same without draws.
	Prefill []Prefill `json:"prefill"`
	Decode  []Decode  `json:"decode"`
	Undrawn []Decode  `json:"undrawn,omitempty"`
	KV      KV        `json:"kv"`
	HeldOut HeldOut   `json:"held_out"`

	fit fit
}

// About says what was measured, on what and how.
type About struct {
	Device      string `json:"device"`
	Backend     string `json:"backend"`
	Numerics    string `json:"numerics"`
	SIMD        string `json:"simd,omitempty"`
	Threads     int    `json:"threads,omitempty"`
	Ranks       int    `json:"tensor_parallel,omitempty"` // of a worker, with a device each; 0 is 1
	Model       string `json:"model"`
	Shape       Shape  `json:"shape"`
	Layout      string `json:"layout"` // of KV
	BlockTokens int    `json:"block_tokens"`
	Blocks      int    `json:"blocks"`
	MaxBatch    int    `json:"max_batch"`   // sequences a step, as far as measured
	StepTokens  int    `json:"step_tokens"` // tokens a step, as far as measured
	MaxContext  int    `json:"max_context"`
	Build       string `json:"build"`
	Command     string `json:"command"`
	Date        string `json:"date"` // RFC 3339
}

// Shape is a model's size.
type Shape struct {
	Type         string `json:"type"`
	Layers       int    `json:"layers"`
	Hidden       int    `json:"hidden"`
	Intermediate int    `json:"intermediate"`
	Heads        int    `json:"heads"`
	KVHeads      int    `json:"kv_heads"`
	HeadDim      int    `json:"head_dim"`
	Vocab        int    `json:"vocab"`
}

// Time is what runs of one step took: their median, and as Spread their median absolute deviation,
// scaled to be the standard deviation of a normal distribution. Odd runs move neither.
type Time struct {
	Seconds float64 `json:"seconds"`
	Spread  float64 `json:"spread"`
	Runs    int     `json:"runs"`
}

// Prefill is a step of one piece of a prompt.
type Prefill struct {
	Tokens   int `json:"tokens"`
	Position int `json:"position"` // of its first token
	Time
}

// Decode is a step of Batch sequences that decode; Context is the positions that each one's token
// sees, its own among them.
type Decode struct {
	Batch   int `json:"batch"`
	Context int `json:"context"`
	Time
}

// KV is what it takes to move a prompt's KV to another worker.
type KV struct {
	BytesPerToken int     `json:"bytes_per_token"`
	Bandwidth     float64 `json:"bandwidth"` // bytes a second; 0: not known
	Latency       float64 `json:"latency"`   // seconds that a transfer takes beyond its bytes
	How           string  `json:"how,omitempty"`
}

// Transfer is how long the KV of so many tokens takes; without a bandwidth, its latency.
func (k KV) Transfer(tokens int) time.Duration {
	s := k.Latency
	if k.Bandwidth > 0 {
		s += float64(tokens) * float64(k.BytesPerToken) / k.Bandwidth
	}
	return duration(s)
}

// HeldOut says how far off the table was for random steps that it was not made from: the parts of
// their measured times by which the predicted ones differed.
type HeldOut struct {
	Steps  int     `json:"steps"`
	Median float64 `json:"median_error"`
	P90    float64 `json:"p90_error"`
	Worst  float64 `json:"worst_error"`
	Bias   float64 `json:"bias"` // median of the signed errors; above 0: predicted too long
}

// Bad reports whether the table misses steps by so much that it is of little use: something disturbed the measurement, or it was too short.
func (h *HeldOut) Bad() bool {
	const median, p90 = 0.1, 0.3
	return h.Steps > 0 && (h.Median > median || h.P90 > p90)
}

// Load is a step.
type Load struct {
	Pieces  []Piece
	Decodes int // sequences that decode, a draw each
	Context int // the positions that they see, summed
}

// Piece is Tokens of a prompt after Position others, and how many tokens are drawn after it: none
// after an inner piece.
type Piece struct{ Tokens, Position, Draws int }

// Step predicts a step's time, as a mean without odd runs, and the spread of such times: see Time. It
// may be called from several goroutines, and allocates nothing.
func (t *Table) Step(l Load) (mean, spread time.Duration) {
	s := t.fit.seconds(&l)
	return duration(s), duration(s * t.fit.noise.within(s))
}

// Spread is the median over the measured steps of their spreads, each as a part of its time.
func (t *Table) Spread() float64 {
	all := t.times()
	parts := make([]float64, len(all))
	for i, m := range all {
		parts[i] = m.Spread / m.Seconds
	}
	return median(parts)
}

// times are those of all measured steps.
func (t *Table) times() (all []Time) {
	for _, p := range t.Prefill {
		all = append(all, p.Time)
	}
	for _, d := range slices.Concat(t.Decode, t.Undrawn) {
		all = append(all, d.Time)
	}
	return all
}

func median(v []float64) float64 {
	slices.Sort(v)
	return v[len(v)/2]
}

func duration(seconds float64) time.Duration {
	return time.Duration(min(seconds, 1e9)*1e9 + 0.5)
}
