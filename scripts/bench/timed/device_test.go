package timed_test

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/internal/sim"
	"github.com/xpyd/xpyd/internal/steptable"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cpu"
	"github.com/xpyd/xpyd/kernels/kerneltest"
	"github.com/xpyd/xpyd/scripts/bench/timed"
)

// perToken is a device whose steps take a millisecond a token.
type perToken struct{}

func (perToken) Step(l steptable.Load) (mean, spread time.Duration) {
	n := l.Decodes
	for _, p := range l.Pieces {
		n += p.Tokens
	}
	return time.Duration(n) * time.Millisecond, 0
}

const drawn = 7

func open(t *testing.T) *timed.Device {
	t.Helper()
	a := timed.Shape(64, 1024)
	b, err := cpu.New(a, kerneltest.Weights(a, kernels.F32, 1), cpu.Options{Blocks: 4, BlockTokens: 8, Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	return timed.New(b, "a test's", sim.Timer{Steps: perToken{}}, drawn)
}

// part is a sequence's part of a step: tokens from a position on, in blocks 2 and 1.
func part(pos int, tokens ...int32) *kernels.Step {
	return &kernels.Step{Seqs: []kernels.Seq{{Tokens: tokens, Pos: pos, Blocks: []int32{2, 1}, Samples: make([]kernels.Sample, 1)}}}
}

func await(t *testing.T, d *timed.Device) {
	t.Helper()
	got, err := d.Await()
	if err != nil || len(got) != 1 || len(got[0].Samples) != 1 || got[0].Samples[0].Token != drawn {
		t.Fatal(got, err)
	}
}

// A step takes what it is said to, behind the one before it, and the device does not wait for who
// awaits it late.
func TestTakesItsTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, began := open(t), time.Now()
		takes := func(want time.Duration) {
			t.Helper()
			await(t, d)
			if got := time.Since(began); got != want {
				t.Fatalf("it ended after %v, want %v", got, want)
			}
		}
		launch := func(s *kernels.Step) {
			t.Helper()
			if err := d.Launch(s); err != nil {
				t.Fatal(err)
			}
		}
		launch(part(0, 1, 2, 3, 4, 5, 6))
		launch(part(6, 1))
		takes(6 * time.Millisecond)
		takes(7 * time.Millisecond)
		time.Sleep(3 * time.Millisecond)
		launch(part(7, 1, 2))
		launch(part(9, 1))
		if step, idle, err := d.LastStepTime(); step != 1000 || idle != 0 || err != nil {
			t.Fatal(step, idle, err)
		}
		time.Sleep(2500 * time.Microsecond) // the first has ended, the second half
		takes(12500 * time.Microsecond)
		if step, idle, err := d.LastStepTime(); step != 2000 || idle != 3000 || err != nil {
			t.Fatal(step, idle, err)
		}
		takes(13 * time.Millisecond)
		if late := d.Late(); late.Steps != 3 || late.Most != 0 { // nobody is, in a bubble; one had ended before
			t.Fatal(late)
		}
	})
}

// Rows that a step computed can be pushed and checked, and a step over rows that were not pushed fails.
func TestRowsAreThere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		from, to := open(t), open(t)
		told := -1
		s := part(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
		s.OnLayer = func(l int) { told = l }
		for i, s := range []*kernels.Step{s, part(10, 11)} { // the second goes on in a block
			if _, err := from.Step(s); err != nil {
				t.Fatal(i, err)
			}
		}
		if told != 0 {
			t.Fatalf("it told of layer %d, want 0", told)
		}
		if _, err := to.Step(part(11, drawn)); err == nil || !strings.Contains(err.Error(), "has not come") {
			t.Fatal(err)
		}
		l := from.Layout().Resolve()[0]
		for _, b := range []struct{ block, first, n int }{{2, 0, 8}, {1, 8, 3}} {
			packed := make([]byte, l.PackedBytes(b.n))
			said, made := make([]uint64, l.Heads), make([]uint64, l.Heads)
			from.Gather(0, int32(b.block), 0, b.n, packed)
			from.Digest(0, int32(b.block), said)
			if kernels.DigestRows(&l, b.first, b.n, packed, made); !slices.Equal(said, made) {
				t.Fatalf("block %d: the digest is %x, of its rows %x", b.block, said, made)
			}
			to.Scatter(0, int32(b.block), 0, b.n, packed)
			to.SetDigest(0, int32(b.block), b.n, said)
		}
		if _, err := to.Step(part(11, drawn)); err != nil {
			t.Fatal(err)
		}
	})
}
