package cudaipc

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/local"
)

var (
	_ kvconn.DeviceConn  = (*conn)(nil)
	_ kvconn.PrivateConn = (*conn)(nil)
)

// Offer implements kvconn.SharedConn.
func (c *conn) Offer(s *kvconn.Shared) (kvconn.Hold, []byte, error) {
	if !s.Device {
		return nil, nil, nil
	}
	d := c.d
	if len(s.Layers)%len(d.ours) != 0 || len(s.Layers) == 0 || max(s.Ranks, 1) != len(d.ours) {
		return nil, nil, fmt.Errorf("cudaipc: %d layers of %d ranks, of a pool of %d", len(s.Layers), s.Ranks, len(d.ours))
	}
	g := grant{head: head{Lines: int32(d.lines), Epoch: s.Epoch, Blocks: int32(s.Blocks), Layers: int32(len(s.Layers) / len(d.ours)), Heads: int32(d.heads)}}
	var flags int // all ranks have the same file
	for i, r := range d.ours {
		e, err := r.Export()
		if err != nil {
			return nil, nil, fmt.Errorf("cudaipc: %w", err)
		}
		first, heads := share(d.heads, i, len(d.ours))
		g.ranks = append(g.ranks, rank{part{First: int32(first), Heads: int32(heads), BlockBytes: s.Layers[i*int(g.Layers)].Stride}, e.Handle})
		flags, g.FlagBytes = e.FD, e.Bytes
	}
	line, ok := d.reserve()
	if !ok {
		return nil, nil, errors.New("cudaipc: peers have every line of the flags")
	}
	g.Line = int32(line)
	h, err := c.Lend(flags)
	if err != nil {
		return nil, nil, errors.Join(err, d.free(line))
	}
	return &hold{Hold: h, d: d, line: line}, g.encode(), nil
}

// hold is a peer's hold of our pool, and its lines of our flags.
type hold struct {
	*local.Hold
	d    *device
	line int         // the first
	gone atomic.Bool // the peer is gone: the lines may be another's
}

var _ kvconn.DeviceHold = (*hold)(nil)

var errGone = errors.New("cudaipc: the peer has let go of the pool")

// Wait implements kvconn.Hold.
func (h *hold) Wait(ctx context.Context) error {
	err := h.Hold.Wait(ctx)
	if err == nil {
		h.gone.Store(true)
	}
	return err
}

// Close implements kvconn.Hold. The lines become free only with the proof: a device may
// set its flag as long as it may write.
func (h *hold) Close() (err error) {
	if h.gone.Load() {
		err = h.d.free(h.line)
	}
	return errors.Join(err, h.Hold.Close())
}

// Landed implements kvconn.DeviceHold. Each of the peer's parts of a push has its line; lines
// without a part say that all has landed.
func (h *hold) Landed(ctx context.Context, number uint64) (err error) {
	for line := h.line; line < h.line+h.d.lines && err == nil; line++ {
		err = h.d.ours[0].AwaitFlag(ctx, line, number)
	}
	if h.gone.Load() { // the flag read may be another peer's
		return errGone
	}
	return err
}
