package h1

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"slices"
	"strings"
	"sync"

	"github.com/valyala/fasthttp"
)

// httpBody is the body of a request or an answer as it arrives.
type httpBody struct {
	in      *inbuf
	left    int64 // bytes left of the body, or of the chunk
	chunked bool
	toEnd   bool // the body ends with the connection
	eof     bool
}

// newBody takes a header's content length: -1 is chunked, less is unannounced.
func newBody(in *inbuf, length int) httpBody {
	b := httpBody{in: in}
	switch {
	case length == -1:
		b.chunked = true
	case length < 0:
		b.toEnd = true
	default:
		b.left, b.eof = int64(length), length == 0
	}
	return b
}

var errChunk = errors.New("malformed chunk")

// Read returns body bytes as soon as there are any. A connection that ends before the body
// does is io.ErrUnexpectedEOF.
func (b *httpBody) Read(p []byte) (int, error) {
	if b.eof {
		return 0, io.EOF
	}
	large := !b.toEnd && !b.chunked && b.in.br == nil && len(p) >= b.in.from.size
	if !large {
		if err := b.in.await(); err != nil {
			return 0, b.ended(err)
		}
	}
	if b.chunked && b.left == 0 {
		if err := b.nextChunk(); err != nil {
			return 0, unexpected(err)
		}
		if b.eof {
			return 0, io.EOF
		}
	}
	if !b.toEnd && int64(len(p)) > b.left {
		p = p[:b.left]
	}
	n, err := 0, error(nil)
	if large { // without a buffer in between
		n, err = b.in.Read(p)
	} else {
		n, err = b.in.br.Read(p)
	}
	if b.toEnd {
		return n, b.ended(err)
	}
	b.left -= int64(n)
	if err == nil && b.left == 0 {
		if b.chunked {
			err = expectCRLF(b.in.br)
		} else {
			b.eof = true
		}
	}
	return n, unexpected(err)
}

// ended is what the end of the connection means for the body.
func (b *httpBody) ended(err error) error {
	if err == io.EOF && b.toEnd {
		b.eof = true
		return io.EOF
	}
	return unexpected(err)
}

func unexpected(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

var lastChunk = []byte("0\r\n\r\n")

// Over reports whether the body has ended, as far as is known without waiting.
func (b *httpBody) Over() bool {
	if !b.eof && b.chunked && b.left == 0 && b.in.buffered() >= len(lastChunk) {
		if next, _ := b.in.br.Peek(len(lastChunk)); bytes.Equal(next, lastChunk) {
			_, _ = b.in.br.Discard(len(lastChunk)) // they are there
			b.eof = true
		}
	}
	return b.eof
}

// here reports whether the rest of a body of known length is in the buffer.
func (b *httpBody) here() bool {
	return b.eof || !b.chunked && !b.toEnd && b.left <= int64(b.in.buffered())
}

// nextChunk reads a chunk's size line, and after the last chunk the trailer.
func (b *httpBody) nextChunk() error {
	line, err := b.in.br.ReadSlice('\n')
	if err != nil {
		if errors.Is(err, bufio.ErrBufferFull) {
			return errChunk
		}
		return err
	}
	var n int64
	digits := 0
	for _, c := range line {
		v := strings.IndexByte("0123456789abcdefABCDEF", c)
		if v < 0 {
			break
		}
		if v > 15 {
			v -= 6
		}
		if n = n<<4 | int64(v); n > 1<<40 {
			return errChunk
		}
		digits++
	}
	rest, whole := bytes.CutSuffix(line[digits:], []byte("\r\n")) // proxies differ on lone ones
	if rest = bytes.TrimLeft(rest, " \t"); digits == 0 || !whole || len(rest) > 0 && rest[0] != ';' || bytes.IndexByte(rest, '\r') >= 0 {
		return errChunk
	}
	if b.left = n; n > 0 {
		return nil
	}
	for range 64 { // trailer fields, which are ignored
		line, err := b.in.br.ReadSlice('\n')
		if err != nil {
			return err
		}
		if !bytes.HasSuffix(line, []byte("\r\n")) {
			return errChunk
		}
		if len(line) == 2 {
			b.eof = true
			return nil
		}
	}
	return errChunk
}

func expectCRLF(br *bufio.Reader) error {
	for _, want := range []byte("\r\n") {
		c, err := br.ReadByte()
		if err != nil {
			return err
		}
		if c != want {
			return errChunk
		}
	}
	return nil
}

// ReadBody reads the request's body into memory that grows with what has come: a client
// that announces much and sends nothing takes none.
func (c *Conn) ReadBody() ([]byte, error) {
	limit, pool := c.server.cfg.MaxBodyBytes, &c.server.pieces
	defer c.in.rest()
	if c.body.eof {
		return nil, nil
	}
	most := limit + 1 // of a chunked one
	if !c.body.chunked {
		if c.body.left > int64(limit) {
			return nil, fasthttp.ErrBodyTooLarge
		}
		most = int(c.body.left)
	}
	if err := c.Invite(); err != nil {
		return nil, err
	}
	var whole [][]byte // full pieces
	defer func() { pool.put(whole) }()
	got, body := 0, make([]byte, 0, min(most, firstBody))
	for {
		switch {
		case len(body) < cap(body):
		case len(body) < pieceBytes:
			body = append(make([]byte, 0, min(most-got, 2*cap(body), pieceBytes)), body...)
		default:
			whole, got = append(whole, body), got+len(body)
			body = pool.get()
		}
		n, err := c.body.Read(body[len(body):cap(body)])
		body = body[:len(body)+n]
		switch {
		case got+len(body) > limit:
			whole = append(whole, body)
			return nil, fasthttp.ErrBodyTooLarge
		case err == io.EOF || err == nil && c.body.Over():
			if len(whole) == 0 {
				return body, nil
			}
			whole = append(whole, body)
			return slices.Concat(whole...), nil
		case err != nil:
			whole = append(whole, body)
			return nil, err
		}
	}
}

const (
	firstBody  = 64 << 10 // memory for a body of which nothing has come
	pieceBytes = 1 << 20  // large bodies are read in pieces of this size
)

// pieces lends the memory for large bodies while they come, so that one that is too large
// leaves nothing behind.
type pieces struct{ pool sync.Pool }

func (p *pieces) get() []byte {
	if b, _ := p.pool.Get().(*[]byte); b != nil {
		return (*b)[:0]
	}
	return make([]byte, 0, pieceBytes)
}

func (p *pieces) put(all [][]byte) {
	for _, b := range all {
		if cap(b) == pieceBytes {
			p.pool.Put(&b)
		}
	}
}
