package router

import "syscall"

// OnDial makes dialling workers fail with what f returns; before Start.
func (r *Router) OnDial(f func() error) {
	r.up.Dialer.Control = func(_, _ string, _ syscall.RawConn) error { return f() }
}

// Spawn runs f until the router is closed.
func (r *Router) Spawn(f func()) bool { return r.spawn(f) }

// FitConns is how many connections the two listeners get.
func (c *Config) FitConns(files int) (public, admin int) { return c.fitConns(files) }

// Knocking reports whether a connection is being tried.
func (r *Router) Knocking() bool { return r.Members.Knocking() }
