package h1

import (
	"cmp"
	"errors"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/openai"
)

// Bounds are what a client may take of a server.
type Bounds struct {
	// MaxConns bounds the client connections; more are answered 503 at once.
	MaxConns int `key:"max_conns"`
	// MaxBodyBytes and MaxHeaderBytes bound a request (413, 431).
	MaxBodyBytes   int `key:"max_body_bytes" unit:"bytes"`
	MaxHeaderBytes int `key:"max_header_bytes" unit:"bytes"`
	// ReadTimeout is how long a client may take to send one request (408).
	ReadTimeout time.Duration `key:"read_timeout"`
	// IdleTimeout is how long a kept-alive client connection may idle.
	IdleTimeout time.Duration `key:"idle_timeout"`
	// StallTimeout is how long a client may not read while its stream has
	// bytes for it.
	StallTimeout time.Duration `key:"stall_timeout"`
}

// DefaultBounds are for one machine.
func DefaultBounds() Bounds {
	return Bounds{MaxConns: 16384, MaxBodyBytes: 32 << 20, MaxHeaderBytes: 16 << 10,
		ReadTimeout: 30 * time.Second, IdleTimeout: 2 * time.Minute, StallTimeout: time.Minute}
}

// Validate returns a *config.KeyError.
func (b *Bounds) Validate() error {
	return cmp.Or(config.AtLeast("max_conns", b.MaxConns, 1), config.AtLeast("max_body_bytes", b.MaxBodyBytes, 1024),
		config.AtLeast("max_header_bytes", b.MaxHeaderBytes, 1024), config.Positive("read_timeout", b.ReadTimeout),
		config.Positive("idle_timeout", b.IdleTimeout), config.Positive("stall_timeout", b.StallTimeout))
}

// Refusal is the answer for what is no proper HTTP request, or one beyond the
// bounds.
func (b *Bounds) Refusal(err error) *openai.Error {
	var small *fasthttp.ErrSmallBuffer
	var timeout interface{ Timeout() bool }
	var framing FramingError
	switch {
	case errors.Is(err, fasthttp.ErrBodyTooLarge):
		return openai.TooLarge("the body is larger than %d bytes", b.MaxBodyBytes)
	case errors.As(err, &small):
		e := openai.BadRequest("", "the header is larger than %d bytes", b.MaxHeaderBytes)
		e.Status, e.Code = 431, "header_too_large"
		return e
	case errors.As(err, &timeout) && timeout.Timeout():
		e := openai.BadRequest("", "the request was not complete within %v", b.ReadTimeout)
		e.Status, e.Code = 408, "request_timeout"
		return e
	case errors.As(err, &framing):
		return openai.BadRequest("", "%v", err)
	}
	return openai.BadRequest("", "malformed HTTP request")
}
