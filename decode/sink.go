package decode

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvlayout"
)

// sink stores a ticket's rows in the pool, if the bytes that arrived match their digests. It
// implements kvconn.Sink.
type sink struct {
	backend Backend
	layers  []kvlayout.Layer
	trust   bool // digests are recorded, not checked (kv.digest: off)
}

// Store implements kvconn.Sink.
func (s *sink) Store(layer int, dst int32, row, rows, firstPos int, packed []byte, digests []uint64) error {
	if l := &s.layers[layer]; row != 0 || rows < 1 || rows > l.BlockTokens || len(packed) != l.PackedBytes(rows) {
		return fmt.Errorf("store layer %d block %d: rows %d+%d in %d bytes", layer, dst, row, rows, len(packed))
	}
	if !s.holds(layer, firstPos, rows, packed, digests) {
		return kvconn.ErrDigest
	}
	s.backend.Scatter(layer, dst, 0, rows, packed)
	s.backend.SetDigest(layer, dst, rows, digests)
	return nil
}

// View implements kvconn.ViewSink.
func (s *sink) View(layer int, dst int32, row, rows int) ([]byte, bool) {
	viewer, ok := s.backend.(kernels.Viewer)
	if !ok {
		return nil, false
	}
	return viewer.View(layer, dst, row, rows)
}

// Verify implements kvconn.ViewSink.
func (s *sink) Verify(layer int, dst int32, row, rows, firstPos int, digests []uint64) error {
	switch run, ok := s.View(layer, dst, row, rows); {
	case ok && s.holds(layer, firstPos, rows, run, digests):
	case ok:
		return kvconn.ErrDigest
	default:
		if err := s.verifyParts(layer, dst, row, rows, firstPos, digests); err != nil {
			return err
		}
	}
	s.backend.SetDigest(layer, dst, rows, digests)
	return nil
}

// verifyParts is Verify for a block that several ranks keep, without the record: every copy of a
// head must match its digest.
func (s *sink) verifyParts(layer int, dst int32, row, rows, firstPos int, digests []uint64) error {
	viewer, ok := s.backend.(kernels.PartViewer)
	if l := &s.layers[layer]; !ok || row != 0 || rows != l.BlockTokens || len(digests) != l.Heads {
		return fmt.Errorf("verify layer %d block %d: rows %d+%d cannot be viewed", layer, dst, row, rows)
	}
	if s.trust {
		return nil
	}
	sums := make([]uint64, s.layers[layer].Heads)
	for _, p := range viewer.Parts(nil, layer, dst) {
		at := p.Layer.FirstHead - s.layers[layer].FirstHead
		if kernels.DigestRows(p.Layer, firstPos, rows, p.Run, sums[:p.Layer.Heads]); !slices.Equal(sums[:p.Layer.Heads], digests[at:at+p.Layer.Heads]) {
			return kvconn.ErrDigest
		}
	}
	return nil
}

// holds reports whether the rows match their digests, one per head.
func (s *sink) holds(layer, firstPos, rows int, packed []byte, digests []uint64) bool {
	l := &s.layers[layer]
	if s.trust {
		return len(digests) == l.Heads
	}
	sums := make([]uint64, l.Heads)
	kernels.DigestRows(l, firstPos, rows, packed, sums)
	return slices.Equal(sums, digests)
}

// VerifyPushed implements kvconn.DeviceSink: the device checks its own memory.
func (s *sink) VerifyPushed(ctx context.Context, layer int, blocks []kvconn.PushedBlock) ([]bool, error) {
	if s.trust {
		return slices.Repeat([]bool{true}, len(blocks)), nil
	}
	device, ok := s.backend.(kernels.Verifier)
	if !ok {
		return nil, errors.New("verify pushed blocks: the pool is not a device's")
	}
	landed := make([]kernels.Landed, len(blocks))
	for i, b := range blocks {
		landed[i] = kernels.Landed{Layer: layer, Block: b.Block, FirstPos: b.FirstPos, Rows: b.Rows}
	}
	return device.Verify(ctx, landed)
}

var (
	_ kvconn.ViewSink   = (*sink)(nil)
	_ kvconn.DeviceSink = (*sink)(nil)
)
