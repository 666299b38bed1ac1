// Package planner decides how many workers of which role a fleet of one model should have: pure
// decisions, without a clock, I/O or goroutines. The router gives it a sample about each second and carries
// out what it decides, or only publishes it; the twin (internal/sim) does the same on a virtual clock.
// It knows no device: what a worker can compute it learns from what workers do. See DESIGN.md.
package planner

import "time"

// Role is what a worker is for, at least mainly.
type Role string

// Whole workers compute prompts and answers; a fleet has either them, or both others.
const (
	Prefill Role = "prefill"
	Decode  Role = "decode"
	Whole   Role = "whole"
)

// State is how far a worker is.
type State int

// A worker that is Draining gets no new requests and ends or changes its role when it is empty.
const (
	Starting State = iota
	Serving
	Draining
)

// Worker is one of the fleet.
type Worker struct {
	ID    string
	Role  Role
	State State
	// Running and Waiting are its sequences now, QueuedTokens those of prompts not yet computed.
	Running, Waiting, QueuedTokens int
	GPUs                           int // 0 counts as 1
}

// Sample is a fleet now, and what has happened since the sample before it.
type Sample struct {
	At time.Time
	// Requests came, with so many PromptTokens that nobody had cached.
	Requests, PromptTokens int
	// Ended requests are over. OutputTokens came of all; the gaps before Gaps of them took Streaming together.
	Ended, OutputTokens int
	Streaming           time.Duration
	Gaps                int
	// Of the Judged requests, Good saw what is promised. 0 of 0: nothing is promised.
	Good, Judged int
	Workers      []Worker
}

// Kind is what a decision does.
type Kind string

// Start starts N workers of Role, Stop drains Worker and ends it, Flip gives Worker, of From, the Role.
const (
	Start Kind = "start"
	Stop  Kind = "stop"
	Flip  Kind = "flip"
)

// Decision is a change of a fleet.
type Decision struct {
	At     time.Time `json:"at"`
	Kind   Kind      `json:"kind"`
	Role   Role      `json:"role"`
	From   Role      `json:"from,omitempty"`
	N      int       `json:"n"`
	Worker string    `json:"worker,omitempty"`
	// Wanted is how many workers of the role there are to be then.
	Wanted    int      `json:"wanted"`
	Reason    string   `json:"reason"`
	Predicted Forecast `json:"predicted"`
	// CameTrue is what was at the time of the prediction, nil before.
	CameTrue *Forecast `json:"came_true,omitempty"`
}

// Forecast is a role's load at some time, predicted or seen.
type Forecast struct {
	At time.Time `json:"at"`
	// Load is in prompt tokens a second; of whole workers a token of an answer counts as four, of decode
	// workers only answers' tokens count.
	Load float64 `json:"load"`
	// Workers that serve, and the part of what they can compute that this takes.
	Workers     int     `json:"workers"`
	Utilisation float64 `json:"utilisation"`
	Queued      int     `json:"queued_tokens"`
}
