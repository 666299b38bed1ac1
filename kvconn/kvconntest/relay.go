package kvconntest

import (
	"context"
	"net"
	"sync"

	"github.com/xpyd/xpyd/kvconn"
)

// relay is a transport on which the faults happen between the peers and not
// in them: both have plain connections of the transport below, so that they
// use them as they would without a test in the way.
type relay struct {
	kvconn.Transport
	ch   *Chaos
	addr string // any free one
	wg   sync.WaitGroup
}

// Dial connects to a relaying pair of goroutines, which end with either side.
func (r *relay) Dial(ctx context.Context, addr string) (net.Conn, error) {
	ln, err := r.Transport.Listen(r.addr)
	if err != nil {
		return nil, err
	}
	defer ln.Close()
	far, err := r.Transport.Dial(ctx, addr)
	if err != nil {
		return nil, err
	}
	mine, err := r.Transport.Dial(ctx, ln.Addr().String())
	if err != nil {
		far.Close()
		return nil, err
	}
	near, err := ln.Accept()
	if err != nil {
		far.Close()
		mine.Close()
		return nil, err
	}
	up, down := r.ch.wrap(far, ToSender), r.ch.wrap(near, ToReceiver)
	r.wg.Go(func() { pump(near, up, down) })
	r.wg.Go(func() { pump(far, down, up) })
	return mine, nil
}

// pump copies from src into dst; at the end of either both connections end.
func pump(src net.Conn, dst, other net.Conn) {
	defer dst.Close()
	defer other.Close()
	buf := make([]byte, 64<<10)
	for {
		n, err := src.Read(buf)
		if n > 0 {
			if _, err := dst.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}
