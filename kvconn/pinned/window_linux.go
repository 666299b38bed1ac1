package pinned

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/xpyd/xpyd/internal/memfd"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/local"
	"github.com/xpyd/xpyd/kvconn/stage"
)

var (
	_ kvconn.DeviceConn  = (*conn)(nil)
	_ kvconn.PrivateConn = (*conn)(nil)
)

const grantForm = 2 // of stage.Grant

// Offer implements kvconn.SharedConn.
func (c *conn) Offer(s *kvconn.Shared) (_ kvconn.Hold, _ []byte, err error) {
	if !s.Device {
		return nil, nil, nil
	}
	mem, err := memfd.New("xpyd-kv-ring", int(memoryBytes(c.d.geo)))
	if err != nil {
		return nil, nil, fmt.Errorf("pinned: %w", err)
	}
	registered, err := c.d.ours.RegisterHost(mem.Bytes[head:])
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("pinned: register the ring: %w", err), mem.Close())
	}
	lent, err := c.Lend(mem.FD)
	if err != nil {
		return nil, nil, errors.Join(err, registered.Close(), mem.Close())
	}
	g := stage.GrantOf(grantForm, s, c.d.geo, mem.Size)
	in := inlet{mem.Bytes, func() error {
		if err := registered.Close(); err != nil {
			return err // still reachable by the device
		}
		return mem.Close()
	}}
	return &hold{stage.NewHold(c.d.ours, registered, c.d.geo, in), lent}, g.Encode(), nil
}

// hold is a peer's hold of a ring of ours.
type hold struct {
	*stage.Hold
	lent *local.Hold
}

var _ kvconn.StagedHold = (*hold)(nil)

// Wait implements kvconn.Hold: it returns once the peer can no longer write into the
// ring.
func (h *hold) Wait(ctx context.Context) error { return h.lent.Wait(ctx) }

// Close implements kvconn.Hold.
func (h *hold) Close() error { return errors.Join(h.Hold.Close(), h.lent.Close()) }

// Map implements kvconn.SharedConn: it maps the ring.
func (c *conn) Map(s *kvconn.Shared, b []byte) (_ kvconn.Window, err error) {
	g, rest, err := stage.DecodeGrant(b, grantForm)
	if err == nil {
		err = g.Describes(s, c.d.geo, memoryBytes(c.d.geo))
	}
	if err == nil && len(rest) > 0 {
		err = fmt.Errorf("%w: %d bytes behind it", stage.ErrGrant, len(rest))
	}
	if err != nil {
		return nil, fmt.Errorf("pinned: %w", err)
	}
	t, err := c.Take()
	if err != nil {
		return nil, err
	}
	mem, err := t.Map(g.Bytes)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("pinned: the ring: %w", err), t.End())
	}
	registered, err := c.d.theirs.RegisterHost(mem[head:])
	if err != nil {
		return nil, errors.Join(fmt.Errorf("pinned: register the ring: %w", err), unix.Munmap(mem), t.End())
	}
	out := newOutlet(mem, int(g.Slots), func() error {
		if err := registered.Close(); err != nil {
			return err // still reachable by the device: the peer must go on assuming so
		}
		return errors.Join(unix.Munmap(mem), t.End())
	})
	return stage.NewWindow(c.d.theirs, registered, c.d.geo, out, kernels.Auto), nil
}
