// Package report shows a benchmark's figures: as JSON of a stable schema, as
// text, as one HTML page, and as progress while it runs.
package report

import (
	"encoding/json"
	"io"
	"time"

	"github.com/xpyd/xpyd/internal/loadgen/record"
)

// Schema names the JSON form. New fields may come under the same name; old ones keep their
// meaning and unit.
const Schema = "xpyd.bench/1"

// Report is a whole benchmark. Every time is in milliseconds (_ms) or seconds
// (_s), every rate is per second.
type Report struct {
	Schema  string    `json:"schema"`
	Version string    `json:"version"` // of xpyd
	Started time.Time `json:"started"`
	Command []string  `json:"command"`
	Target  Target    `json:"target"`
	Load    Workload  `json:"workload"`
	SLO     *SLO      `json:"slo,omitempty"`
	// Phases are in the order in which they ran. A warm-up is not measured.
	Phases []Phase `json:"phases"`
	// Notes are what a reader of the figures should know.
	Notes []string `json:"notes"`
}

// Target is the servers under load.
type Target struct {
	URLs     []string `json:"urls"`
	Endpoint string   `json:"endpoint"` // chat/completions or completions
	Model    string   `json:"model"`
	Stream   bool     `json:"stream"`
}

// Workload is what was sent. Lengths are as they were asked for.
type Workload struct {
	Kind          string  `json:"kind"` // synthetic, trace, multiturn, multiturn trace or prompts
	Seed          uint64  `json:"seed"`
	Input         string  `json:"input,omitempty"`  // distribution of tokens
	Output        string  `json:"output,omitempty"` // distribution of tokens
	Prefix        int     `json:"prefix_tokens,omitempty"`
	Groups        int     `json:"prefix_groups,omitempty"`
	Share         float64 `json:"prefix_share,omitempty"`
	File          string  `json:"file,omitempty"`
	Speed         float64 `json:"speed,omitempty"`        // of a trace
	BlockTokens   int     `json:"block_tokens,omitempty"` // of a trace, if it was scaled
	Turns         string  `json:"turns,omitempty"`
	Think         string  `json:"think,omitempty"`
	WorkingSet    int     `json:"working_set,omitempty"` // conversations open at once
	TokensPerWord float64 `json:"tokens_per_word,omitempty"`
}

// SLO is the limits that make a request good; absent ones are no limit.
type SLO struct {
	TTFT float64 `json:"ttft_ms,omitempty"`
	TPOT float64 `json:"tpot_ms,omitempty"`
	ITL  float64 `json:"itl_ms,omitempty"` // of the longest gap
	E2E  float64 `json:"e2e_ms,omitempty"`
}

// Phase is the figures of one stretch of load.
type Phase struct {
	Name     string `json:"name"`
	Measured bool   `json:"measured"`
	// Mode is closed (Concurrency requests in flight) or open (RateAsked
	// requests a second, or a trace's times).
	Mode        string  `json:"mode"`
	Concurrency int     `json:"concurrency"` // in an open loop: the most in flight
	RateAsked   float64 `json:"rate_asked,omitempty"`
	Arrival     string  `json:"arrival,omitempty"` // fixed, poisson, gamma or trace
	Burstiness  float64 `json:"burstiness,omitempty"`
	Ramp        float64 `json:"ramp_s,omitempty"`
	// Window is from the first measured request's start to the last one's end;
	// rates are over it.
	Window     float64         `json:"window_s"`
	Requests   record.Requests `json:"requests"`
	Errors     []record.Error  `json:"errors"`
	Throughput Throughput      `json:"throughput"`
	Tokens     Tokens          `json:"tokens"`
	Latency    Latency         `json:"latency"`
	Goodput    *Goodput        `json:"goodput,omitempty"`
	Turns      []Turn          `json:"turns,omitempty"`
	Timeline   Timeline        `json:"timeline"`
	// Sample is random requests, a row each, in the order of Columns.
	Columns []string     `json:"sample_columns"`
	Sample  [][8]float64 `json:"sample"`
}

// Throughput is rates of whole answers.
type Throughput struct {
	Requests     float64 `json:"requests_per_s"`
	InputTokens  float64 `json:"input_tokens_per_s"`
	OutputTokens float64 `json:"output_tokens_per_s"`
	TotalTokens  float64 `json:"total_tokens_per_s"`
}

// Tokens counts the tokens of whole answers.
type Tokens struct {
	Input  Values `json:"input"`  // of a prompt
	Output Values `json:"output"` // of an answer
	Asked  Values `json:"input_asked"`
	Cached int    `json:"cached"` // of the prompts' tokens, as the server reports
	// FromUsage is the number of answers whose tokens the server counted. FromChunks is that
	// of the others: their events are counted, and their prompts' length is assumed.
	FromUsage  int `json:"from_usage"`
	FromChunks int `json:"from_chunks"`
}

// Latency is times, each from the request's start unless it says otherwise.
type Latency struct {
	TTFT Values `json:"ttft_ms"` // to the first text
	ITL  Values `json:"itl_ms"`  // between events with text, all gaps of all requests
	TPOT Values `json:"tpot_ms"` // (E2E − TTFT) / (output tokens − 1)
	E2E  Values `json:"e2e_ms"`  // to the last text
	// Of an open loop, from the scheduled time.
	SchedTTFT *Values `json:"scheduled_ttft_ms,omitempty"`
	SchedE2E  *Values `json:"scheduled_e2e_ms,omitempty"`
	Late      *Values `json:"late_ms,omitempty"`    // from the scheduled time to the start
	Connect   *Values `json:"connect_ms,omitempty"` // of requests that opened a connection; part of TTFT
}

// Values is a distribution. Percentiles are by nearest rank, within 0.2 %; all else is exact.
type Values struct {
	Count  uint64  `json:"count"`
	Mean   float64 `json:"mean"`
	StdDev float64 `json:"stddev"`
	Min    float64 `json:"min"`
	P50    float64 `json:"p50"`
	P90    float64 `json:"p90"`
	P95    float64 `json:"p95"`
	P99    float64 `json:"p99"`
	Max    float64 `json:"max"`
	// Bins are counts in bins of equal width from From to To (p99.5); the last also counts
	// what is above.
	From float64   `json:"bins_from"`
	To   float64   `json:"bins_to"`
	Bins []float64 `json:"bins,omitempty"`
}

// Goodput is the requests that kept the SLO. Failed ones did not.
type Goodput struct {
	Requests int     `json:"requests"`
	Fraction float64 `json:"fraction"` // of those that completed or failed
	Rate     float64 `json:"requests_per_s"`
}

// Turn is the requests of one turn of the conversations; the last row has all later turns.
type Turn struct {
	Turn           int     `json:"turn"`
	TTFT           Values  `json:"ttft_ms"`
	E2E            Values  `json:"e2e_ms"`
	MeanInput      float64 `json:"mean_input_tokens"`
	CachedFraction float64 `json:"cached_fraction"`
}

// Timeline is what happened when; each list has one number per bin.
type Timeline struct {
	Bin          float64   `json:"bin_s"`
	Started      []int     `json:"started"`
	Completed    []int     `json:"completed"`
	Failed       []int     `json:"failed"`
	InFlight     []int     `json:"in_flight"` // at the bin's end
	OutputTokens []float64 `json:"output_tokens"`
}

// WriteJSON writes r in one line.
func (r *Report) WriteJSON(w io.Writer) error { return json.NewEncoder(w).Encode(r) }

const ms = float64(time.Millisecond)

// NewSLO converts s; nil without a limit.
func NewSLO(s record.SLO) *SLO {
	if !s.Any() {
		return nil
	}
	return &SLO{TTFT: float64(s.TTFT) / ms, TPOT: float64(s.TPOT) / ms, ITL: float64(s.ITL) / ms, E2E: float64(s.E2E) / ms}
}
