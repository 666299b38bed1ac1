// Package local makes connections between processes of one user on one machine
// over abstract unix sockets. On them the dialler can lend the listener a
// descriptor, and learn when the listener has let go of it. The transports that
// share memory (kvconn/shm, kvconn/cudaipc, kvconn/pinned) build on it.
//
// Nothing has a name in a folder, so nothing is left behind, however a process
// ends. The two ends trust each other as far as processes of one user must: the
// kernel names the peer's user for every connection (SO_PEERCRED).
//
// Non-goals: crossing network namespaces, which abstract sockets do not, and
// systems other than Linux: there New returns ErrUnsupported.
package local

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"strings"
)

// ErrUnsupported is returned by New where the kernel lacks what is needed.
var ErrUnsupported = errors.New("not on this system")

// Transport is a kvconn.Transport whose connections can lend. It holds nothing open.
type Transport struct {
	name  string
	dress func(*Conn) net.Conn
}

// Name returns the transport's name, which is the scheme of its addresses.
func (t *Transport) Name() string { return t.name }

// maxName is the room in a unix socket's address beside its leading zero.
const maxName = 100

// socketName turns an address, "shm:NAME", into package net's name of the abstract
// socket.
func (t *Transport) socketName(addr string) (string, error) {
	name, ok := strings.CutPrefix(addr, t.name+":")
	if !ok || name == "" || len(name) > maxName || strings.ContainsAny(name, "\x00@") {
		return "", fmt.Errorf("%s: %q is not %[1]s:NAME of at most %[3]d bytes", t.name, addr, maxName)
	}
	return "@" + name, nil
}

// freeName is an address that is not in use.
func (t *Transport) freeName() string {
	var b [12]byte
	rand.Read(b[:]) // never fails (crypto/rand)
	return t.name + ":xpyd-kv-" + hex.EncodeToString(b[:])
}
