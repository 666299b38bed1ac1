package config

import (
	"fmt"
	"net"
	"strconv"
)

// HostPort checks a listener's address: host:port, with a port up to 65535.
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
