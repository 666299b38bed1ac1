package h1

import (
	"bufio"
	"bytes"
	"errors"
	"io"
)

// httpBody is the body of a request or an answer, as it arrives.
type httpBody struct {
	in      *inbuf
	left    int64 // bytes left of the body, or of the chunk
	chunked bool
	toEnd   bool // the body ends with the connection
	eof     bool
}

// newBody takes a header's content length: -1 is chunked, less says nothing.
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

// Read returns body bytes as soon as there are any. A connection that ends
// before the body does is io.ErrUnexpectedEOF.
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
	if large { // straight to where it goes
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

// ended is what the connection's end means.
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

// Over reports whether the body has ended, as far as that is known without
// waiting.
func (b *httpBody) Over() bool {
	if !b.eof && b.chunked && b.left == 0 && b.in.buffered() >= len(lastChunk) {
		if next, _ := b.in.br.Peek(len(lastChunk)); bytes.Equal(next, lastChunk) {
			_, _ = b.in.br.Discard(len(lastChunk)) // they are there
			b.eof = true
		}
	}
	return b.eof
}

// here reports whether all of a body that came with its length is in the buffer.
func (b *httpBody) here() bool {
	return b.eof || !b.chunked && !b.toEnd && b.left <= int64(b.in.buffered())
}

// nextChunk reads a chunk's size line; at the last chunk it reads the trailer.
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
		v := hexValue(c)
		if v < 0 {
			break
		}
		if n = n<<4 | int64(v); n > 1<<40 {
			return errChunk
		}
		digits++
	}
	rest, whole := bytes.CutSuffix(line[digits:], []byte("\r\n")) // proxies differ on what a lone one of them ends
	if rest = bytes.TrimLeft(rest, " \t"); digits == 0 || !whole || len(rest) > 0 && rest[0] != ';' || bytes.IndexByte(rest, '\r') >= 0 {
		return errChunk
	}
	if b.left = n; n > 0 {
		return nil
	}
	for range 64 { // trailer fields, which we do not want
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

func hexValue(c byte) int {
	switch {
	case c >= '0' && c <= '9':
		return int(c - '0')
	case c >= 'a' && c <= 'f':
		return int(c-'a') + 10
	case c >= 'A' && c <= 'F':
		return int(c-'A') + 10
	}
	return -1
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
