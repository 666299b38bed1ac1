package nccl

import (
	"context"
	"encoding/binary"
	"fmt"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/stage"
)

const grantForm = 5 // of stage.Grant: 1 is cudaipc's, 2 pinned's, 3 and 4 moved less to begin with

// grant describes the link: a stage.Grant, then a length (u32) and the link's name.
type grant struct {
	stage.Grant
	id []byte
}

func (g *grant) encode() []byte {
	b := binary.LittleEndian.AppendUint32(g.Encode(), uint32(len(g.id)))
	return append(b, g.id...)
}

// decodeGrant accepts exactly what encode writes, and nothing out of bounds.
func decodeGrant(b []byte) (*grant, error) {
	g, rest, err := stage.DecodeGrant(b, grantForm)
	if err != nil {
		return nil, fmt.Errorf("nccl: %w", err)
	}
	if len(rest) < 5 || len(rest) > 4+kernels.MaxHandle || int(binary.LittleEndian.Uint32(rest)) != len(rest)-4 {
		return nil, fmt.Errorf("nccl: %w: a name in %d bytes", stage.ErrGrant, len(rest))
	}
	return &grant{g, append([]byte(nil), rest[4:]...)}, nil
}

// hold is a peer's end of a link, as the receiver sees it.
type hold struct {
	*stage.Hold
	in   *inlet
	conn context.Context    // of the connection that the link was made for
	stop context.CancelFunc // joining
}

var _ kvconn.StagedHold = (*hold)(nil)

// Offer implements kvconn.SharedConn.
func (c *conn) Offer(s *kvconn.Shared) (kvconn.Hold, []byte, error) {
	if !s.Device {
		return nil, nil, nil
	}
	id, err := c.d.ours.NewLink()
	if err != nil {
		return nil, nil, fmt.Errorf("nccl: %w", err)
	}
	l, err := c.d.ours.OpenLink(id, kernels.LinkReceiver, c.d.geo.Bytes())
	if err != nil {
		return nil, nil, fmt.Errorf("nccl: %w", err)
	}
	in := newInlet(l, c.d.geo.Slots)
	ctx, cancel := context.WithCancel(context.Background())
	go func() { // Close waits for the first half; the second ends with the connection
		if in.join(ctx) == nil {
			c.endWith(l)
		}
	}()
	g := grant{stage.GrantOf(grantForm, s, c.d.geo, c.d.geo.Bytes()), id}
	return &hold{stage.NewHold(c.d.ours, l.Memory(), c.d.geo, in), in, c.ctx, cancel}, g.encode(), nil
}

// Ready implements kvconn.StagedHold: it returns once we have joined. Pushes that the
// peer sends earlier wait at our end of the link.
func (h *hold) Ready(ctx context.Context) error {
	if err := h.in.ready(ctx); err != nil {
		return err
	}
	return h.in.link.Ready(ctx) // it may have failed since
}

// Wait implements kvconn.Hold. The peer writes to us only through the link, which ends
// with the connection.
func (h *hold) Wait(ctx context.Context) error {
	select {
	case <-h.conn.Done():
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Close implements kvconn.Hold.
func (h *hold) Close() error {
	h.stop()
	return h.Hold.Close()
}

// endWith ends the connection, and so the session at both ends, when the link fails. A
// link that fails before it is joined ends nothing here: whoever waits for it reports
// why.
func (c *conn) endWith(l kernels.Link) {
	select {
	case <-l.Failed():
		c.Close()
	case <-c.ctx.Done():
	}
}

// Map implements kvconn.SharedConn: it starts to join the link.
func (c *conn) Map(s *kvconn.Shared, b []byte) (kvconn.Window, error) {
	g, err := decodeGrant(b)
	if err == nil {
		err = g.Describes(s, c.d.geo, c.d.geo.Bytes())
	}
	if err != nil {
		return nil, err
	}
	l, err := c.d.theirs.OpenLink(g.id, kernels.LinkSender, g.Bytes)
	if err != nil {
		return nil, fmt.Errorf("nccl: %w", err)
	}
	return &window{stage.NewWindow(c.d.theirs, l.Memory(), c.d.geo, &outlet{l, make([]kernels.Pending, g.Slots)}, kernels.Kernel), c, l}, nil
}

// window is our end of a link, as the sender sees it.
type window struct {
	*stage.Window
	conn *conn
	link kernels.Link
}

var _ kvconn.StagedWindow = (*window)(nil)

// Ready implements kvconn.StagedWindow: it returns once both ends have joined.
func (w *window) Ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, joinTime)
	defer cancel()
	if err := w.link.Ready(ctx); err != nil {
		return fmt.Errorf("nccl: join: %w", err)
	}
	go w.conn.endWith(w.link) // ends with the connection
	return nil
}
