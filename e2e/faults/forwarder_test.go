package faults

import (
	"net"
	"slices"
	"sync"
	"testing"
)

// forwarder accepts connections in front of a server, until the test's end.
type forwarder struct {
	wg sync.WaitGroup

	mu    sync.Mutex
	conns []net.Conn // of both sides
}

// start listens at addr and has carry carry each connection to the server. It returns where it
// listens.
func (f *forwarder) start(t *testing.T, addr, server string, carry func(client, server net.Conn)) string {
	t.Helper()
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	f.wg.Go(func() {
		for {
			client, err := ln.Accept()
			if err != nil {
				return
			}
			to, err := net.Dial("tcp", server)
			if err != nil {
				client.Close()
				continue
			}
			f.mu.Lock()
			f.conns = append(f.conns, client, to)
			f.mu.Unlock()
			f.wg.Go(func() {
				carry(client, to)
				f.mu.Lock()
				defer f.mu.Unlock()
				f.conns = slices.DeleteFunc(f.conns, func(c net.Conn) bool { return c == client || c == to })
			})
		}
	})
	t.Cleanup(func() {
		ln.Close()
		f.mu.Lock()
		for _, c := range f.conns {
			c.Close()
		}
		f.mu.Unlock()
		f.wg.Wait()
	})
	return ln.Addr().String()
}
