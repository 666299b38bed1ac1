// Package soak tests a whole fleet for a long time under everything that an
// operator does and everything that a machine does to it: see TestEdgeSoak.
package soak

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"
)

// side is who is behind a connection to NATS.
type side string

const (
	routerSide  side = "router"
	workersSide side = "workers"
)

// wire stands between a NATS server and all its clients. It reads a client's
// CONNECT, so that the router alone, or the workers alone, can be cut off.
type wire struct {
	addr, server string

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu    sync.Mutex
	cut   map[side]bool
	conns map[net.Conn]side // a client's; its server's ends with it
}

func newWire(t testing.TB, server string) *wire {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w := &wire{addr: ln.Addr().String(), server: server, cut: map[side]bool{}, conns: map[net.Conn]side{}}
	w.ctx, w.cancel = context.WithCancel(context.Background())
	stop := context.AfterFunc(w.ctx, func() { ln.Close() })
	w.wg.Go(func() {
		defer stop()
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			w.wg.Go(func() { w.carry(c) })
		}
	})
	t.Cleanup(func() {
		w.cancel()
		w.wg.Wait()
	})
	return w
}

// carry joins one client with the server, unless its side is cut off.
func (w *wire) carry(client net.Conn) {
	defer client.Close()
	server, err := (&net.Dialer{Timeout: time.Second}).DialContext(w.ctx, "tcp", w.server)
	if err != nil {
		return
	}
	defer server.Close()
	stop := context.AfterFunc(w.ctx, func() {
		client.Close()
		server.Close()
	})
	defer stop()
	down := make(chan struct{})
	go func() {
		defer close(down)
		_, _ = io.Copy(client, server) // either end may go at any time
		client.Close()
	}()
	defer func() {
		server.Close()
		<-down
	}()
	in := bufio.NewReaderSize(client, 64<<10)
	hello, err := in.ReadSlice('\n')
	if err != nil {
		return
	}
	who, err := sideOf(hello)
	if err != nil || !w.enter(client, who) {
		return
	}
	defer w.leave(client)
	if _, err := server.Write(hello); err != nil {
		return
	}
	_, _ = io.Copy(server, in) // as above
}

// sideOf reads the CONNECT line, which names the client.
func sideOf(line []byte) (side, error) {
	body, ok := bytes.CutPrefix(line, []byte("CONNECT "))
	if !ok {
		return "", fmt.Errorf("%.40q is no CONNECT", line)
	}
	var connect struct{ Name string }
	if err := json.Unmarshal(body, &connect); err != nil {
		return "", err
	}
	if connect.Name == string(routerSide) {
		return routerSide, nil
	}
	return workersSide, nil
}

func (w *wire) enter(c net.Conn, s side) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.cut[s] {
		w.conns[c] = s
	}
	return !w.cut[s]
}

func (w *wire) leave(c net.Conn) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.conns, c)
}

// set cuts a side off, or lets it come back.
func (w *wire) set(s side, cut bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cut[s] = cut
	for c, of := range w.conns {
		if cut && of == s {
			c.Close()
		}
	}
}
