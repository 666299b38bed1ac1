// Package timed is a test tool: a worker's device that computes nothing. A step waits, in real time,
// for as long as a step table says, like a GPU that takes the next step while one runs. Its pool is
// real: rows are written, hashed, pushed and checked, but are few bytes and say only which token
// they are of. No command of the product can open one.
package timed

import (
	"encoding/binary"
	"fmt"
	"time"

	"github.com/xpyd/xpyd/internal/sim"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvlayout"
)

// Pool is a backend whose pool is used, and whose steps are not: the CPU's, of a model of Shape.
type Pool interface {
	kernels.Backend
	kernels.Viewer
	kernels.Sharer
}

// Device is a kernels.Launcher. It may have two steps under way, as engines launch them. Of requests
// it takes what a load sends: no log probabilities, logits or KV on its way.
type Device struct {
	Pool
	about  string
	timer  sim.Timer
	token  int32
	layers []kvlayout.Layer

	under []running // oldest first
	free  time.Time // when the device has done all that it was given
	last  running   // awaited last
	late  Late

	packed  []byte
	sums    []uint64
	results []kernels.Result
	drawn   []kernels.Sampled
}

// running is a step under way.
type running struct {
	step                   *kernels.Step
	begins, ends, idleFrom time.Time
}

// Late is by how much steps were heard of after their end: what the machine adds to the table's times.
type Late struct {
	Steps     int
	Sum, Most time.Duration
}

func (l Late) String() string {
	return fmt.Sprintf("%d steps, heard of %v late in the mean and %v at most", l.Steps, l.Sum/time.Duration(max(l.Steps, 1)), l.Most)
}

// rowBytes are those that say which token a row is of.
const rowBytes = 8

// New makes a device of a pool, whose rows are of Shape. Each draw is the token.
func New(p Pool, about string, timer sim.Timer, token int32) *Device {
	d := &Device{Pool: p, about: about, timer: timer, token: token, layers: p.Layout().Resolve(), free: time.Now()}
	for i := range d.layers {
		l := &d.layers[i]
		d.packed = append(d.packed, make([]byte, max(0, l.BlockBytes()-len(d.packed)))...)
		d.sums = append(d.sums, make([]uint64, max(0, l.Heads-len(d.sums)))...)
	}
	return d
}

// Info implements kernels.Backend. By its name engines and settings treat it as a GPU; by its
// numerics no worker that computes is ever its peer.
func (d *Device) Info() kernels.Info {
	return kernels.Info{Name: "cuda", Numerics: "timed-1", Device: d.about}
}

// Launch implements kernels.Launcher.
func (d *Device) Launch(s *kernels.Step) error {
	begins := time.Now()
	if begins.Before(d.free) {
		begins = d.free
	}
	r := running{step: s, begins: begins, ends: begins.Add(d.timer.Takes(s)), idleFrom: d.free}
	d.free = r.ends
	d.under = append(d.under, r)
	return nil
}

// Await implements kernels.Launcher.
func (d *Device) Await() ([]kernels.Result, error) {
	d.last = d.under[0]
	d.under = append(d.under[:0], d.under[1:]...)
	if left := time.Until(d.last.ends); left > 0 { // else the host was busy
		time.Sleep(left) // it is what the device does
		late := time.Since(d.last.ends)
		d.late.Steps, d.late.Sum, d.late.Most = d.late.Steps+1, d.late.Sum+late, max(d.late.Most, late)
	}
	s := d.last.step
	for i := range s.Seqs {
		if err := d.compute(&s.Seqs[i]); err != nil {
			return nil, &kernels.Error{Call: "step", Err: err}
		}
	}
	if s.OnLayer != nil {
		for l := range d.layers {
			s.OnLayer(l)
		}
	}
	d.draw(s)
	return d.results, nil
}

// Step implements kernels.Backend.
func (d *Device) Step(s *kernels.Step) ([]kernels.Result, error) {
	if err := d.Launch(s); err != nil {
		return nil, err
	}
	return d.Await()
}

// LastStepTime is how long the device took for the last awaited step, and how long it had nothing to do
// before: microseconds.
func (d *Device) LastStepTime() (step, idle float64, err error) {
	us := func(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }
	return us(d.last.ends.Sub(d.last.begins)), us(d.last.begins.Sub(d.last.idleFrom)), nil
}

// Late is of all steps that were awaited before they had ended. It is for when none is under way.
func (d *Device) Late() Late { return d.late }

// draw makes the results.
func (d *Device) draw(s *kernels.Step) {
	d.results, d.drawn = d.results[:0], d.drawn[:0]
	for i := range s.Seqs {
		for range s.Seqs[i].Samples {
			d.drawn = append(d.drawn, kernels.Sampled{Token: d.token})
		}
	}
	at := 0
	for i := range s.Seqs {
		n := at + len(s.Seqs[i].Samples)
		d.results = append(d.results, kernels.Result{Samples: d.drawn[at:n:n]})
		at = n
	}
}

// compute checks that the rows are there that a sequence's part of a step would read, and writes its own.
func (d *Device) compute(q *kernels.Seq) error {
	size := d.Layout().BlockTokens
	for _, pos := range []int{0, q.Pos - 1} { // of all others only that they were pushed is known
		if pos >= 0 && pos < q.Pos {
			if err := d.check(q.Blocks[pos/size], pos, size); err != nil {
				return err
			}
		}
	}
	for at := q.Pos; at < q.Pos+len(q.Tokens); {
		row := at % size
		n := min(size-row, q.Pos+len(q.Tokens)-at)
		for l := range d.layers {
			d.write(&d.layers[l], q, at, row, n)
		}
		at += n
	}
	return nil
}

// check fails if a row is not of its position.
func (d *Device) check(block int32, pos, size int) error {
	l := &d.layers[0]
	packed := d.packed[:l.PackedBytes(1)]
	d.Gather(0, block, pos%size, 1, packed)
	if got := binary.LittleEndian.Uint32(packed[4:]); got != uint32(pos) {
		return fmt.Errorf("the row of position %d in block %d is of %d: its KV has not come", pos, block, got)
	}
	return nil
}

// write writes n rows of a block from position at on, and their digest with that of the rows before.
func (d *Device) write(l *kvlayout.Layer, q *kernels.Seq, at, row, n int) {
	block := q.Blocks[at/l.BlockTokens]
	packed := d.packed[:l.PackedBytes(n)]
	clear(packed)
	l.Parts(packed, n, func(plane, _ int, rows, _ []byte) {
		for i := range n {
			token := d.token
			if q.After == 0 {
				token = q.Tokens[at+i-q.Pos]
			}
			r := rows[i*l.RowBytes(plane):]
			binary.LittleEndian.PutUint32(r, uint32(token))
			binary.LittleEndian.PutUint32(r[4:], uint32(at+i))
		}
	})
	d.Scatter(l.Number, block, row, n, packed)
	// All of the block: of what was there before, the digest need not be of just the rows before.
	packed = d.packed[:l.PackedBytes(row+n)]
	d.Gather(l.Number, block, 0, row+n, packed)
	kernels.DigestRows(l, at-row, row+n, packed, d.sums)
	d.SetDigest(l.Number, block, row+n, d.sums)
}
