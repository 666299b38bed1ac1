// Package kvconntest tests kvconn and its transports: an in-memory transport that works
// under testing/synctest, a fault layer over any transport, a fake KV memory, and the
// conformance suite Run.
package kvconntest

import (
	"cmp"
	"context"
	"net"
	"sync"

	"github.com/xpyd/xpyd/internal/fakenet"
)

// Memory is a transport inside one process: a fakenet of one host, whose listeners have names.
type Memory struct {
	host *fakenet.Host

	mu    sync.Mutex
	named map[string]string // their addresses
}

const memoryHost = "127.0.0.1"

// NewMemory makes a transport whose connections hold limit bytes a direction.
func NewMemory(limit int) *Memory {
	return &Memory{host: fakenet.New(0, limit).Host(memoryHost), named: map[string]string{}}
}

// Name returns "memory".
func (m *Memory) Name() string { return "memory" }

// Listen listens at a free address, which may also be dialled by name.
func (m *Memory) Listen(name string) (net.Listener, error) {
	ln, err := m.host.Listen("tcp", memoryHost+":0")
	if err == nil {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.named[name] = ln.Addr().String()
	}
	return ln, err
}

// Dial connects to a listener of the same Memory.
func (m *Memory) Dial(ctx context.Context, addr string) (net.Conn, error) {
	m.mu.Lock()
	addr = cmp.Or(m.named[addr], addr)
	m.mu.Unlock()
	return m.host.DialContext(ctx, "tcp", addr)
}
