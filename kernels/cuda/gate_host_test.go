//go:build cgo && linux

package cuda

import (
	"slices"
	"testing"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
)

// TestGatesOfOneReader: a step is being launched behind two gates, which one reader opens
// one after the other, to the last layer: it never waits for the launch. What a launch
// holds is freed behind it, once, and no later step waits for it.
func TestGatesOfOneReader(t *testing.T) {
	b := &Backend{arch: arch.Config{Layers: 2}}
	var told []int
	freed := 0
	newGate := func() *gate {
		return &gate{awaited: awaited{b: b, shared: newShared(func() { freed++ })}, open: func(n int) { told = append(told, n) }, over: make(chan struct{})}
	}
	g1, g2, nobodys := newGate(), newGate(), newGate()
	launch := func(want int, list ...kernels.Arrival) []*awaited {
		t.Helper()
		held, err := b.holdAll(list)
		if err != nil || len(held) != want {
			t.Fatalf("a step waits for %d gates, want %d: %v", len(held), want, err)
		}
		return held
	}
	held := launch(2, g1, g2, g1)
	for _, g := range []*gate{g1, g2, nobodys} {
		g.Open(1)
		g.Open(2)
		g.Open(2)
		if g.Layers() != 2 || g.Wait(t.Context()) != nil {
			t.Errorf("%d layers are open", g.Layers())
		}
	}
	if !slices.Equal(told, []int{1, 2, 1, 2, 1, 2}) || freed != 1 {
		t.Errorf("the library was told %v; %d gates are freed while two are in use", told, freed)
	}
	for _, a := range held {
		a.drop()
	}
	launch(0, g1, g2, nobodys)
	if freed != 3 {
		t.Errorf("%d gates are freed in the end, want 3", freed)
	}
	if held, err := b.holdAll([]kernels.Arrival{newGate(), &gate{awaited: awaited{b: &Backend{}}}}); err == nil || len(held) != 1 {
		t.Errorf("another backend's gate: %d are held, %v", len(held), err)
	}
}
