package fleet

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/xpyd/xpyd/internal/lobby"
	"github.com/xpyd/xpyd/internal/scarce"
	"github.com/xpyd/xpyd/internal/trust"
)

// door lets members into the embedded server, which itself listens on no port. In a pinned
// connection they first prove that they have one of the ring's secrets.
type door struct {
	ln      net.Listener
	ns      *server.Server
	ring    *trust.Ring
	outer   *trust.TLS // around the pinned connection; nil: none
	pinned  *tls.Config
	refused *refusals
	hall    *lobby.Lobby
	most    int // members

	ctx  context.Context // of all connections
	end  context.CancelFunc
	wg   sync.WaitGroup
	mu   sync.Mutex
	open map[*visit]struct{}
}

// visit is a member's connection.
type visit struct {
	net.Conn
	by trust.Secret // used to open it
}

const (
	doorPatience = 5 * time.Second // for a handshake
	visitBuffer  = 8 << 10
)

// openDoor owns ln from now on.
func openDoor(ln net.Listener, ns *server.Server, ring *trust.Ring, outer *trust.TLS, log *slog.Logger) *door {
	// Members get a quarter of the file descriptors, strangers an eighth, users the rest.
	files := scarce.Files()
	d := &door{ln: scarce.Listener(ln, log, nil), ns: ns, ring: ring, outer: outer, pinned: ring.PinnedServer(),
		refused: &refusals{log: log, from: map[string]int{}}, hall: lobby.New(min(maxGuests, files/8)), most: min(maxClients, files/4),
		open: map[*visit]struct{}{}}
	d.ctx, d.end = context.WithCancel(context.Background())
	d.wg.Go(d.receive)
	return d
}

// receive accepts connections until close.
func (d *door) receive() {
	for {
		c, err := d.ln.Accept()
		if err != nil {
			return // closed
		}
		g := d.hall.Enter(c)
		d.wg.Go(func() {
			defer c.Close()
			stop := context.AfterFunc(d.ctx, func() { c.Close() })
			defer stop()
			v, err := d.meet(c)
			d.hall.Leave(g)
			if err != nil {
				if trust.Refused(err) {
					d.refused.add(c.RemoteAddr(), time.Now())
				}
				return
			}
			if d.admit(v) {
				d.host(v)
				d.leave(v)
			}
		})
	}
}

// meet does the handshake.
func (d *door) meet(c net.Conn) (*visit, error) {
	if err := c.SetDeadline(time.Now().Add(doorPatience)); err != nil {
		return nil, err
	}
	if d.outer != nil {
		c = tls.Server(c, d.outer.Server())
	}
	t := tls.Server(c, d.pinned)
	if err := t.HandshakeContext(d.ctx); err != nil {
		return nil, err
	}
	by, ok := d.ring.PinnedBy(t.ConnectionState())
	if !ok {
		return nil, &trust.PinError{}
	}
	return &visit{t, by}, c.SetDeadline(time.Time{})
}

// admit counts a member in. It reports false if there are too many, or if its secret is no
// longer in force.
func (d *door) admit(v *visit) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, known := d.ring.Shared(v.by.ID()); !known || len(d.open) >= d.most {
		return false
	}
	d.open[v] = struct{}{}
	return true
}

func (d *door) leave(v *visit) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.open, v)
}

// host passes bytes between a member and the server until either closes.
func (d *door) host(v *visit) {
	inside, err := d.ns.InProcessConn()
	if err != nil {
		return // the server is shut down
	}
	var wg sync.WaitGroup
	wg.Go(func() { pump(inside, v, 0) })
	pump(v, inside, writeDeadline) // like the server, cuts off a member that does not read
	wg.Wait()
}

// pump copies until one end closes, then closes the other. A limit above 0 bounds each write.
func pump(to, from net.Conn, limit time.Duration) {
	defer to.Close()
	defer from.Close()
	buf := make([]byte, visitBuffer)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			if limit > 0 && to.SetWriteDeadline(time.Now().Add(limit)) != nil {
				return
			}
			if _, err := to.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// renew ends the connections of secrets that are no longer in force.
func (d *door) renew() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for v := range d.open {
		if _, known := d.ring.Shared(v.by.ID()); !known {
			v.Close()
		}
	}
}

// close ends all connections and waits for them.
func (d *door) close() {
	d.end()
	d.ln.Close()
	d.wg.Wait()
}

// enter opens a member's connection to the door at addr.
func (c *Conn) enter(ctx context.Context, addr string, s trust.Secret) (net.Conn, error) {
	bare, err := c.cfg.Dial(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	conf, err := trust.PinnedClient(s)
	if err != nil {
		return nil, errors.Join(err, bare.Close())
	}
	under := bare
	if c.outer != nil {
		under = tls.Client(bare, c.outer.Client())
	}
	t := tls.Client(under, conf)
	if err := t.HandshakeContext(ctx); err != nil {
		bare.Close()
		return nil, err
	}
	return t, nil
}
