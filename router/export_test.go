package router

import (
	"net"
	"syscall"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router/flight"
)

// OnDial makes dialling workers fail with what f returns; before Start.
func (r *Router) OnDial(f func() error) {
	dialer := net.Dialer{Control: func(_, _ string, _ syscall.RawConn) error { return f() }}
	r.up.Dial = dialer.DialContext
}

// Ask asks a worker.
func (r *Router) Ask(m *fleet.Member, q flight.Question) (*flight.Reply, error) {
	return r.flights.Ask(m, q)
}

// Spawn runs f until the router is closed.
func (r *Router) Spawn(f func()) bool { return r.spawn(f) }

// FitConns is how many connections the two listeners get.
func (c *Config) FitConns(files int) (public, admin int) { return c.fitConns(files) }

// Knocking reports whether a connection is being tried.
func (r *Router) Knocking() bool { return r.Members.Knocking() }
