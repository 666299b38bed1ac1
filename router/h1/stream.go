package h1

import (
	"bufio"
	"sync"

	"github.com/valyala/fasthttp"
)

// Streamer writes an answer's body as it comes, by Conn.Send. An error ends the
// connection.
type Streamer interface{ Stream(c *Conn) error }

// Stream makes s the answer's body, once the handler has returned. length is -1
// where it is not known.
func (c *Conn) Stream(length int, s Streamer) { c.length, c.out = length, s }

// Send writes the next bytes of a streamed body in one piece: with the header
// before the first, and behind the last, if the body is in chunks, its end.
func (c *Conn) Send(run []byte, last bool) error {
	p := c.server.outs.get()
	defer c.server.outs.put(p)
	out := append(*p, c.head...)
	c.head = nil
	if !c.chunked {
		out = append(out, run...)
	} else {
		if len(run) > 0 {
			out = appendChunk(out, run)
		}
		if last && !c.ended {
			out = append(out, lastChunk...)
		}
	}
	c.ended = last
	if *p = out; len(out) == 0 {
		return nil
	}
	return c.server.send(c, out)
}

// writerStream is a Streamer by a function that writes and flushes.
type writerStream func(out *bufio.Writer)

// StreamWriter has f write the answer's body, each flush in a chunk of its own,
// once the handler has returned.
func StreamWriter(ctx *fasthttp.RequestCtx, f func(out *bufio.Writer)) {
	ConnOf(ctx.Conn()).Stream(-1, writerStream(f))
}

// chunkWriter writes a streamed body.
type chunkWriter struct{ c *Conn }

func (w chunkWriter) Write(p []byte) (int, error) {
	if err := w.c.Send(p, false); err != nil {
		return 0, err
	}
	return len(p), nil
}

var writers = sync.Pool{New: func() any { return bufio.NewWriter(nil) }}

// Stream implements Streamer.
func (f writerStream) Stream(c *Conn) error {
	out := writers.Get().(*bufio.Writer) //nolint:forcetypeassert // the pool has no others
	out.Reset(chunkWriter{c})
	f(out)
	err := out.Flush()
	out.Reset(nil)
	writers.Put(out)
	if err != nil {
		return err
	}
	return c.Send(nil, true)
}
