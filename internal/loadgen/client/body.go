package client

import (
	"bufio"
	"bytes"
	"errors"
	"io"
)

// body hands out an answer's body as it arrives, without copying: chunked,
// with a length, or up to the connection's end.
type body struct {
	br      *bufio.Reader
	chunked bool
	toEnd   bool  // until the connection ends
	left    int64 // of the body, or of the chunk
	inChunk bool  // a chunk's data was handed out and its CRLF is still to come
	held    int   // bytes that were handed out and are still in br
	ended   bool
}

var errChunk = errors.New("malformed chunk")

// next waits for bytes and returns all that are there, until the next call.
// io.EOF is the body's end.
func (b *body) next() ([]byte, error) {
	if b.held > 0 {
		if _, err := b.br.Discard(b.held); err != nil {
			return nil, err
		}
		b.held = 0
	}
	if b.ended {
		return nil, io.EOF
	}
	if b.chunked && b.left == 0 {
		if err := b.chunk(); err != nil {
			return nil, cutShort(err)
		}
		if b.ended {
			return nil, io.EOF
		}
	} else if !b.chunked && !b.toEnd && b.left == 0 {
		b.ended = true
		return nil, io.EOF
	}
	if _, err := b.br.Peek(1); err != nil {
		if b.toEnd && err == io.EOF {
			b.ended = true
			return nil, io.EOF
		}
		return nil, cutShort(err)
	}
	n := b.br.Buffered()
	if !b.toEnd && int64(n) > b.left {
		n = int(b.left)
	}
	p, err := b.br.Peek(n)
	if err != nil {
		return nil, err
	}
	if b.held = n; !b.toEnd {
		b.left -= int64(n)
	}
	return p, nil
}

// cutShort is what an end in the middle of something is.
func cutShort(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// chunk reads the next chunk's size and what separates it from the last one;
// after the last chunk it reads the trailer.
func (b *body) chunk() error {
	if b.inChunk {
		line, err := b.line()
		if err != nil {
			return err
		}
		if len(line) > 0 {
			return errChunk
		}
	}
	line, err := b.line()
	if err != nil {
		return err
	}
	if n := bytes.IndexByte(line, ';'); n >= 0 {
		line = line[:n]
	}
	if b.left, err = hexSize(bytes.TrimSpace(line)); err != nil {
		return err
	}
	b.inChunk = true
	if b.left > 0 {
		return nil
	}
	const maxTrailer = 64
	for range maxTrailer {
		if line, err = b.line(); err != nil {
			return err
		}
		if len(line) == 0 {
			b.ended = true
			return nil
		}
	}
	return errChunk
}

func (b *body) line() ([]byte, error) {
	line, err := b.br.ReadSlice('\n')
	if err != nil {
		if errors.Is(err, bufio.ErrBufferFull) {
			return nil, errChunk
		}
		return nil, err
	}
	return bytes.TrimSuffix(line[:len(line)-1], []byte{'\r'}), nil
}

// hexSize reads a chunk's size of at most 15 digits.
func hexSize(s []byte) (int64, error) {
	if len(s) == 0 || len(s) > 15 {
		return 0, errChunk
	}
	n := int64(0)
	for _, c := range s {
		switch {
		case c >= '0' && c <= '9':
			c -= '0'
		case c >= 'a' && c <= 'f':
			c -= 'a' - 10
		case c >= 'A' && c <= 'F':
			c -= 'A' - 10
		default:
			return 0, errChunk
		}
		n = n<<4 | int64(c)
	}
	return n, nil
}
