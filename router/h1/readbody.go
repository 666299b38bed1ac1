package h1

import (
	"io"
	"slices"
	"sync"

	"github.com/valyala/fasthttp"
)

// ReadBody reads the request's body into memory that grows with what has come,
// so that clients who announce much and send nothing take none.
func (c *Conn) ReadBody() ([]byte, error) {
	limit, pool := c.server.cfg.MaxBodyBytes, &c.server.pieces
	defer c.in.rest()
	if c.body.eof {
		return nil, nil
	}
	most := limit + 1 // it comes in chunks
	if !c.body.chunked {
		if c.body.left > int64(limit) {
			return nil, fasthttp.ErrBodyTooLarge
		}
		most = int(c.body.left)
	}
	if err := c.Invite(); err != nil {
		return nil, err
	}
	var whole [][]byte // pieces that are full
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
	firstBody  = 64 << 10 // the memory that a body gets before more has come
	pieceBytes = 1 << 20  // large bodies are read in pieces of so much
)

// pieces lends the memory of large bodies while they come, so that those that
// turn out too large leave nothing behind.
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
