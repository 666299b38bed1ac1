package sim

import (
	"math/rand/v2"
	"time"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/internal/steptable"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvlayout"
)

// Steps says how long a device takes for a step: a steptable.Table.
type Steps interface {
	Step(steptable.Load) (mean, spread time.Duration)
}

// Timer draws how long steps take. It is for one goroutine.
type Timer struct {
	Steps  Steps
	Noise  *rand.Rand // nil: all take their mean
	pieces []steptable.Piece
}

// Takes draws a time for a step.
func (t *Timer) Takes(s *kernels.Step) time.Duration {
	load := steptable.Load{Pieces: t.pieces[:0]}
	for i := range s.Seqs {
		q := &s.Seqs[i]
		if n := len(q.Tokens); n == 1 && len(q.Samples) == 1 {
			load.Decodes++
			load.Context += q.Pos + 1
		} else {
			load.Pieces = append(load.Pieces, steptable.Piece{Tokens: n, Position: q.Pos, Draws: len(q.Samples)})
		}
	}
	t.pieces = load.Pieces
	mean, spread := t.Steps.Step(load)
	if t.Noise == nil {
		return mean
	}
	// Nothing is faster than half of what is usual.
	return max(mean/2, mean+time.Duration(t.Noise.NormFloat64()*float64(spread)))
}

// Slowed are steps that take so many times as long.
type Slowed struct {
	Steps
	Times float64
}

// Step implements Steps.
func (s Slowed) Step(l steptable.Load) (mean, spread time.Duration) {
	mean, spread = s.Steps.Step(l)
	return time.Duration(float64(mean) * s.Times), time.Duration(float64(spread) * s.Times)
}

// device is a kernels.Launcher that computes nothing: a step takes the time that Steps says, and
// draws some token. Steps run one after the other.
type device struct {
	clock  *clock
	timer  Timer
	shape  arch.Config
	layout kvlayout.Layout
	blocks int

	under []running // oldest first
	free  time.Duration
	last  running // awaited last

	shared  *shared // nil: its steps run one after the other, whatever others do
	ended   int     // of those under way, in turns
	waiting func()  // for the end of the oldest

	results []kernels.Result
	drawn   []kernels.Sampled
}

// running is a step under way.
type running struct {
	step                   *kernels.Step
	begins, ends, idleFrom time.Duration
	left                   time.Duration // of what it takes alone, in turns
}

// token is what is drawn: nothing ends an answer but its length.
const token = 1

func (d *device) Info() kernels.Info {
	return kernels.Info{Name: "sim", Numerics: "sim", Device: "modelled"}
}
func (d *device) Arch() arch.Config       { return d.shape }
func (d *device) Layout() kvlayout.Layout { return d.layout }
func (d *device) Blocks() int             { return d.blocks }
func (d *device) Close() error            { return nil }

// Launch implements kernels.Launcher.
func (d *device) Launch(s *kernels.Step) error {
	if d.shared != nil {
		d.shared.launch(d, s)
		return nil
	}
	r := running{step: s, begins: max(d.clock.now, d.free), idleFrom: d.free}
	r.ends = r.begins + d.timer.Takes(s)
	d.free = r.ends
	d.under = append(d.under, r)
	return nil
}

// landed runs do when the oldest step under way has ended.
func (d *device) landed(do func()) {
	switch {
	case d.shared == nil:
		d.clock.after(d.under[0].ends-d.clock.now, do)
	case d.ended > 0:
		d.clock.after(0, do)
	default:
		d.waiting = do
	}
}

// Await implements kernels.Launcher. The step has ended by the clock.
func (d *device) Await() ([]kernels.Result, error) {
	d.last = d.under[0]
	d.under = append(d.under[:0], d.under[1:]...)
	d.ended = max(0, d.ended-1)
	s := d.last.step
	if s.OnLayer != nil {
		for l := range d.shape.Layers {
			s.OnLayer(l)
		}
	}
	d.results, d.drawn = d.results[:0], d.drawn[:0]
	draws := 0
	for i := range s.Seqs {
		draws += len(s.Seqs[i].Samples)
	}
	for range draws {
		d.drawn = append(d.drawn, kernels.Sampled{Token: token})
	}
	at := 0
	for i := range s.Seqs {
		n := len(s.Seqs[i].Samples)
		d.results = append(d.results, kernels.Result{Samples: d.drawn[at : at+n : at+n]})
		at += n
	}
	return d.results, nil
}

// Step implements kernels.Backend. Engines launch.
func (d *device) Step(s *kernels.Step) ([]kernels.Result, error) {
	if err := d.Launch(s); err != nil {
		return nil, err
	}
	return d.Await()
}

// timed is a device that knows how long it took, as a GPU does.
type timed struct{ *device }

// LastStepTime returns what engine.stepTimer wants: microseconds.
func (t timed) LastStepTime() (step, idle float64, err error) {
	us := func(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }
	return us(t.last.ends - t.last.begins), us(t.last.begins - t.last.idleFrom), nil
}

// The pool has no rows.

func (d *device) Gather(int, int32, int, int, []byte)       {}
func (d *device) Scatter(int, int32, int, int, []byte)      {}
func (d *device) Digest(int, int32, []uint64)               {}
func (d *device) SetDigest(int, int32, int, []uint64)       {}
func (d *device) CopyBlock(dst, src int32, firstPos, n int) {}
