package h1

import (
	"io"

	"github.com/valyala/fasthttp"
)

// Response is a worker's answer: its header, and its body as it arrives.
type Response struct {
	httpBody
	conn   *workerConn
	life   *Life                    // of the leg, which holds conn
	Header *fasthttp.ResponseHeader // the connection's, until Finish or Abort
	done   bool                     // Finish or Abort was called
	spoilt bool                     // the connection cannot be used again
}

// Read returns body bytes as soon as there are any, within ChunkTimeout. A connection that
// ends before the body does is io.ErrUnexpectedEOF.
func (b *Response) Read(p []byte) (int, error) {
	if err := b.patience(); err != nil {
		return 0, err
	}
	return b.httpBody.Read(p)
}

// Await waits for bytes or the end without holding a buffer.
func (b *Response) Await() error {
	if b.eof {
		return nil
	}
	if err := b.patience(); err != nil {
		return err
	}
	if err := b.in.await(); err != nil {
		return b.ended(err)
	}
	return nil
}

// patience renews the deadline if reading may have to wait.
func (b *Response) patience() error {
	if b.eof || b.in.buffered() > 0 {
		return nil
	}
	return b.in.within(b.conn.u.cfg.ChunkTimeout)
}

// All reads the whole body, of at most limit bytes. On an error it closes the connection.
func (b *Response) All(limit int) ([]byte, error) {
	fail := func(err error) ([]byte, error) {
		b.Abort()
		return nil, &Error{Phase: "body", Err: err}
	}
	size := 4096
	if !b.chunked && !b.toEnd {
		if b.left > int64(limit) {
			return fail(&LargeError{What: "an answer", Limit: limit})
		}
		size = int(b.left) + 1
	}
	buf := make([]byte, 0, size)
	for {
		if len(buf) == cap(buf) {
			buf = append(buf, 0)[:len(buf)]
		}
		n, err := b.Read(buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		switch {
		case len(buf) > limit:
			return fail(&LargeError{What: "an answer", Limit: limit})
		case err == io.EOF:
			return buf, nil
		case err != nil:
			return fail(err)
		}
	}
}

// Length is the body's, -1 if unannounced; before the body is read.
func (b *Response) Length() int {
	if b.chunked || b.toEnd {
		return -1
	}
	return int(b.left)
}

// Lend lends memory to cut an answer in; GiveBack takes it back.
func (b *Response) Lend() *[]byte      { return b.conn.u.runs.get() }
func (b *Response) GiveBack(p *[]byte) { b.conn.u.runs.put(p) }

// Finish gives the connection back if the body was read to its end, and closes it
// otherwise.
func (b *Response) Finish() {
	if b.done {
		return
	}
	if !b.eof || b.toEnd || b.spoilt || b.Header.ConnectionClose() || b.in.buffered() > 0 {
		b.Abort()
		return
	}
	b.done, b.Header = true, nil
	b.in.rest()
	if !b.life.release() {
		_ = b.conn.Close() // its leg was cancelled just now
		return
	}
	b.conn.u.put(b.conn)
}

// Abort closes the connection.
func (b *Response) Abort() {
	if b.done {
		return
	}
	b.done, b.Header = true, nil
	b.conn.in.drop()
	b.life.release()
	_ = b.conn.Close()
}
