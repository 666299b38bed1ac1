package host

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier/level"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvlayout"
)

// Rates is how fast units moved between a pool and host memory in each round, in bytes of
// records a second.
type Rates struct {
	BlockTokens int
	UnitBytes   int
	Units       int       // moved in a round
	Out         []float64 // to host memory
	In          []float64 // and back, verified in the pool
	Both        []float64 // both at once, the sum
}

// MeasureBlocks is how many blocks Measure needs to move total bytes each way.
func MeasureBlocks(l kvlayout.Layout, total int64) int {
	s := shapeOf(l)
	return 2 * unitsIn(s, total) * s.Blocks
}

func shapeOf(l kvlayout.Layout) level.Shape {
	return level.NewShape(l, kvcache.UnitBlocks(l.BlockTokens))
}

func unitsIn(s level.Shape, total int64) int { return max(1, int(total/int64(s.Record()))) }

// Measure fills half of a pool of MeasureBlocks blocks and moves units of total bytes out of
// it into host memory, as saving does; back into the other half, as loading does; then both
// at once. Each is done once before it is timed. progress may be nil.
func Measure(ctx context.Context, l kvlayout.Layout, pool kernels.Pool, total int64, rounds int, progress level.Progress) (r Rates, err error) {
	s := shapeOf(l)
	n := unitsIn(s, total)
	r = Rates{BlockTokens: s.BlockTokens, UnitBytes: s.Record(), Units: n}
	if rounds < 1 {
		return r, fmt.Errorf("tier: %d rounds: want at least 1", rounds)
	}
	m, err := Config{Bytes: int64(2*n) * int64(s.Record())}.Open(ctx, &level.Env{Shape: s, Pool: pool, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, m.Close(ctx)) }()
	if err := makeRows(ctx, s, pool, n, progress); err != nil {
		return r, err
	}
	// Units go from the first half of the blocks to the first half of the slots, and come
	// back to the second half of the blocks. What leaves meanwhile goes to the other slots.
	here, there := unitsFrom(s, m, 0, 0, n), unitsFrom(s, m, 0, n*s.Blocks, n)
	beside := unitsFrom(s, m, n, 0, n)
	bytes := float64(n) * float64(s.Record())
	all := level.Meter{Tell: progress, What: "move", Total: int64(4*bytes) * int64(rounds+1)}
	moved := func(units int) error {
		all.Add(int64(units) * int64(s.Record()))
		return ctx.Err()
	}
	in := func() error { return scattered(m, there, moved) }
	for _, way := range []struct {
		rates *[]float64
		bytes float64
		move  func() error
	}{
		{&r.Out, bytes, func() error { return gathered(m, here, moved) }},
		{&r.In, bytes, in},
		{&r.Both, 2 * bytes, func() error {
			out := make(chan error, 1)
			go func() { out <- gathered(m, beside, moved) }()
			err := in()
			return errors.Join(err, <-out)
		}},
	} {
		for i := range rounds + 1 {
			began := time.Now()
			if err := errors.Join(ctx.Err(), way.move()); err != nil {
				return r, err
			}
			if i > 0 {
				*way.rates = append(*way.rates, way.bytes/time.Since(began).Seconds())
			}
		}
	}
	return r, nil
}

// unitsFrom lists n units, each the first of its prompt, in the slots from slot on and the
// blocks from block on.
func unitsFrom(s level.Shape, m *Memory, slot, block, n int) []Move {
	list := make([]Move, n)
	for u := range list {
		ids := make([]int32, s.Blocks)
		for i := range ids {
			ids[i] = int32(block + u*s.Blocks + i)
		}
		list[u] = Move{Lease: &Lease{m, int32(slot + u)}, Blocks: ids}
	}
	return list
}

// gathered moves units out until moved, called after each batch, returns an error.
func gathered(m *Memory, units []Move, moved func(units int) error) error {
	for some := range slices.Chunk(units, m.Batch()) {
		if err := m.Gather(some); err != nil {
			return err
		}
		if err := moved(len(some)); err != nil {
			return err
		}
	}
	return nil
}

// scattered moves units in, with one batch under way while it waits for the one before, as
// loads do.
func scattered(m *Memory, units []Move, moved func(units int) error) error {
	before, of := func() (int, error) { return 0, nil }, 0
	end := func() error {
		good, err := before()
		if err == nil && good != of {
			err = fmt.Errorf("tier: unit %d of %d is not what was gathered", good, of)
		}
		return err
	}
	for some := range slices.Chunk(units, m.Batch()) {
		wait := m.Scatter(some)
		err := errors.Join(end(), moved(len(some)))
		if before, of = wait, len(some); err != nil {
			_, last := before()
			return errors.Join(err, last)
		}
	}
	return end()
}

// makeRows fills the blocks of the first n units of a pool and sets their digests, as if
// each unit were the first of a prompt.
func makeRows(ctx context.Context, s level.Shape, pool kernels.Pool, n int, progress level.Progress) error {
	made := level.Meter{Tell: progress, What: "fill", Total: int64(n*s.Blocks) * int64(s.BlockBytes())}
	all, gen := make([][]byte, len(s.ByLayer)), rand.New(rand.NewPCG(1, 2))
	for layer := range all {
		all[layer] = make([]byte, s.ByLayer[layer].BlockBytes())
		for at := 0; at+8 <= len(all[layer]); at += 8 {
			binary.LittleEndian.PutUint64(all[layer][at:], gen.Uint64())
		}
	}
	sums := make([]uint64, s.Heads)
	for block := range n * s.Blocks {
		if err := ctx.Err(); err != nil {
			return err
		}
		for layer, rows := range all {
			l := &s.ByLayer[layer]
			binary.LittleEndian.PutUint32(rows, uint32(block))
			kernels.DigestRows(&l.Layer, block%s.Blocks*s.BlockTokens, s.BlockTokens, rows, sums[:l.Heads])
			pool.Scatter(layer, int32(block), 0, s.BlockTokens, rows)
			pool.SetDigest(layer, int32(block), s.BlockTokens, sums[:l.Heads])
		}
		made.Add(int64(s.BlockBytes()))
	}
	return nil
}
