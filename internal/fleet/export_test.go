package fleet

import (
	"log/slog"
	"net"
	"time"
)

// SetPaused models a stopped process: nothing is sent while it is on.
func (a *Announcer) SetPaused(on bool) { a.paused.Store(on) }

// Publish sends raw bytes on the bus, as a stranger could.
func (c *Conn) Publish(subject string, payload []byte) error { return c.nc.Publish(subject, payload) }

// Reconnects is how often it has reconnected, once what was sent so far has arrived.
func (c *Conn) Reconnects() (uint64, error) {
	err := c.nc.Flush()
	return c.nc.Stats().Reconnects, err
}

// RetryDelay is how long a connection waits before its nth attempt.
var RetryDelay = retryDelay

// Refusals counts who was turned away.
type Refusals = refusals

// NewRefusals makes an empty count.
func NewRefusals(log *slog.Logger) *Refusals { return &refusals{log: log, from: map[string]int{}} }

// Add counts one.
func (r *Refusals) Add(addr net.Addr, now time.Time) { r.add(addr, now) }

// MaxGuests is how many strangers may stand at the door.
const MaxGuests = maxGuests

// ClusterURL is the URL for other routers' ClusterRoutes, "" without a cluster. Without a
// Ring it holds credentials.
func (s *Server) ClusterURL() string {
	if s.opts.Cluster.Name == "" {
		return ""
	}
	return s.url("nats-route", s.ns.ClusterAddr(), s.opts.Cluster.Username, s.opts.Cluster.Password)
}
