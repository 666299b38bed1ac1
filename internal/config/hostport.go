package config

import (
	"fmt"
	"net"
	"strconv"
)

// HostPort refuses what no listener can be opened on: an address that is not
// host:port, or a port beyond 65535.
func HostPort(addr string) error {
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		return fmt.Errorf("%q is not host:port", addr)
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return fmt.Errorf("%q: the port is not in 0..65535", addr)
	}
	return nil
}
