package fleet

import (
	"fmt"

	"github.com/nats-io/nats.go"
)

// subjectShare carries what routers tell each other; see router/share.
const subjectShare = "xpyd.router.share"

// Bounds of messages that wait for their reader.
const (
	busBacklog      = 1024
	busBacklogBytes = 8 << 20
)

// Bus carries messages among the routers of a fleet. It drops what it cannot send at once.
type Bus struct{ c *Conn }

// Bus returns the connection's bus. It ends with the connection.
func (c *Conn) Bus() Bus { return Bus{c} }

// Publish sends to all subscribers, the sender's own included.
func (b Bus) Publish(msg []byte) error { return b.c.nc.Publish(subjectShare, msg) }

// Subscribe calls f for each message, one at a time, until stop has returned.
func (b Bus) Subscribe(f func(msg []byte)) (stop func(), err error) {
	idle := make(chan struct{}, 1)
	idle <- struct{}{}
	sub, err := b.c.nc.Subscribe(subjectShare, func(m *nats.Msg) {
		if _, ok := <-idle; ok { // not stopped
			f(m.Data)
			idle <- struct{}{}
		}
	})
	if err == nil {
		err = sub.SetPendingLimits(busBacklog, busBacklogBytes)
	}
	if err != nil {
		return nil, fmt.Errorf("subscribe to %s: %w", subjectShare, err)
	}
	return func() {
		_ = sub.Unsubscribe() // fails only if the connection is closed
		<-idle                // f is not running
		close(idle)
	}, nil
}
