package main

import (
	"bufio"
	"bytes"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"
	"golang.org/x/sync/errgroup"
)

// words is a prompt of n bytes.
func words(n int) string {
	var b strings.Builder
	for i := 0; b.Len() < n; i++ {
		fmt.Fprintf(&b, "word%d of the story ", i%977)
	}
	return b.String()[:n]
}

// completion is a request body for the mock engine; for user see pacePrefix.
func completion(prompt string, stream bool, chunks int, user string) string {
	return fmt.Sprintf(`{"model":"m","stream":%v,"max_tokens":%d,"user":%q,"prompt":%q}`, stream, chunks, user, prompt)
}

// post is the wire form of one POST.
func post(path, body string) []byte {
	return fmt.Appendf(nil, "POST %s HTTP/1.1\r\nHost: engine\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", path, len(body), body)
}

// rawClient is one keep-alive connection, cheaper than any HTTP client.
type rawClient struct {
	conn net.Conn
	r    *bufio.Reader
	resp fasthttp.Response
}

func dial(addr string) (*rawClient, error) {
	c, err := net.Dial("tcp", addr)
	if err != nil {
		return nil, err
	}
	return &rawClient{conn: c, r: bufio.NewReaderSize(c, 16<<10)}, nil
}

// send writes a request whose reply is due within limit.
func (c *rawClient) send(req []byte, limit time.Duration) error {
	if err := c.conn.SetDeadline(time.Now().Add(limit)); err != nil {
		return err
	}
	_, err := c.conn.Write(req)
	return err
}

// do sends the request and reads the whole reply.
func (c *rawClient) do(req []byte) error {
	if err := c.send(req, 30*time.Second); err != nil {
		return err
	}
	if err := c.resp.Read(c.r); err != nil {
		return err
	}
	if c.resp.StatusCode() != 200 {
		return fmt.Errorf("status %d: %s", c.resp.StatusCode(), c.resp.Body())
	}
	if bytes.HasPrefix(c.resp.Header.ContentType(), []byte("text/event-stream")) && !bytes.Contains(c.resp.Body(), []byte("[DONE]")) {
		return fmt.Errorf("the stream was cut: %s", c.resp.Body())
	}
	if c.resp.ConnectionClose() {
		c.conn.Close()
		again, err := dial(c.conn.RemoteAddr().String())
		if err != nil {
			return err
		}
		c.conn, c.r = again.conn, again.r
	}
	return nil
}

// drive sends n requests over conns connections and returns how long that took.
func drive(addr string, conns, n int, reqs ...[]byte) (time.Duration, error) {
	var next atomic.Int64
	var all errgroup.Group
	start := time.Now()
	for range conns {
		c, err := dial(addr)
		if err != nil {
			return 0, err
		}
		all.Go(func() error {
			defer func() { c.conn.Close() }()
			for i := next.Add(1) - 1; i < int64(n); i = next.Add(1) - 1 {
				if err := c.do(reqs[int(i)%len(reqs)]); err != nil {
					next.Store(int64(n))
					return err
				}
			}
			return nil
		})
	}
	err := all.Wait()
	return time.Since(start), err
}

// latencies times n sequential requests, in seconds, each sent to every address in turn. A
// tenth more go first, to warm up.
func latencies(n int, req [][]byte, addrs ...string) ([]float64, error) {
	var clients []*rawClient
	for _, a := range addrs {
		c, err := dial(a)
		if err != nil {
			return nil, err
		}
		defer func() { c.conn.Close() }()
		clients = append(clients, c)
	}
	out := make([]float64, 0, n)
	for i := range n + n/10 {
		start := time.Now()
		for k, c := range clients {
			if err := c.do(req[k]); err != nil {
				return nil, err
			}
		}
		if i >= n/10 {
			out = append(out, time.Since(start).Seconds())
		}
	}
	return out, nil
}

// chunkAges reads one paced stream and passes each chunk's age in seconds to each.
func chunkAges(c *rawClient, req []byte, each func(float64)) error {
	if err := c.send(req, 3*time.Minute); err != nil {
		return err
	}
	for first := true; ; first = false {
		line, err := c.r.ReadSlice('\n')
		if err != nil {
			return err
		}
		if first && !bytes.Contains(line, []byte(" 200 ")) {
			rest, _ := c.r.Peek(c.r.Buffered()) // cannot fail
			return fmt.Errorf("the reply is %s%s", line, rest)
		}
		if bytes.HasPrefix(line, []byte("data: [DONE]")) {
			return nil
		}
		if bytes.HasPrefix(line, []byte(`data: {"error"`)) {
			return fmt.Errorf("the stream was ended: %s", bytes.TrimSpace(line))
		}
		_, after, ok := bytes.Cut(line, []byte(`"created":`))
		if !ok {
			continue
		}
		at, err := leadingInt(after)
		if err != nil {
			return err
		}
		each(time.Since(time.Unix(0, at)).Seconds())
	}
}
