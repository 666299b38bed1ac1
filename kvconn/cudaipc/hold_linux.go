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
	e, err := c.d.ours.Export()
	if err != nil {
		return nil, nil, fmt.Errorf("cudaipc: %w", err)
	}
	line, ok := c.d.line()
	if !ok {
		return nil, nil, errors.New("cudaipc: peers have every line of the flags")
	}
	h, err := c.Lend(e.FD)
	if err != nil {
		return nil, nil, errors.Join(err, c.d.free(line))
	}
	g := grant{head{Line: int32(line), Epoch: s.Epoch, FlagBytes: e.Bytes, BlockBytes: s.Layers[0].Stride,
		Blocks: int32(s.Blocks), Layers: int32(len(s.Layers))}, e.Handle}
	return &hold{Hold: h, d: c.d, line: line}, g.encode(), nil
}

// hold is a peer's hold of our pool, and its line of our flags.
type hold struct {
	*local.Hold
	d    *device
	line int
	gone atomic.Bool // the peer is gone: the line may be another's
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

// Close implements kvconn.Hold. The line becomes free only with the proof: a device may
// set its flag as long as it may write.
func (h *hold) Close() (err error) {
	if h.gone.Load() {
		err = h.d.free(h.line)
	}
	return errors.Join(err, h.Hold.Close())
}

// Landed implements kvconn.DeviceHold.
func (h *hold) Landed(ctx context.Context, number uint64) error {
	err := h.d.ours.AwaitFlag(ctx, h.line, number)
	if h.gone.Load() { // the flag read may be another peer's
		return errGone
	}
	return err
}
