package nccl

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/stage"
)

// joinTime bounds the making of a link, besides both sides' handshake deadlines.
const joinTime = 5 * time.Second

// outlet is the sender's end.
type outlet struct {
	link kernels.Link
	sent []kernels.Pending // by slot; nil: never used
}

// Room implements stage.Outlet: a slot is free when it has been sent.
func (o *outlet) Room(ctx context.Context, number uint64) error {
	if p := o.sent[(number-1)%uint64(len(o.sent))]; p != nil {
		return p.Wait(ctx)
	}
	return nil
}

// Send implements stage.Outlet.
func (o *outlet) Send(number uint64, at, bytes int64, gathered kernels.Pending) error {
	ctx, cancel := context.WithTimeout(context.Background(), joinTime)
	defer cancel()
	p, err := o.link.Transfer(ctx, at, bytes, gathered)
	if err == nil {
		o.sent[(number-1)%uint64(len(o.sent))] = p
	}
	return err
}

// Close implements stage.Outlet.
func (o *outlet) Close(ctx context.Context) error { return abort(ctx, o.link, o.sent) }

// abort ends a link and waits for the transfers that this ends.
func abort(ctx context.Context, l kernels.Link, under []kernels.Pending) error {
	err := l.Close(ctx)
	if errors.Is(err, kernels.ErrLate) {
		return fmt.Errorf("nccl: %w: the abort goes on: %w", kvconn.ErrStuck, err)
	}
	for _, p := range under {
		if p == nil {
			continue
		}
		if late := p.Wait(ctx); errors.Is(late, kernels.ErrLate) {
			return fmt.Errorf("nccl: %w: a transfer goes on after the abort: %w", kvconn.ErrStuck, late)
		}
	}
	return err
}

// inlet is the receiver's end. Transfers begin in the order of their numbers, as at the
// sender, in whatever order their frames are read.
type inlet struct {
	link    kernels.Link
	joined  chan struct{} // closed when joining has ended
	joinErr error         // set before

	mu    sync.Mutex
	next  uint64        // the transfer to begin next
	turn  chan struct{} // closed when next moves on
	under []kernels.Pending
}

func newInlet(l kernels.Link, slots int) *inlet {
	return &inlet{link: l, joined: make(chan struct{}), next: 1, turn: make(chan struct{}), under: make([]kernels.Pending, slots)}
}

// join waits until the sender has joined too.
func (i *inlet) join(ctx context.Context) error {
	defer close(i.joined)
	ctx, cancel := context.WithTimeout(ctx, joinTime)
	defer cancel()
	if err := i.link.Ready(ctx); err != nil {
		i.joinErr = fmt.Errorf("nccl: join: %w", err)
	}
	return i.joinErr
}

// ready waits until joining has ended.
func (i *inlet) ready(ctx context.Context) error {
	select {
	case <-i.joined:
		return i.joinErr
	case <-ctx.Done():
		return fmt.Errorf("nccl: join: %w", ctx.Err())
	}
}

// begin starts the transfer of that number when it is its turn. Its slot is free.
func (i *inlet) begin(ctx context.Context, number uint64, at, bytes int64) (kernels.Pending, error) {
	for {
		i.mu.Lock()
		if number <= i.next {
			break
		}
		turn := i.turn
		i.mu.Unlock()
		select {
		case <-turn:
		case <-ctx.Done():
			return nil, fmt.Errorf("push %d: %w", number, ctx.Err())
		}
	}
	defer i.mu.Unlock()
	if number < i.next {
		return nil, kvconn.ErrForgotten
	}
	p, err := i.link.Transfer(ctx, at, bytes, nil)
	if err != nil {
		return nil, err
	}
	i.under[(number-1)%uint64(len(i.under))] = p
	i.next++
	close(i.turn)
	i.turn = make(chan struct{})
	return p, nil
}

// Receive implements stage.Inlet.
func (i *inlet) Receive(ctx context.Context, number uint64, at, bytes int64) error {
	if err := i.ready(ctx); err != nil {
		return err
	}
	p, err := i.begin(ctx, number, at, bytes)
	if err == nil {
		err = p.Wait(ctx)
	}
	if err != nil {
		return err
	}
	return i.link.Ready(ctx) // a dying peer's device may have sent only part
}

// Landed implements stage.Inlet: a push comes only when asked for.
func (i *inlet) Landed() uint64 { return 0 }

// Free implements stage.Inlet: to the sender a slot is free once it was sent.
func (i *inlet) Free(uint64) {}

// Close implements stage.Inlet.
func (i *inlet) Close(ctx context.Context) error {
	err := abort(ctx, i.link, i.under)
	select {
	case <-i.joined:
	case <-ctx.Done():
		err = errors.Join(err, fmt.Errorf("nccl: %w: joining goes on", kvconn.ErrStuck))
	}
	return err
}

var (
	_ stage.Outlet = (*outlet)(nil)
	_ stage.Inlet  = (*inlet)(nil)
)
