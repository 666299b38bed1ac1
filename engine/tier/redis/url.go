package redis

import (
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
)

// Address is where a server listens, and how to log in.
type Address struct {
	Network  string // tcp or unix
	Host     string // host:port, or the socket's path
	TLS      bool
	User     string
	Password string
	DB       int
}

// ParseURL reads redis://[user:password@]host[:port][/db], rediss:// for TLS, valkey:// and
// valkeys:// for the same, and unix://[user:password@]/path[?db=N]. Errors name no password.
func ParseURL(text string) (a Address, err error) {
	u, err := url.Parse(text)
	if err != nil {
		return a, fmt.Errorf("not a URL") // url.Error has the whole text
	}
	if u.Opaque != "" || u.Fragment != "" {
		return a, fmt.Errorf("not scheme://[user:password@]host[:port][/db]")
	}
	a = Address{Network: "tcp", Host: u.Host, User: u.User.Username()}
	a.Password, _ = u.User.Password()
	db := strings.TrimPrefix(u.Path, "/")
	switch u.Scheme {
	case "redis", "valkey":
	case "rediss", "valkeys":
		a.TLS = true
	case "unix":
		a.Network, a.Host, db = "unix", u.Path, u.Query().Get("db")
		if u.Host != "" || u.Path == "" {
			return a, fmt.Errorf("want unix:///path/of/the/socket")
		}
	default:
		return a, fmt.Errorf("scheme %q is not one of redis, rediss, valkey, valkeys, unix", u.Scheme)
	}
	if a.Network == "tcp" {
		if u.Hostname() == "" || u.RawQuery != "" {
			return a, fmt.Errorf("want %s://[user:password@]host[:port][/db]", u.Scheme)
		}
		port := u.Port()
		if port == "" {
			port = "6379"
		}
		a.Host = net.JoinHostPort(u.Hostname(), port)
	}
	if db != "" {
		if a.DB, err = strconv.Atoi(db); err != nil || a.DB < 0 || a.DB > 1<<16 {
			return a, fmt.Errorf("%q is no number of a database", db)
		}
	}
	return a, nil
}

// String is the address without user and password.
func (a Address) String() string {
	switch {
	case a.Network == "unix":
		return fmt.Sprintf("unix://%s?db=%d", a.Host, a.DB)
	case a.TLS:
		return fmt.Sprintf("rediss://%s/%d", a.Host, a.DB)
	default:
		return fmt.Sprintf("redis://%s/%d", a.Host, a.DB)
	}
}
