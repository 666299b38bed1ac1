package kvconn

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/kvlayout"
)

// handlerFunc is a Handler.
type handlerFunc func(ctx context.Context, o *Outgoing)

func (f handlerFunc) OnTicket(ctx context.Context, o *Outgoing) { f(ctx, o) }

// newStubSender makes a sender's end of a session with so many bulk connections, none of
// them bound yet.
func newStubSender(t *testing.T, bulk uint8, h handlerFunc) *sender {
	t.Helper()
	m, err := NewMetrics(nil)
	if err != nil {
		t.Fatal(err)
	}
	cfg := DefaultConfig()
	cfg.Identity = Identity{PeerID: PeerID{ID: "prefill-0", Epoch: 1}, Numerics: "test-1",
		Layout: kvlayout.Plain(2, 2, 1, 2, "f32")}
	srv, err := NewServer(cfg, slog.New(slog.NewTextHandler(io.Discard, nil)), m)
	if err != nil {
		t.Fatal(err)
	}
	return newSender(srv, &hello{Identity: cfg.Identity, Bulk: bulk}, &frameConn{conn: sinkConn(t), version: ProtocolMax}, h)
}

// sinkConn is a connection whose other end reads everything and says nothing.
func sinkConn(t *testing.T) net.Conn {
	c, peer := net.Pipe()
	t.Cleanup(func() { peer.Close() })
	go io.Copy(io.Discard, peer)
	return c
}

// deviceConn brings a window whose pushes are over at once; whoever has bound it is held
// up until it may go on.
type deviceConn struct {
	net.Conn
	pushed chan struct{} // a push was begun
	goOn   chan struct{}
}

func (c *deviceConn) Offer(*Shared) (Hold, []byte, error) { return nil, nil, nil }
func (c *deviceConn) Map(*Shared, []byte) (Window, error) { return c, nil }
func (c *deviceConn) Push(int, []Move) (uint64, error)    { c.pushed <- struct{}{}; return 1, nil }
func (c *deviceConn) Await(uint64) error                  { return nil }
func (c *deviceConn) Close() error                        { return c.Conn.Close() }
func (c *deviceConn) SetDeadline(by time.Time) (err error) {
	if by.IsZero() {
		<-c.goOn
	}
	return c.Conn.SetDeadline(by)
}

// blockSource is a source whose blocks a device pushes.
type blockSource struct{ stubSource }

func (blockSource) Block(layer, index, firstPos, rows int) (int32, bool) { return int32(index), true }

// TestPushesBesideABind: pushes over one connection, begun before the one that brought
// the peer's memory runs, are awaited too, also when the session ends meanwhile: else
// their ticket never does.
func TestPushesBesideABind(t *testing.T) {
	p := newStubSender(t, 2, func(_ context.Context, o *Outgoing) {
		if err := o.Accept(blockSource{}); err != nil {
			t.Error(err)
		}
		o.Push(0, []int{0})
		<-o.Done()
	})
	layout := p.cfg.Identity.Layout
	first := &deviceConn{Conn: sinkConn(t), pushed: make(chan struct{}, 1), goOn: make(chan struct{})}
	pool := *DevicePool(layout, 4)
	bound := make(chan error)
	go func() {
		bound <- p.bind(&frameConn{conn: first, version: ProtocolMax}, &bind{Pool: pool})
	}()
	for ready := false; !ready; time.Sleep(time.Millisecond) {
		p.mu.Lock()
		ready = p.bound == 1
		p.mu.Unlock()
	}
	if err := p.bind(newBulkConn(sinkConn(t), 64), &bind{Index: 1}); err != nil {
		t.Fatal(err)
	}
	if err := p.onTicket(&request{ID: 1, Positions: 2, DestBlockTokens: 2, DeadlineMS: 60_000, Tokens: []int32{1, 2}, Dest: []Dest{{3, 1}}}); err != nil {
		t.Fatal(err)
	}
	<-first.pushed
	p.fail(ticket.Dead, errClosed)
	close(first.goOn)
	if err := <-bound; err == nil {
		t.Error("bound to a session that is over")
	}
	over := make(chan struct{})
	go func() {
		defer close(over)
		p.wait()
	}()
	select {
	case <-over:
	case <-time.After(time.Minute):
		t.Fatalf("the session does not end: %+v", p.ledger())
	}
}

// TestEndsAsItsSession: a handler that gives up because the session is over says nothing
// of its own, neither to the ledger nor to the peer.
func TestEndsAsItsSession(t *testing.T) {
	p := newStubSender(t, 1, nil)
	g, err := newOutgoing(p, &request{ID: 1, Positions: 2, DestBlockTokens: 2, DeadlineMS: 60_000, Tokens: []int32{1, 2}, Dest: []Dest{{3, 1}}})
	if err != nil {
		t.Fatal(err)
	}
	p.fail(ticket.Dead, errSilent)
	g.end(ticket.Late, errDeadline, true)
	if err := g.Err(); OutcomeOf(err, "") != ticket.Dead || !errors.Is(err, errSilent) {
		t.Errorf("it ended with %v", err)
	}
	if len(p.out) > 0 {
		t.Errorf("the peer is told %+v", <-p.out)
	}
	p.wait()
}
