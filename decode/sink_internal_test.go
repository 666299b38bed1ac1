package decode

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cpu"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvlayout"
)

// stored counts what reaches the pool.
type stored struct {
	Backend
	rows, sums int
}

func (s *stored) Scatter(_ int, _ int32, _, rows int, _ []byte) { s.rows += rows }
func (s *stored) SetDigest(int, int32, int, []uint64)           { s.sums++ }

// View gives a block's rows in place: as many as are asked for from the first.
func (s *stored) View(layer int, block int32, row, n int) ([]byte, bool) {
	return make([]byte, 64*n), layer == 0 && block == 3 && row == 0 && n > 0
}

// TestCounted: a sink that counts for a Coming refuses what the sink beneath refuses,
// and counts only what that took.
func TestCounted(t *testing.T) {
	cache, err := kvcache.New(kvcache.Config{Blocks: 4, BlockTokens: 4})
	if err != nil {
		t.Fatal(err)
	}
	l := kvlayout.Plain(1, 1, 4, 4, "f32")
	for name, f := range map[string]func(s *counting, sums []uint64) error{
		"stored": func(s *counting, sums []uint64) error {
			return s.Store(0, 3, 0, 4, 0, make([]byte, l.Resolve()[0].PackedBytes(4)), sums)
		},
		"written in place": func(s *counting, sums []uint64) error { return s.Verify(0, 3, 0, 4, 0, sums) },
	} {
		c := &Coming{Bringing: &Bringing{s: &Service{cache: cache}}, table: []int32{3}, gate: kernels.NewHostGate(1), began: make(chan struct{}), wake: func() {},
			here: make([]bool, 1), left: []int{1}, asked: time.Now()}
		s := &counting{&sink{backend: &stored{}, layers: l.Resolve()}, c}
		sums := []uint64{0}
		kernels.DigestRows(&l.Resolve()[0], 0, 4, make([]byte, l.Resolve()[0].PackedBytes(4)), sums)
		if err := f(s, []uint64{sums[0] + 1}); !errors.Is(err, kvconn.ErrDigest) || c.layers != 0 {
			t.Errorf("%s, another digest: %v, %d layers here", name, err, c.layers)
		}
		if err := f(s, sums); err != nil || c.layers != 1 || !c.Begun() {
			t.Errorf("%s: %v, %d layers here, begun %t", name, err, c.layers, c.Begun())
		}
	}
}

// device is a pool that verifies its own memory.
type device struct {
	*stored
	asked []kernels.Landed
	good  []bool
	err   error
}

func (d *device) Verify(_ context.Context, landed []kernels.Landed) ([]bool, error) {
	d.asked = landed
	return d.good, d.err
}

// TestVerifyPushed: the device says which blocks are good, and only those count; without one
// nothing does, unless the peer is trusted.
func TestVerifyPushed(t *testing.T) {
	cache, err := kvcache.New(kvcache.Config{Blocks: 8, BlockTokens: 4})
	if err != nil {
		t.Fatal(err)
	}
	l := kvlayout.Plain(2, 1, 4, 4, "f32")
	pushed := []kvconn.PushedBlock{{Block: 3, FirstPos: 4, Rows: 4}, {Block: 5, FirstPos: 8, Rows: 3}}
	f := func(backend Backend, trust bool, layer int, good []bool, fails bool, layers int) *Coming {
		t.Helper()
		c := &Coming{Bringing: &Bringing{s: &Service{cache: cache}}, table: []int32{9, 3, 5}, from: 4, gate: kernels.NewHostGate(2), began: make(chan struct{}), wake: func() {},
			here: make([]bool, 4), left: []int{2, 2}, asked: time.Now()}
		got, err := (&counting{&sink{backend: backend, layers: l.Resolve(), trust: trust}, c}).VerifyPushed(t.Context(), layer, pushed)
		if !slices.Equal(got, good) || (err != nil) != fails || c.layers != layers || c.gate.Layers() != layers {
			t.Errorf("good %v, %v, %d layers here, %d open", got, err, c.layers, c.gate.Layers())
		}
		return c
	}
	d := &device{stored: &stored{}, good: []bool{true, true}}
	f(d, false, 0, []bool{true, true}, false, 1)
	if want := []kernels.Landed{{Layer: 0, Block: 3, FirstPos: 4, Rows: 4}, {Layer: 0, Block: 5, FirstPos: 8, Rows: 3}}; !slices.Equal(d.asked, want) {
		t.Errorf("the device was asked of %+v", d.asked)
	}
	f(d, false, 1, []bool{true, true}, false, 0) // behind a layer that is not here
	d.good = []bool{false, true}
	c := f(d, false, 0, d.good, false, 0)
	c.markVerified(0, pushed[1:], []bool{true}) // told twice, it counts once
	if c.layers != 0 || c.left[0] != 1 {
		t.Errorf("%d layers here, %d blocks left", c.layers, c.left[0])
	}
	d.err = errors.New("late")
	f(d, false, 0, d.good, true, 0)
	f(&stored{}, false, 0, nil, true, 0)
	f(&stored{}, true, 0, []bool{true, true}, false, 1)
}

// TestSinkRefuses: nothing reaches the pool but whole rows of one block that agree
// with their digests.
func TestSinkRefuses(t *testing.T) {
	l := kvlayout.Plain(1, 1, 4, 4, "f32")
	pool := &stored{}
	s := &sink{backend: pool, layers: l.Resolve()}
	f := func(what string, row, rows, bytes int, wrong uint64, want bool) {
		t.Helper()
		*pool = stored{}
		packed := make([]byte, bytes)
		sums := []uint64{0}
		if bytes == l.Resolve()[0].PackedBytes(rows) && rows > 0 {
			kernels.DigestRows(&l.Resolve()[0], 0, rows, packed, sums)
		}
		sums[0] += wrong
		err := s.Store(0, 0, row, rows, 0, packed, sums)
		if (err == nil) != want || (pool.rows == rows && pool.sums == 1) != want || wrong != 0 && !errors.Is(err, kvconn.ErrDigest) {
			t.Errorf("%s: %v, %d rows and %d digests stored", what, err, pool.rows, pool.sums)
		}
	}
	f("a block", 0, 4, l.Resolve()[0].PackedBytes(4), 0, true)
	f("a part of one", 0, 1, l.Resolve()[0].PackedBytes(1), 0, true)
	f("not from its start", 1, 1, l.Resolve()[0].PackedBytes(1), 0, false)
	f("no rows", 0, 0, 0, 0, false)
	f("more than a block", 0, 5, l.Resolve()[0].PackedBytes(5), 0, false)
	f("too few bytes", 0, 4, l.Resolve()[0].PackedBytes(3), 0, false)
	f("another digest", 0, 4, l.Resolve()[0].PackedBytes(4), 1, false)

	if _, ok := s.View(0, 3, 0, 4); !ok {
		t.Error("the pool's rows cannot be seen")
	}
	for name, other := range map[string]*sink{"no view": {backend: struct{ Backend }{}, layers: l.Resolve()}, "not this block": s} {
		*pool = stored{}
		if err := other.Verify(0, 1, 0, 4, 0, []uint64{0}); err == nil || errors.Is(err, kvconn.ErrDigest) || pool.sums != 0 {
			t.Errorf("%s: %v, %d digests stored", name, err, pool.sums)
		}
	}
	s.trust = true // whatever the digests are, but one a head
	for n, want := range []bool{false, true, false} {
		*pool = stored{}
		if err := s.Store(0, 0, 0, 4, 0, make([]byte, l.Resolve()[0].PackedBytes(4)), make([]uint64, n)); (err == nil) != want || (pool.rows == 4) != want {
			t.Errorf("%d digests, unchecked: %v, %d rows stored", n, err, pool.rows)
		}
	}
}

// ranked is a pool of several ranks.
type ranked struct {
	kernels.Pool
	kernels.PartViewer
}

func (ranked) Layout() kvlayout.Layout { return kvlayout.Layout{} }
func (ranked) Arch() arch.Config       { return arch.Config{} }

// TestVerifyRanks: a block that a peer has written to several ranks counts when every rank's copy of
// each of its heads is right.
func TestVerifyRanks(t *testing.T) {
	l := kvlayout.Plain(1, 2, 4, 4, "f32")
	for _, ranks := range []int{2, 4} {
		pool, err := cpu.NewRankedPool(l, 2, ranks)
		if err != nil {
			t.Fatal(err)
		}
		s := &sink{backend: ranked{pool, pool.(kernels.PartViewer)}, layers: l.Resolve()}
		packed, sums, stored := make([]byte, l.Resolve()[0].BlockBytes()), make([]uint64, 2), make([]uint64, 2)
		for i := range packed {
			packed[i] = byte(i)
		}
		kernels.DigestRows(&l.Resolve()[0], 8, 4, packed, sums)
		pool.Scatter(0, 1, 0, 4, packed)
		if err := s.Verify(0, 1, 0, 4, 8, sums); err != nil {
			t.Errorf("%d ranks: %v", ranks, err)
		}
		if pool.Digest(0, 1, stored); !slices.Equal(stored, sums) {
			t.Errorf("%d ranks: the digests are not kept", ranks)
		}
		pool.SetDigest(0, 1, 0, []uint64{0, 0})
		for r, part := range pool.(kernels.PartViewer).Parts(nil, 0, 1) {
			part.Run[5] ^= 1
			if err := s.Verify(0, 1, 0, 4, 8, sums); !errors.Is(err, kvconn.ErrDigest) {
				t.Errorf("rank %d of %d: a wrong row is taken: %v", r, ranks, err)
			}
			part.Run[5] ^= 1
		}
		for name, err := range map[string]error{
			"part of a block": s.Verify(0, 1, 0, 3, 8, sums), "not from its start": s.Verify(0, 1, 1, 4, 8, sums), "one digest": s.Verify(0, 1, 0, 4, 8, sums[:1]),
		} {
			if err == nil || errors.Is(err, kvconn.ErrDigest) {
				t.Errorf("%s: %v", name, err)
			}
		}
		if pool.Digest(0, 1, stored); stored[0] != 0 {
			t.Errorf("%d ranks: digests of a refused block are kept", ranks)
		}
		s.trust = true
		if err := s.Verify(0, 1, 0, 4, 8, []uint64{1, 2}); err != nil {
			t.Errorf("unchecked: %v", err)
		}
	}
}
