package kvevents_test

import (
	"io"
	"net"
	"sync"
	"testing"
)

// proxy forwards connections to addr; cut ends those that there are.
func proxy(t *testing.T, addr string) (front string, cut func()) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var conns []net.Conn
	var wg sync.WaitGroup
	cut = func() {
		mu.Lock()
		defer mu.Unlock()
		for _, c := range conns {
			c.Close()
		}
		conns = nil
	}
	wg.Go(func() {
		for {
			a, err := ln.Accept()
			if err != nil {
				return
			}
			b, err := net.Dial("tcp", addr)
			if err != nil {
				a.Close()
				continue
			}
			mu.Lock()
			conns = append(conns, a, b)
			mu.Unlock()
			for _, pair := range [][2]net.Conn{{a, b}, {b, a}} {
				wg.Go(func() {
					io.Copy(pair[0], pair[1])
					pair[0].Close()
				})
			}
		}
	})
	t.Cleanup(func() { ln.Close(); cut(); wg.Wait() })
	return ln.Addr().String(), cut
}
