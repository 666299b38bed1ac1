//go:build cuda && cgo && linux

package cuda_test

import (
	"sync"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kernels"
)

// A step behind a gate computes no layer before it is open, and draws what it would
// have with all rows in place; a gate that is open holds nobody up.
func TestGates(t *testing.T) {
	gates(t, openForArrivals(t), openForArrivals(t))
}

func gates(t *testing.T, b, other mover) {
	t.Helper()
	step, want := arrivalRig(t, b)
	l := b.Layout()
	gate := func() kernels.Gate {
		t.Helper()
		g, err := b.Gate()
		if err != nil {
			t.Fatal(err)
		}
		return g
	}
	for round := range 4 {
		table := make([]int32, 0, arrivalBlocks+1)
		for i := range int32(arrivalBlocks) {
			table = append(table, 10+10*int32(round)+i)
		}
		g, ended := gate(), gate()
		ended.Open(l.Layers())
		var all sync.WaitGroup
		all.Go(func() {
			for layer := range l.Layers() {
				rows := make([]byte, l.Resolve()[0].BlockBytes())
				for i := range arrivalBlocks {
					b.Gather(layer, int32(i), 0, 8, rows)
					b.Scatter(layer, table[i], 0, 8, rows)
				}
				time.Sleep(time.Duration(round) * time.Millisecond) // a step that does not wait is done by now
				g.Open(layer + 1)
				g.Open(layer)
				if g.Layers() != layer+1 {
					t.Errorf("%d layers are open, want %d", g.Layers(), layer+1)
				}
			}
		})
		if got := step(append(table, 63), g, ended, g); got != want {
			t.Errorf("round %d: drew %d behind a gate, want %d", round, got, want)
		}
		all.Wait()
		if g.Layers() != l.Layers() || g.Wait(soon(t)) != nil {
			t.Errorf("%d layers after the step", g.Layers())
		}
		g.Open(l.Layers())
	}
	// One reader opens two gates that a step waits for, one after the other.
	g1, g2 := gate(), gate()
	reader := make(chan struct{})
	go func() {
		defer close(reader)
		for _, g := range []kernels.Gate{g1, g2} {
			time.Sleep(10 * time.Millisecond) // the step is being launched
			g.Open(l.Layers())
		}
	}()
	table := make([]int32, 0, arrivalBlocks+1)
	for i := range int32(arrivalBlocks) {
		table = append(table, i)
	}
	if got := step(append(table, 63), g1, g2); got != want {
		t.Errorf("drew %d behind two gates of one reader, want %d", got, want)
	}
	<-reader
	g, err := other.Gate()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.Step(&kernels.Step{Arrivals: []kernels.Arrival{g}, Seqs: []kernels.Seq{{Tokens: []int32{1}, Blocks: []int32{63}}}}); err == nil {
		t.Error("a step waits for another backend's gate")
	}
	g.Open(l.Layers())
}
