package router

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/valyala/fasthttp"
)

// upBody is a worker's answer: its header, and its body as it arrives.
type upBody struct {
	conn   *upConn
	life   *life                    // of the leg, which holds conn
	header *fasthttp.ResponseHeader // the connection's, until finish or abort

	left    int64 // bytes left of the body, or of the chunk
	chunked bool
	toEnd   bool // the body ends with the connection
	eof     bool
	over    bool // finish or abort was called
}

func (b *upBody) begin() {
	status := b.header.StatusCode()
	switch n := b.header.ContentLength(); {
	case status == 204 || status == 304:
		b.eof = true
	case n == -1:
		b.chunked = true
	case n < 0:
		b.toEnd = true
	default:
		b.left = int64(n)
		b.eof = n == 0
	}
}

var errChunk = errors.New("malformed chunk")

// Read returns body bytes as soon as there are any. A connection that ends
// before the body does is io.ErrUnexpectedEOF.
func (b *upBody) Read(p []byte) (int, error) {
	if b.eof {
		return 0, io.EOF
	}
	br := b.conn.br
	if br.Buffered() == 0 { // it may block: one silence at a time
		if err := b.conn.SetReadDeadline(time.Now().Add(b.conn.u.cfg.ChunkTimeout)); err != nil {
			return 0, err
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
	n, err := br.Read(p)
	if b.toEnd {
		b.eof = err == io.EOF
		return n, err
	}
	b.left -= int64(n)
	if err == nil && b.left == 0 {
		if b.chunked {
			err = expectCRLF(br)
		} else {
			b.eof = true
		}
	}
	return n, unexpected(err)
}

func unexpected(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// nextChunk reads a chunk's size line; at the last chunk it reads the trailer.
func (b *upBody) nextChunk() error {
	line, err := b.conn.br.ReadSlice('\n')
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
	if rest := line[digits:]; digits == 0 || rest[0] != '\r' && rest[0] != '\n' && rest[0] != ';' && rest[0] != ' ' {
		return errChunk
	}
	if b.left = n; n > 0 {
		return nil
	}
	for range 64 { // trailer fields, which we do not want
		line, err := b.conn.br.ReadSlice('\n')
		if err != nil {
			return err
		}
		if len(line) <= 2 {
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

// all reads the whole body, which may have at most limit bytes.
func (b *upBody) all(limit int) ([]byte, error) {
	size := 4096
	if !b.chunked && !b.toEnd {
		if b.left > int64(limit) {
			return nil, &legError{"body", fmt.Errorf("%d bytes are more than %d", b.left, limit)}
		}
		size = int(b.left) + 1
	}
	buf := make([]byte, 0, size)
	for {
		if len(buf) == cap(buf) {
			buf = append(buf, 0)[:len(buf)]
		}
		n, err := b.Read(buf[len(buf):cap(buf)])
		if buf = buf[:len(buf)+n]; len(buf) > limit {
			return nil, &legError{"body", fmt.Errorf("more than %d bytes", limit)}
		}
		if err == io.EOF {
			return buf, nil
		}
		if err != nil {
			return nil, &legError{"body", err}
		}
	}
}

// finish gives the connection back if the body was read to its end, and
// closes it otherwise.
func (b *upBody) finish() {
	if b.over {
		return
	}
	if !b.eof || b.toEnd || b.header.ConnectionClose() || b.conn.br.Buffered() > 0 {
		b.abort()
		return
	}
	b.over, b.header = true, nil
	if !b.life.release() {
		_ = b.conn.Close() // its leg was cancelled just now
		return
	}
	b.conn.u.put(b.conn)
}

// abort closes the connection.
func (b *upBody) abort() {
	if b.over {
		return
	}
	b.over, b.header = true, nil
	b.life.release()
	_ = b.conn.Close()
}
