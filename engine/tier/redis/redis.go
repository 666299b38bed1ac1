// Package redis keeps KV units in a Redis or Valkey server: a store.Store.
// Commands are those of Redis 6.2: EXISTS, GETEX, SET NX PX, UNLINK, SCAN.
//
// Each operation under way has its own connection, so callers bound their number. There are no
// goroutines: an operation has a deadline, which Read extends with each value, and its connection
// is closed when its context ends. Lengths that a server announces are bounded (guard.go).
//
// Non-goals: clusters and sentinels (put a proxy in front), and trusting values.
package redis

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/gomodule/redigo/redis"

	"github.com/xpyd/xpyd/engine/tier/store"
)

// Config says which server to use, and how.
type Config struct {
	Address
	// Timeout bounds an operation, connecting included, and in Read the wait for each value.
	Timeout   time.Duration
	TTL       time.Duration // of a value since it was last written or read
	ReadOnly  bool          // reading does not renew the TTL
	MaxValue  int           // bytes of a value, at most
	ClientTLS *tls.Config   // for rediss; nil: the system's roots
}

const (
	maxIdle   = 8   // connections
	scanCount = 512 // keys that one SCAN looks at, about
)

// Client is one server.
type Client struct {
	cfg Config

	mu     sync.Mutex
	idle   []*conn
	closed bool
}

var _ store.Store = (*Client)(nil)

// New makes a client, which connects with the first operation.
func New(cfg Config) (*Client, error) {
	if cfg.Timeout <= 0 || cfg.TTL < time.Millisecond || cfg.MaxValue < 1 {
		return nil, fmt.Errorf("redis: timeout %v, ttl %v, values of %d bytes", cfg.Timeout, cfg.TTL, cfg.MaxValue)
	}
	return &Client{cfg: cfg}, nil
}

// String implements store.Store.
func (c *Client) String() string { return c.cfg.Address.String() }

// Close implements store.Store.
func (c *Client) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	for _, n := range c.idle {
		n.Close()
	}
	c.idle = nil
	return nil
}

// Exists implements store.Store with one pipeline.
func (c *Client) Exists(ctx context.Context, keys []string) (have []bool, err error) {
	err = c.with(ctx, func(n *conn) error {
		have = make([]bool, len(keys))
		for _, k := range keys {
			if err := n.Send("EXISTS", k); err != nil {
				return err
			}
		}
		if err := n.Flush(); err != nil {
			return err
		}
		for i := range keys {
			v, err := n.receive()
			if err != nil {
				return err
			}
			count, ok := v.(int64)
			if !ok || count < 0 || count > 1 {
				return fmt.Errorf("%w: EXISTS %T", errReply, v)
			}
			have[i] = count == 1
		}
		return nil
	})
	return have, wrap("exists", err)
}

// Read implements store.Store with one pipeline.
func (c *Client) Read(ctx context.Context, keys []string, got func(i int, value []byte, err error)) error {
	return wrap("read", c.with(ctx, func(n *conn) error {
		for _, k := range keys {
			var err error
			if c.cfg.ReadOnly {
				err = n.Send("GET", k)
			} else {
				err = n.Send("GETEX", k, "PX", c.cfg.TTL.Milliseconds())
			}
			if err != nil {
				return err
			}
		}
		if err := n.Flush(); err != nil {
			return err
		}
		for i := range keys {
			n.setDeadline(time.Now().Add(c.cfg.Timeout))
			v, err := n.receive()
			value, ok := v.([]byte)
			switch {
			case errors.Is(err, store.ErrRefused):
				got(i, nil, err)
			case errors.Is(err, store.ErrForeign):
				got(i, nil, err)
				if n.Err() != nil {
					return err // it is too large, so the stream cannot go on
				}
			case err != nil:
				return err
			case !ok && v != nil:
				return fmt.Errorf("%w: GET %T", errReply, v)
			default:
				got(i, value, nil)
			}
		}
		return nil
	}))
}

// Write implements store.Store.
func (c *Client) Write(ctx context.Context, key string, value []byte) (stored bool, err error) {
	err = c.with(ctx, func(n *conn) error {
		v, err := n.do("SET", key, value, "NX", "PX", c.cfg.TTL.Milliseconds())
		stored = v == "OK"
		if err == nil && v != nil && !stored {
			err = fmt.Errorf("%w: SET %T", errReply, v)
		}
		return err
	})
	return stored, wrap("write", err)
}

// Delete implements store.Store.
func (c *Client) Delete(ctx context.Context, key string) error {
	return wrap("delete", c.with(ctx, func(n *conn) error {
		_, err := n.do("UNLINK", key)
		return err
	}))
}

// Purge implements store.Store. It scans all keys of the database.
func (c *Client) Purge(ctx context.Context, prefix string) (deleted int, err error) {
	cursor := "0"
	for {
		var keys []any
		err = c.with(ctx, func(n *conn) error {
			v, err := n.do("SCAN", cursor, "MATCH", prefix+"*", "COUNT", scanCount)
			if err != nil {
				return err
			}
			cursor, keys, err = scanned(v, prefix)
			if err != nil || len(keys) == 0 {
				return err
			}
			v, err = n.do("UNLINK", keys...)
			if count, ok := v.(int64); ok && count >= 0 && count <= int64(len(keys)) {
				deleted += int(count)
			}
			return err
		})
		if err != nil || cursor == "0" {
			return deleted, wrap("purge", err)
		}
	}
}

// scanned reads SCAN's reply: the next cursor, and the keys that have the prefix.
func scanned(v any, prefix string) (cursor string, keys []any, err error) {
	pair, ok := v.([]any)
	if !ok || len(pair) != 2 {
		return "", nil, fmt.Errorf("%w: SCAN %T", errReply, v)
	}
	next, ok1 := pair[0].([]byte)
	found, ok2 := pair[1].([]any)
	if !ok1 || !ok2 || len(next) > 20 {
		return "", nil, fmt.Errorf("%w: SCAN's elements", errReply)
	}
	for _, k := range found {
		if key, ok := k.([]byte); ok && strings.HasPrefix(string(key), prefix) {
			keys = append(keys, key)
		}
	}
	return string(next), keys, nil
}

func wrap(op string, err error) error {
	if err != nil {
		err = fmt.Errorf("redis: %s: %w", op, err)
	}
	return err
}

// conn is one connection.
type conn struct {
	redis.Conn
	guard    *guard
	used     bool // by an operation before this one
	received bool // something, in this operation
}

// setDeadline sets the operation's deadline. If the connection is closed the next call says so.
func (n *conn) setDeadline(at time.Time) { _ = n.guard.Conn.SetDeadline(at) }

// receive returns the next reply: nil, string, []byte, int64 or []any.
func (n *conn) receive() (any, error) {
	v, err := redis.ReceiveWithTimeout(n.Conn, 0) // the deadline is ours
	if e, ok := err.(redis.Error); ok {
		kind := store.ErrRefused
		if strings.HasPrefix(string(e), "WRONGTYPE ") {
			kind = store.ErrForeign
		}
		err = fmt.Errorf("%w: %q", kind, string(e))
	}
	n.received = n.received || n.Err() == nil
	return v, err
}

func (n *conn) do(command string, args ...any) (any, error) {
	if err := n.Send(command, args...); err != nil {
		return nil, err
	}
	if err := n.Flush(); err != nil {
		return nil, err
	}
	return n.receive()
}

// with runs an operation on a connection. If the server has closed one that was idle, it tries
// once more on a new one.
func (c *Client) with(ctx context.Context, use func(*conn) error) error {
	deadline := time.Now().Add(c.cfg.Timeout)
	for fresh := false; ; fresh = true {
		n, err := c.connect(ctx, fresh, deadline)
		if err != nil {
			return err
		}
		n.received = false
		n.setDeadline(deadline)
		stop := context.AfterFunc(ctx, func() { n.guard.Conn.Close() })
		err = use(n)
		if in := n.Err() == nil && (err == nil || errors.Is(err, store.ErrRefused)); stop() && in {
			c.keep(n)
			return err
		}
		n.Close()
		stale := n.used && !n.received && (errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE))
		if fresh || !stale || ctx.Err() != nil {
			return errors.Join(ctx.Err(), err)
		}
	}
}

// keep keeps a connection for later operations.
func (c *Client) keep(n *conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || len(c.idle) == maxIdle || n.Err() != nil {
		n.Close()
		return
	}
	n.used = true
	c.idle = append(c.idle, n)
}

// connect returns the idle connection that was used last, or with fresh or without one a new one.
func (c *Client) connect(ctx context.Context, fresh bool, deadline time.Time) (*conn, error) {
	c.mu.Lock()
	if last := len(c.idle) - 1; last >= 0 && !fresh {
		n := c.idle[last]
		c.idle = c.idle[:last]
		c.mu.Unlock()
		return n, nil
	}
	c.mu.Unlock()
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	var d net.Dialer
	raw, err := d.DialContext(ctx, c.cfg.Network, c.cfg.Host)
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	if c.cfg.TLS {
		cfg := c.cfg.ClientTLS.Clone()
		if cfg == nil {
			cfg = &tls.Config{}
		}
		if cfg.ServerName == "" {
			cfg.ServerName, _, _ = net.SplitHostPort(c.cfg.Host)
		}
		secure := tls.Client(raw, cfg)
		if err := secure.HandshakeContext(ctx); err != nil {
			raw.Close()
			return nil, fmt.Errorf("connect: TLS: %w", err)
		}
		raw = secure
	}
	g := &guard{Conn: raw, bounds: bounds{maxValue: c.cfg.MaxValue}}
	n := &conn{Conn: redis.NewConn(g, 0, 0), guard: g}
	n.setDeadline(deadline)
	stop := context.AfterFunc(ctx, func() { raw.Close() })
	defer stop()
	if err := c.greet(n); err != nil {
		n.Close()
		return nil, fmt.Errorf("connect: %w", err)
	}
	return n, nil
}

// greet logs in and selects the database. Its errors are not store.ErrRefused: nothing works
// without it.
func (c *Client) greet(n *conn) error {
	var commands [][]any
	switch a := c.cfg.Address; {
	case a.User != "":
		commands = append(commands, []any{"AUTH", a.User, a.Password})
	case a.Password != "":
		commands = append(commands, []any{"AUTH", a.Password})
	}
	if c.cfg.DB != 0 {
		commands = append(commands, []any{"SELECT", c.cfg.DB})
	}
	for _, args := range commands {
		if v, err := n.do(args[0].(string), args[1:]...); err != nil || v != "OK" {
			return fmt.Errorf("%s: %v", args[0], err)
		}
	}
	return nil
}
