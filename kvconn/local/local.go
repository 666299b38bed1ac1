// Package local makes connections between processes of one user on one machine
// over unix sockets. On them the dialler can lend the listener a
// descriptor, and learn when the listener has let go of it. The transports that
// share memory (kvconn/shm, kvconn/cudaipc, kvconn/pinned) build on it.
//
// The sockets have abstract names, which lead to processes of the same network
// namespace; nothing of them is left behind, however a process ends. Containers, which
// have a network each, share a folder instead, in which the sockets are files. The two
// ends trust each other as far as processes of one user must: the
// kernel names the peer's user for every connection (SO_PEERCRED).
//
// Non-goals: systems other than Linux: there New returns ErrUnsupported.
package local

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"
)

// ErrUnsupported is returned by New where the kernel lacks what is needed.
var ErrUnsupported = errors.New("not on this system")

// Transport is a kvconn.Transport whose connections can lend. It holds nothing open.
type Transport struct {
	name   string
	folder string // of the sockets; "": abstract names
	dress  func(*Conn) net.Conn
}

// Name returns the transport's name, which is the scheme of its addresses.
func (t *Transport) Name() string { return t.name }

// maxName is the room in a unix socket's address beside its leading zero.
const maxName = 100

// socketName turns an address, "shm:NAME", into package net's name of the socket. Peers
// say what NAME is, so it never leads out of the folder.
func (t *Transport) socketName(addr string) (string, error) {
	name, ok := strings.CutPrefix(addr, t.name+":")
	if !ok || name == "" || len(name) > maxName || strings.ContainsAny(name, "\x00@/") {
		return "", fmt.Errorf("%s: %q is not %[1]s:NAME of at most %[3]d bytes", t.name, addr, maxName)
	}
	if t.folder == "" {
		return "@" + name, nil
	}
	return filepath.Join(t.folder, socketPrefix+name), nil
}

// freeName is an address that is not in use.
func (t *Transport) freeName() string {
	var b [12]byte
	rand.Read(b[:]) // never fails (crypto/rand)
	return t.name + ":xpyd-kv-" + hex.EncodeToString(b[:])
}

// In a folder a socket is a file with this prefix, beside one with its lock.
const (
	socketPrefix = "s."
	lockPrefix   = "l."
)

// MaxFolder is how long the path of a folder may be, in bytes: the kernel's room for a
// socket's path, less that for the names that Listen makes.
const MaxFolder = 107 - len("/"+socketPrefix+"xpyd-kv-") - 2*12
