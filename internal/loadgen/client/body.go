package client

import (
	"bufio"
	"io"
	"net/http/httputil"
)

// body is an answer's body as it arrives: chunked, with a length, or up to the
// connection's end.
type body struct {
	br      *bufio.Reader
	in      io.Reader
	limit   io.LimitedReader // a body with a length
	chunked bool
	buf     [readBuffer]byte
}

// begin reads from br a body of length bytes; -1 means chunked, less means up to
// the end.
func (b *body) begin(br *bufio.Reader, length int) {
	b.br, b.in, b.chunked, b.limit = br, br, length == -1, io.LimitedReader{}
	switch {
	case b.chunked:
		b.in = httputil.NewChunkedReader(br)
	case length >= 0:
		b.limit = io.LimitedReader{R: br, N: int64(length)}
		b.in = &b.limit
	}
}

// next waits for bytes and returns what has arrived, valid until the next call. io.EOF is the
// body's end.
func (b *body) next() ([]byte, error) {
	n, err := b.in.Read(b.buf[:])
	switch {
	case n > 0:
		return b.buf[:n], nil // an error will come again
	case err == io.EOF && b.limit.N > 0:
		return nil, io.ErrUnexpectedEOF
	case err == io.EOF && b.chunked:
		return nil, b.trailer()
	}
	return nil, err
}

// trailer reads the lines after the last chunk, up to an empty one, and returns io.EOF.
func (b *body) trailer() error {
	const maxTrailer = 64
	for range maxTrailer {
		line, err := b.br.ReadSlice('\n')
		switch {
		case err == io.EOF:
			return io.ErrUnexpectedEOF
		case err != nil:
			return err
		case len(line) <= len("\r\n") && (line[0] == '\n' || line[0] == '\r'):
			return io.EOF
		}
	}
	return bufio.ErrTooLong
}
