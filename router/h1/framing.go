package h1

import (
	"bytes"

	"github.com/valyala/fasthttp"
)

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

// framed refuses a header that does not say beyond doubt where it and its body end.
func framed(h *fasthttp.RequestHeader) error {
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
