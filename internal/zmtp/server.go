package zmtp

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"time"
)

// server accepts connections, shakes hands and hands each to a function on a
// goroutine of its own. Both ends of this package that listen use it.
type server struct {
	ln   net.Listener
	cfg  Config
	most int
	run  func(*Conn)
	quit chan struct{}
	wg   sync.WaitGroup

	mu     sync.Mutex
	closed bool
	conns  map[net.Conn]struct{}
}

func (s *server) listen(addr string) error {
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		return fmt.Errorf("zmtp listen: %w", err)
	}
	s.ln, s.conns, s.quit = ln, map[net.Conn]struct{}{}, make(chan struct{})
	s.wg.Go(s.accept)
	return nil
}

func (s *server) accept() {
	pause := time.NewTimer(0)
	defer pause.Stop()
	for {
		raw, err := s.ln.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // of one connection, or of descriptors that will come free
			pause.Reset(50 * time.Millisecond)
			select {
			case <-pause.C:
			case <-s.quit:
			}
			continue
		}
		if !s.add(raw) {
			raw.Close()
			continue
		}
		s.wg.Go(func() {
			defer s.remove(raw)
			c, err := NewConn(raw, s.cfg)
			if err == nil {
				s.run(c)
				c.Close()
			}
		})
	}
}

// add counts a connection in, unless there are too many.
func (s *server) add(raw net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || len(s.conns) >= s.most {
		return false
	}
	s.conns[raw] = struct{}{}
	return true
}

func (s *server) remove(raw net.Conn) {
	raw.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, raw)
}

// close ends the listener and all connections, and waits.
func (s *server) close() error {
	s.mu.Lock()
	if !s.closed {
		close(s.quit)
	}
	s.closed = true
	err := s.ln.Close()
	for raw := range s.conns {
		raw.Close()
	}
	s.mu.Unlock()
	s.wg.Wait()
	return err
}
