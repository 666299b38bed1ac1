// Package shm is kvconn's transport between processes of one user on one
// machine: unix sockets for what is said, shared memory for the rows.
//
// A receiver whose block pool lies in a sealed memory file (internal/memfd)
// offers it on the first connection of a session; the sender maps it and
// copies rows straight into the blocks. The sockets are abstract, so that
// nothing is left in any folder, however a process ends.
//
// The two ends trust each other as far as processes of one user must: the peer
// of every connection is asked of the kernel (SO_PEERCRED), and so is what the
// offered descriptor is. What kvconn guarantees on top is in its DESIGN.md,
// "Shared memory".
//
// Non-goals: crossing network namespaces, which abstract sockets do not, and
// systems other than Linux: there New says ErrUnsupported.
package shm

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
)

// ErrUnsupported is what New returns where the kernel lacks what is needed.
var ErrUnsupported = errors.New("shm: not on this system")

// Name is the transport's name and the scheme of its addresses.
const Name = "shm"

// Transport implements kvconn.Transport. It holds nothing open.
type Transport struct{}

// Name returns "shm".
func (t *Transport) Name() string { return Name }

// maxName is what fits a unix socket's address besides its leading zero.
const maxName = 100

// socketName turns an address, "shm:NAME", into what package net calls the
// abstract socket.
func socketName(addr string) (string, error) {
	name, ok := strings.CutPrefix(addr, Name+":")
	if !ok || name == "" || len(name) > maxName || strings.ContainsAny(name, "\x00@") {
		return "", fmt.Errorf("shm: %q is not %s:NAME of at most %d bytes", addr, Name, maxName)
	}
	return "@" + name, nil
}

// freeName is an address that nobody has.
func freeName() string {
	var b [12]byte
	rand.Read(b[:]) // never fails (crypto/rand)
	return Name + ":xpyd-kv-" + hex.EncodeToString(b[:])
}

// Addr is a listener's address.
type Addr string

// Network returns "shm".
func (a Addr) Network() string { return Name }

// String is what Dial takes.
func (a Addr) String() string { return string(a) }
