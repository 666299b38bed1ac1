package faults

import (
	"io"
	"net"
	"syscall"
	"testing"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/e2e/unbroken"
	"github.com/xpyd/xpyd/internal/fleet"
)

// TestUnbroken: see package unbroken. The workers are processes.
func TestUnbroken(t *testing.T) {
	t.Parallel()
	r := cluster.Alone(t)
	at := cluster.Port(t)
	w := &processes{Router: r, wire: newWire(t, at), procs: map[string]*cluster.Process{},
		args: map[string][]string{unbroken.Wired: {"--listen", at, "--advertise", wireHost, "--kv-listen", wireHost + ":0"}}}
	r.Worker(t, fleet.Prefill, "--id", "prefill-0", "--model", tinyModel(t))
	s := unbroken.Strikes{Router: r, Workers: w, Client: cluster.NewClient(t), Patience: afterKnown + slack}
	strikes, seed := unbroken.Asked(t, "XPYD_UNBROKEN", 12)
	s.Run(t, strikes, seed)
}

// processes are decode workers. The router reaches the last by a wire.
type processes struct {
	*cluster.Router
	wire  *wire
	args  map[string][]string
	procs map[string]*cluster.Process
}

func (p *processes) Start(t testing.TB, id string) {
	p.procs[id] = p.Worker(t, fleet.Decode, append([]string{"--id", id, "--model", tinyModel(t)}, p.args[id]...)...)
}

func (p *processes) Kill(id string)     { p.procs[id].Kill() }
func (p *processes) Stop(id string)     { p.procs[id].Signal(syscall.SIGSTOP) }
func (p *processes) Continue(id string) { p.procs[id].Signal(syscall.SIGCONT) }
func (p *processes) Leave(id string)    { p.procs[id].Signal(syscall.SIGTERM) }
func (p *processes) Ended(id string)    { <-p.procs[id].Done() }
func (p *processes) Cut()               { p.wire.cut() }

// wire carries connections to a server, and can break them all.
type wire struct{ forwarder }

// wireHost is another address of this host: a worker's host can be advertised, its port cannot.
const wireHost = "127.0.0.2"

// newWire listens at the port of to.
func newWire(t *testing.T, to string) *wire {
	t.Helper()
	_, port, err := net.SplitHostPort(to)
	if err != nil {
		t.Fatal(err)
	}
	w := &wire{}
	w.start(t, net.JoinHostPort(wireHost, port), to, func(client, server net.Conn) {
		pass := func(to, from net.Conn) {
			_, _ = io.Copy(to, from) // one end has left
			client.Close()
			server.Close()
		}
		w.wg.Go(func() { pass(client, server) })
		pass(server, client)
	})
	return w
}

// cut resets all connections.
func (w *wire) cut() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range w.conns {
		_ = c.(*net.TCPConn).SetLinger(0) // makes it a reset
		c.Close()
	}
}
