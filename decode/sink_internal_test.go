package decode

import (
	"errors"
	"testing"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/kernels"
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
}
