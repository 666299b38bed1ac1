// Package reqbody reads the bodies of HTTP requests into memory that grows
// with what has come. An HTTP server left to itself takes the announced size
// at once, so that clients who announce much and send nothing exhaust it.
package reqbody

import (
	"bytes"
	"io"

	"github.com/valyala/fasthttp"
)

// first is how much memory a request gets before it has sent more than that.
const first = 64 << 10

// FramingError is of a request of which one proxy may believe that it ends where
// another believes that the next one begins.
type FramingError string

func (e FramingError) Error() string { return string(e) }

// Kinds of it. Other kinds, such as either length twice, fasthttp refuses itself.
const (
	ErrTwoLengths = FramingError("the request has both Content-Length and Transfer-Encoding")
	ErrCoding     = FramingError("Transfer-Encoding: want chunked, or a Content-Length instead")
	ErrLine       = FramingError("a header line does not end with CR LF, or is continued on the next one")
)

// Framed refuses a header that does not say beyond doubt where it and its body end.
func Framed(h *fasthttp.RequestHeader) error {
	var length, encoding bool
	for raw := h.RawHeaders(); len(raw) > 0; {
		end := bytes.IndexByte(raw, '\n')
		if end < 1 || raw[end-1] != '\r' || raw[0] == ' ' || raw[0] == '\t' {
			return ErrLine
		}
		line := raw[:end-1]
		raw = raw[end+1:]
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

// Read reads the body to its end; PostBody then returns it, valid for as long
// as anybody holds it. One in chunks is the connection's last. The server has StreamRequestBody set. The error is
// fasthttp.ErrBodyTooLarge above limit bytes, a FramingError, else the connection's;
// after one the connection cannot be used for another request.
func Read(ctx *fasthttp.RequestCtx, limit int) error {
	req := &ctx.Request
	if err := Framed(&req.Header); err != nil {
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
		ctx.SetConnectionClose() // fasthttp takes trailers that others take for the next request
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
