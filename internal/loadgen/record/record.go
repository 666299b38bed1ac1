package record

import (
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/xpyd/xpyd/internal/loadgen/client"
)

// SLO is the limits of a good request; 0 is no limit. In an open loop TTFT and E2E count from the
// scheduled time.
type SLO struct {
	TTFT, TPOT, E2E time.Duration
	ITL             time.Duration // of the longest gap
}

// Any reports whether there is a limit.
func (s *SLO) Any() bool { return *s != SLO{} }

// good judges a whole answer.
func (s *SLO) good(res *client.Result, late time.Duration) bool {
	over := func(limit, got time.Duration) bool { return limit > 0 && got > limit }
	tpot, _ := res.TPOT()
	return !over(s.E2E, res.LastToken+late) && !over(s.TTFT, res.FirstToken+late) && !over(s.TPOT, tpot) &&
		!slices.ContainsFunc(res.Gaps, func(gap time.Duration) bool { return over(s.ITL, gap) })
}

// Observation is one request that is over.
type Observation struct {
	Result    *client.Result
	Scheduled time.Time // when an open loop meant to send it; zero in a closed one
	Ramp      bool      // it began in the ramp and counts only in the timeline
	In, Out   int       // tokens asked for
	Turn      int       // of a conversation, 0 without one
}

// Point is one request of the sample.
type Point struct {
	Start, TTFT, E2E, TPOT time.Duration // Start from the phase's beginning
	In, Out, Cached, Turn  int
	Kind                   client.Kind
}

const (
	maxPoints = 4000 // of the sample
	maxTurns  = 64   // later turns count as the last
	maxKinds  = 64   // of errors
)

// Error is one kind of failure.
type Error struct {
	Kind    client.Kind `json:"kind"`
	Count   int         `json:"count"`
	Example string      `json:"example"` // the first one's message
}

// Requests counts requests. Those of the ramp are only in Started and Ramped.
type Requests struct {
	Started   int `json:"started"`
	Ramped    int `json:"ramp"`      // began in the ramp, and are over
	Completed int `json:"completed"` // whole answers
	Failed    int `json:"failed"`
	Cancelled int `json:"cancelled"`        // broken off when the run ended
	Unsent    int `json:"unsent,omitempty"` // open loop: due, but not sent when the run ended; not in Started
	Retried   int `json:"retried"`          // sent again, as the idle connection was closed
}

// Turn is the requests of one turn.
type Turn struct {
	TTFT, E2E  Hist
	In, Cached int // tokens
}

// Stats is a phase's figures. Times are in ns.
type Stats struct {
	Requests
	Good int // within the SLO

	TTFT, ITL, TPOT, E2E Hist
	// From the scheduled time: what a user waits, be the server busy or this client.
	SchedTTFT, SchedE2E Hist
	Late                Hist // from the scheduled time to the start
	Connect             Hist // of requests that opened a connection

	In, Out, Asked Hist // tokens: of prompts, answers, prompts as asked for
	Cached         int  // of the prompts' tokens
	Usage, Counted int  // answers with usage; with counted chunks and prompts of assumed length

	Errors   []Error
	Turns    []Turn // [0] is turn 1
	First    time.Time
	Last     time.Time // the window: first start to last end of counted requests
	BinWidth time.Duration
	Bins     []Bin
	Points   []Point // a uniform sample
}

// Phase gathers a phase's requests. It is safe for concurrent use.
type Phase struct {
	slo   SLO
	begin time.Time

	mu       sync.Mutex
	s        Stats
	line     timeline
	seen     int // requests that the sample was drawn from
	rng      *rand.Rand
	inFlight int
}

// NewPhase begins now.
func NewPhase(slo SLO, begin time.Time) *Phase {
	return &Phase{slo: slo, begin: begin, rng: rand.New(rand.NewPCG(1, 2))}
}

// Start counts a request that goes out.
func (p *Phase) Start(at time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.s.Started++
	p.inFlight++
	p.line.at(at.Sub(p.begin)).Started++
}

// Unsent counts a request that was due and not sent before the end.
func (p *Phase) Unsent() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.s.Unsent++
}

// End counts a finished request. It keeps nothing of o.
func (p *Phase) End(o *Observation) {
	res := o.Result
	start := res.Start.Sub(p.begin)
	p.mu.Lock()
	defer p.mu.Unlock()
	s := &p.s
	p.inFlight--
	bin := p.line.at(start + res.End)
	switch {
	case res.OK():
		bin.Done++
	case res.Kind != client.Cancelled:
		bin.Failed++
	}
	if res.Chunks > 0 {
		p.line.tokens(start+res.FirstToken, start+res.LastToken, res.Tokens())
	}
	if o.Ramp {
		s.Ramped++
		return
	}
	if res.Kind == client.Cancelled {
		s.Cancelled++
		return
	}
	if s.First.IsZero() || res.Start.Before(s.First) {
		s.First = res.Start
	}
	if end := res.Start.Add(res.End); end.After(s.Last) {
		s.Last = end
	}
	if res.Retried {
		s.Retried++
	}
	p.sample(o, start)
	if !res.OK() {
		s.Failed++
		s.fail(res)
		return
	}
	s.add(o, &p.slo)
}

// fail counts a failure by its kind.
func (s *Stats) fail(res *client.Result) {
	for i := range s.Errors {
		if e := &s.Errors[i]; e.Kind == res.Kind || i == maxKinds-1 {
			e.Count++
			return
		}
	}
	s.Errors = append(s.Errors, Error{Kind: res.Kind, Count: 1, Example: res.Message})
}

// add counts a whole answer.
func (s *Stats) add(o *Observation, slo *SLO) {
	res := o.Result
	s.Completed++
	late := time.Duration(0)
	if !o.Scheduled.IsZero() {
		late = max(0, res.Start.Sub(o.Scheduled))
		s.Late.Add(int64(late))
		s.SchedE2E.Add(int64(res.LastToken + late))
	}
	s.E2E.Add(int64(res.LastToken))
	if res.FirstToken > 0 {
		s.TTFT.Add(int64(res.FirstToken))
		if !o.Scheduled.IsZero() {
			s.SchedTTFT.Add(int64(res.FirstToken + late))
		}
	}
	if tpot, ok := res.TPOT(); ok {
		s.TPOT.Add(int64(tpot))
	}
	for _, g := range res.Gaps {
		s.ITL.Add(int64(g))
	}
	if res.Connected > 0 {
		s.Connect.Add(int64(res.Connected))
	}
	in := o.In
	if res.HasUsage {
		s.Usage++
		in = res.Usage.Prompt
	} else {
		s.Counted++
	}
	s.In.Add(int64(in))
	s.Asked.Add(int64(o.In))
	s.Out.Add(int64(res.Tokens()))
	s.Cached += res.Usage.Cached
	if slo.Any() && slo.good(res, late) {
		s.Good++
	}
	if o.Turn > 0 {
		i := min(o.Turn, maxTurns) - 1
		for len(s.Turns) <= i {
			s.Turns = append(s.Turns, Turn{})
		}
		t := &s.Turns[i]
		if res.FirstToken > 0 {
			t.TTFT.Add(int64(res.FirstToken))
		}
		t.E2E.Add(int64(res.LastToken))
		t.In += in
		t.Cached += res.Usage.Cached
	}
}

// sample keeps a uniform sample of the requests (Vitter's algorithm R).
func (p *Phase) sample(o *Observation, start time.Duration) {
	res := o.Result
	tpot, _ := res.TPOT()
	pt := Point{Start: start, TTFT: res.FirstToken, E2E: res.LastToken, TPOT: tpot, In: o.In, Out: res.Tokens(), Cached: res.Usage.Cached, Turn: o.Turn, Kind: res.Kind}
	if res.HasUsage {
		pt.In = res.Usage.Prompt
	}
	if !res.OK() {
		pt.E2E = res.End
	}
	if p.seen++; len(p.s.Points) < maxPoints {
		p.s.Points = append(p.s.Points, pt)
	} else if i := p.rng.IntN(p.seen); i < maxPoints {
		p.s.Points[i] = pt
	}
}

// Stats returns the phase's figures. Call it once, when all requests are over.
func (p *Phase) Stats() *Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.s.BinWidth, p.s.Bins = p.line.width, p.line.bins
	return &p.s
}

// Now is a phase at one moment, for progress.
type Now struct {
	Elapsed                         time.Duration
	Done, Failed, InFlight, Started int
	Tokens                          float64 // of answers that are over
	TTFT, E2E                       float64 // p50 so far, ns
}

// Now returns the phase's present state.
func (p *Phase) Now(at time.Time) Now {
	p.mu.Lock()
	defer p.mu.Unlock()
	return Now{
		Elapsed: at.Sub(p.begin), Done: p.s.Completed + p.s.Ramped, Failed: p.s.Failed, InFlight: p.inFlight, Started: p.s.Started,
		Tokens: p.s.Out.Sum, TTFT: p.s.TTFT.Quantile(0.5), E2E: p.s.E2E.Quantile(0.5),
	}
}
