package h1

import (
	"bytes"
	"cmp"
	"errors"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/openai"
)

// Bounds limit what a client may use of a server.
type Bounds struct {
	// MaxConns bounds the client connections; more get a 503 at once.
	MaxConns int `key:"max_conns"`
	// MaxBodyBytes and MaxHeaderBytes bound a request (413, 431).
	MaxBodyBytes   int `key:"max_body_bytes" unit:"bytes"`
	MaxHeaderBytes int `key:"max_header_bytes" unit:"bytes"`
	// ReadTimeout is how long a client may take to send a request (408).
	ReadTimeout time.Duration `key:"read_timeout"`
	// IdleTimeout is how long a kept-alive client connection may idle.
	IdleTimeout time.Duration `key:"idle_timeout"`
	// StallTimeout is how long a client may leave a stream's bytes unread.
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

// Refusal is the answer to a request that is malformed or exceeds the bounds.
func (b *Bounds) Refusal(err error) *openai.Error {
	if framing, ok := errors.AsType[FramingError](err); ok {
		return openai.BadRequest("", "%v", framing)
	}
	_, small := errors.AsType[*fasthttp.ErrSmallBuffer](err)
	switch {
	case errors.Is(err, fasthttp.ErrBodyTooLarge):
		return openai.TooLarge("the body is larger than %d bytes", b.MaxBodyBytes)
	case small:
		return openai.BadRequest("", "the header is larger than %d bytes", b.MaxHeaderBytes).WithStatus(431, "header_too_large")
	case TimedOut(err):
		return openai.BadRequest("", "the request was not complete within %v", b.ReadTimeout).WithStatus(408, "request_timeout")
	}
	return openai.BadRequest("", "malformed HTTP request")
}

// TimedOut reports whether an error is a timeout.
func TimedOut(err error) bool {
	var timeout interface{ Timeout() bool }
	return errors.As(err, &timeout) && timeout.Timeout()
}

// FramingError is a request whose end two proxies may see in different places.
type FramingError string

func (e FramingError) Error() string { return string(e) }

// The framing errors. fasthttp itself refuses others, such as a length given twice.
const (
	ErrTwoLengths = FramingError("the request has both Content-Length and Transfer-Encoding")
	ErrCoding     = FramingError("Transfer-Encoding: want chunked, or a Content-Length instead")
	ErrLine       = FramingError("a header line does not end with CR LF, or is continued on the next one")
	ErrName       = FramingError("the name of a header has a space in it")
)

// framed refuses a header that leaves doubt where it or its body ends.
func framed(h *fasthttp.RequestHeader) error {
	var length, encoding bool
	for raw := h.RawHeaders(); len(raw) > 0; {
		end := bytes.IndexByte(raw, '\n')
		if end < 1 || raw[end-1] != '\r' || raw[0] == ' ' || raw[0] == '\t' {
			return ErrLine
		}
		line := raw[:end-1]
		raw = raw[end+1:]
		if colon := bytes.IndexByte(line, ':'); colon > 0 && bytes.IndexByte(line[:colon], ' ') >= 0 {
			return ErrName
		}
		if len(line) < len("content-length:") {
			continue
		}
		switch line[0] | 0x20 {
		case 'c':
			length = length || named(line, "content-length:")
		case 't':
			if named(line, "transfer-encoding:") {
				encoding = true
				if coding := bytes.Trim(line[len("transfer-encoding:"):], " \t"); !bytes.EqualFold(coding, []byte("chunked")) {
					return ErrCoding
				}
			}
		}
	}
	if length && encoding {
		return ErrTwoLengths
	}
	return nil
}

func named(line []byte, name string) bool {
	return len(line) >= len(name) && bytes.EqualFold(line[:len(name)], []byte(name))
}
