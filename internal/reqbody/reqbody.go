// Package reqbody reads the bodies of HTTP requests into memory that grows
// with what has come. An HTTP server left to itself takes the announced size
// at once, so that clients who announce much and send nothing exhaust it.
package reqbody

import (
	"bytes"
	"errors"
	"io"

	"github.com/valyala/fasthttp"
)

// first is how much memory a request gets before it has sent more than that.
const first = 64 << 10

// ErrTwoLengths is a request of which one proxy may believe that it ends where
// another believes that the next one begins.
var ErrTwoLengths = errors.New("the request has both Content-Length and Transfer-Encoding")

// OneLength refuses a header with both, of which fasthttp leaves one out. Those of
// HTTP/1.0 with Transfer-Encoding, and with either twice, it refuses itself.
func OneLength(h *fasthttp.RequestHeader) error {
	var length, encoding bool
	for raw := h.RawHeaders(); len(raw) > 0; {
		var line []byte
		line, raw, _ = bytes.Cut(raw, []byte("\n"))
		if len(line) < len("content-length:") {
			continue
		}
		switch line[0] | 0x20 {
		case 'c':
			length = length || named(line, "content-length:")
		case 't':
			encoding = encoding || named(line, "transfer-encoding:")
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

// Read reads the body to its end; PostBody then returns it, valid for as long
// as anybody holds it. The server has StreamRequestBody set. The error is
// fasthttp.ErrBodyTooLarge above limit bytes, ErrTwoLengths, else the connection's;
// after one the connection cannot be used for another request.
func Read(ctx *fasthttp.RequestCtx, limit int) error {
	req := &ctx.Request
	if err := OneLength(&req.Header); err != nil {
		return err
	}
	if !req.IsBodyStream() {
		return nil // a method without one
	}
	most := req.Header.ContentLength() // negative: comes in chunks
	if most > limit {
		return fasthttp.ErrBodyTooLarge
	}
	if most < 0 {
		most = limit + 1
	}
	in, body := req.BodyStream(), make([]byte, 0, min(most, first))
	for {
		if len(body) == cap(body) {
			body = append(make([]byte, 0, min(most, 2*cap(body))), body...)
		}
		n, err := in.Read(body[len(body):cap(body)])
		body = body[:len(body)+n]
		switch {
		case len(body) > limit:
			return fasthttp.ErrBodyTooLarge
		case err == io.EOF:
			req.SetBodyRaw(body)
			return nil
		case err != nil:
			return err
		}
	}
}
