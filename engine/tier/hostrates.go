package tier

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvlayout"
)

// HostRates is how fast the tiers moved units between a pool and host memory, bytes
// of records a second: of each round.
type HostRates struct {
	BlockTokens int
	UnitBytes   int
	Units       int       // moved in a round
	Out         []float64 // to host memory
	In          []float64 // and back, verified where it landed
	Both        []float64 // at once, the sum
}

// HostBlocks is how many blocks of a layout MeasureHost needs for so many bytes each way.
func HostBlocks(l kvlayout.Layout, total int64) int {
	s := newShape(l, kvcache.UnitBlocks(l.BlockTokens))
	return 2 * hostUnits(s, total) * s.blocks
}

func hostUnits(s shape, total int64) int { return max(1, int(total/int64(s.record()))) }

// MeasureHost moves units of total bytes out of a pool of HostBlocks blocks, whose rows
// it makes, into host memory, as saving does, and back into others of its blocks, as
// loading does; then both at once. Each is done once before it is timed. progress may
// be nil.
func MeasureHost(ctx context.Context, l kvlayout.Layout, pool kernels.Pool, total int64, rounds int, progress Progress) (r HostRates, err error) {
	s := newShape(l, kvcache.UnitBlocks(l.BlockTokens))
	n := hostUnits(s, total)
	r = HostRates{BlockTokens: s.BlockTokens, UnitBytes: s.record(), Units: n}
	if rounds < 1 {
		return r, fmt.Errorf("tier: %d rounds: want at least 1", rounds)
	}
	h, err := newHost(ctx, s, int64(2*n)*int64(s.record()), LRU, nil)
	if err != nil {
		return r, err
	}
	defer h.close()
	m, err := newMover(s, pool, h)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, m.close()) }()
	if err := makeRows(ctx, s, pool, n, progress); err != nil {
		return r, err
	}
	// Slots and blocks of the first half are written and read, those of the second
	// are where it comes back to, and what leaves meanwhile.
	here, there := unitsFrom(s, h, 0, 0, n), unitsFrom(s, h, 0, n*s.blocks, n)
	beside := unitsFrom(s, h, n, 0, n)
	bytes := float64(n) * float64(s.record())
	all := meter{tell: progress, what: "move", total: int64(4*bytes) * int64(rounds+1)}
	moved := func(units int) error {
		all.add(int64(units) * int64(s.record()))
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

// unitsFrom are n units in a host's slots from slot on and the blocks from block on, each
// the first of a prompt of its own.
func unitsFrom(s shape, h *host, slot, block, n int) []moving {
	list := make([]moving, n)
	for u := range list {
		ids := make([]int32, s.blocks)
		for i := range ids {
			ids[i] = int32(block + u*s.blocks + i)
		}
		list[u] = moving{&lease{h, int32(slot + u)}, ids, 0}
	}
	return list
}

// gathered asks moved after each few units whether to go on.
func gathered(m mover, units []moving, moved func(units int) error) error {
	for some := range slices.Chunk(units, m.most()) {
		if err := m.gather(some); err != nil {
			return err
		}
		if err := moved(len(some)); err != nil {
			return err
		}
	}
	return nil
}

// scattered has a list under way while the one before it is waited for, as loads have.
func scattered(m mover, units []moving, moved func(units int) error) error {
	before, of := func() (int, error) { return 0, nil }, 0
	end := func() error {
		good, err := before()
		if err == nil && good != of {
			err = fmt.Errorf("tier: unit %d of %d is not what was gathered", good, of)
		}
		return err
	}
	for some := range slices.Chunk(units, m.most()) {
		wait := m.scatter(some)
		err := errors.Join(end(), moved(len(some)))
		if before, of = wait, len(some); err != nil {
			_, last := before()
			return errors.Join(err, last)
		}
	}
	return end()
}

// makeRows fills the blocks of the first n units of a pool, and sets their digests, as if
// each were the first of a prompt.
func makeRows(ctx context.Context, s shape, pool kernels.Pool, n int, progress Progress) error {
	made := meter{tell: progress, what: "fill", total: int64(n*s.blocks) * int64(s.BlockBytes())}
	all, gen := make([][]byte, len(s.layers)), rand.New(rand.NewPCG(1, 2))
	for layer := range all {
		all[layer] = make([]byte, s.layers[layer].BlockBytes())
		for at := 0; at+8 <= len(all[layer]); at += 8 {
			binary.LittleEndian.PutUint64(all[layer][at:], gen.Uint64())
		}
	}
	sums := make([]uint64, s.heads)
	for block := range n * s.blocks {
		if err := ctx.Err(); err != nil {
			return err
		}
		for layer, rows := range all {
			l := &s.layers[layer]
			binary.LittleEndian.PutUint32(rows, uint32(block))
			kernels.DigestRows(&l.Layer, block%s.blocks*s.BlockTokens, s.BlockTokens, rows, sums[:l.Heads])
			pool.Scatter(layer, int32(block), 0, s.BlockTokens, rows)
			pool.SetDigest(layer, int32(block), s.BlockTokens, sums[:l.Heads])
		}
		made.add(int64(s.BlockBytes()))
	}
	return nil
}
