//go:build !linux

package tcp

import "net"

func withoutPacing(*net.TCPConn) {}
