package zmtp

import (
	"fmt"
	"net"
	"slices"
	"sync"

	"github.com/xpyd/xpyd/internal/scarce"
)

// maxStrangers bounds the connections that have not yet shown whether they may come in; fewer if
// the limit of open files is low. One more displaces the oldest. Even if strangers return fast,
// a client with a key has the few milliseconds that it needs to show it.
const (
	maxStrangers  = 256
	strangersPart = 16
)

// server accepts connections, shakes hands and serves each on its own goroutine. It is the
// common part of Publisher and Router.
type server struct {
	ln     net.Listener
	cfg    Config
	most   int // admitted connections
	serve  func(*Conn)
	places chan struct{} // for strangers
	wg     sync.WaitGroup

	mu        sync.Mutex
	closed    bool
	strangers []net.Conn         // oldest first
	guests    map[net.Conn]*Door // with the door they came in by; nil without CURVE
}

func (s *server) listen(addr string, t Type, cfg Config, most int, serve func(*Conn)) error {
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		return fmt.Errorf("zmtp listen: %w", err)
	}
	cfg.Type = t
	s.cfg, s.most, s.serve, s.guests = cfg.withDefaults(), most, serve, map[net.Conn]*Door{}
	s.ln = scarce.Listener(ln, cfg.Log, cfg.Failed)
	s.places = make(chan struct{}, min(maxStrangers, max(1, scarce.Files()/strangersPart)))
	s.wg.Go(s.accept)
	return nil
}

// Addr returns the listener's address.
func (s *server) Addr() net.Addr { return s.ln.Addr() }

func (s *server) accept() {
	for {
		raw, err := s.ln.Accept()
		if err != nil { // closed
			return
		}
		if !s.addStranger(raw) {
			raw.Close()
			return
		}
		s.wg.Go(func() {
			c, err := newConn(raw, s.cfg, func() error { return s.admit(raw) })
			if err == nil {
				if s.enter(raw, c.door) {
					s.serve(c)
				}
				c.Close()
			} else if s.cfg.Refused != nil {
				s.cfg.Refused(err)
			}
			s.leave(raw)
		})
	}
}

// addStranger gives a stranger a place, if need be that of the oldest, whose goroutine then
// ends. It reports false when the server closes.
func (s *server) addStranger(raw net.Conn) bool {
	select {
	case s.places <- struct{}{}:
	default:
		s.mu.Lock()
		if len(s.strangers) > 0 {
			s.strangers[0].Close()
		}
		s.mu.Unlock()
		s.places <- struct{}{}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		<-s.places
		return false
	}
	s.strangers = append(s.strangers, raw)
	return true
}

// removeStranger reports whether a connection was a stranger's, and removes it; s.mu is held.
func (s *server) removeStranger(raw net.Conn) bool {
	i := slices.Index(s.strangers, raw)
	if i < 0 {
		return false
	}
	s.strangers = slices.Delete(s.strangers, i, i+1)
	<-s.places
	return true
}

// admit makes a stranger a guest, unless there are too many.
func (s *server) admit(raw net.Conn) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.guests) >= s.most {
		return fmt.Errorf("%w: %d", ErrFull, s.most)
	}
	if s.closed || !s.removeStranger(raw) {
		return net.ErrClosed
	}
	s.guests[raw] = nil
	return nil
}

// enter records a guest's door; false if that is closed already.
func (s *server) enter(raw net.Conn, by *Door) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.guests[raw] = by
	return by.among(s.cfg.Doors)
}

// Judge ends the connections whose door is no longer among Config.Doors. Call it when these have
// changed.
func (s *server) Judge() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for raw, by := range s.guests {
		if !by.among(s.cfg.Doors) {
			raw.Close()
		}
	}
}

// among reports whether there is a door with the same key; nil always counts.
func (d *Door) among(now func() []Door) bool {
	return d == nil || slices.ContainsFunc(now(), func(o Door) bool { return o.Key.Equal(d.Key) })
}

// leave closes a connection and forgets it.
func (s *server) leave(raw net.Conn) {
	raw.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.removeStranger(raw)
	delete(s.guests, raw)
}

// Close ends the listener and all connections, and waits.
func (s *server) Close() error {
	s.mu.Lock()
	s.closed = true
	err := s.ln.Close()
	for _, raw := range s.strangers {
		raw.Close()
	}
	for raw := range s.guests {
		raw.Close()
	}
	s.mu.Unlock()
	s.wg.Wait()
	return err
}
