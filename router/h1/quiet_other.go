//go:build !linux

package h1

import "net"

// quiet cannot be told cheaply here; a stale connection costs a retry.
func quiet(net.Conn) bool { return true }

// boundUnsent does nothing here.
func boundUnsent(net.Conn) {}
