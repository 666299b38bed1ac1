package engine

import (
	"slices"
	"sync"
	"time"
)

// StepRecord is one step, for /debug/steps: where its time went, on the host and on the device.
type StepRecord struct {
	Began    time.Time     `json:"began"` // its launch, or the end of the step before it if that was later
	Seqs     int           `json:"seqs"`
	Tokens   int           `json:"tokens"`
	Layers   bool          `json:"layers"`    // somebody heard of each layer: a push
	Arrivals int           `json:"arrivals"`  // prefixes that came while it computed
	Launch   time.Duration `json:"launch_ns"` // describing and launching it
	Wait     time.Duration `json:"wait_ns"`   // in Await, OnLayer included
	Took     time.Duration `json:"took_ns"`   // from Began to its results
	// Of the device, microseconds: the step itself, and how long it idled before it.
	// 0 where the backend does not say.
	Device float64 `json:"device_us"`
	Idle   float64 `json:"idle_us"`
}

// stepTimer is a backend that knows how long the device took for the step awaited
// last (kernels/cuda).
type stepTimer interface {
	LastStepTime() (step, idle float64, err error)
}

// timed reports whether the backend is one, and so a device that computes by itself.
func (e *Engine) timed() bool {
	_, ok := e.backend.(stepTimer)
	return ok
}

// traced is how many steps are remembered.
const traced = 256

// trace is the newest records, oldest first from next on once it is full.
type trace struct {
	mu   sync.Mutex
	ring []StepRecord
	next int
}

func (t *trace) add(r StepRecord) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.ring) < traced {
		t.ring = append(t.ring, r)
		return
	}
	t.ring[t.next] = r
	t.next = (t.next + 1) % traced
}

func (t *trace) list() []StepRecord {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Concat(t.ring[t.next:], t.ring[:t.next])
}

// Steps are the newest steps that carried a piece of a prompt, oldest first, and
// then the newest that only decoded.
func (e *Engine) Steps() []StepRecord { return append(e.prompts.list(), e.decodes.list()...) }

// note records a step that has been settled. It returns how long the device took, 0 if the
// backend does not say.
func (e *Engine) note(f *flight, wait, took time.Duration) time.Duration {
	r := StepRecord{Began: f.began, Seqs: len(f.members), Layers: f.step.OnLayer != nil, Arrivals: len(f.step.Arrivals), Launch: f.launch, Wait: wait, Took: took}
	longest := 0
	for _, m := range f.members {
		r.Tokens += m.chunk + m.drafts
		longest = max(longest, m.chunk)
	}
	if t, ok := e.backend.(stepTimer); ok {
		r.Device, r.Idle, _ = t.LastStepTime() // only a figure: 0 says that there is none
	}
	if longest < leastChunk {
		e.decodes.add(r)
	} else {
		e.prompts.add(r)
	}
	return time.Duration(r.Device * float64(time.Microsecond))
}
