package h1_test

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/router/h1"
)

// pipes is a listener whose connections are in memory, so that they can be in a bubble.
type pipes chan net.Conn

func (p pipes) Accept() (net.Conn, error) {
	if c, ok := <-p; ok {
		return c, nil
	}
	return nil, net.ErrClosed
}

func (p pipes) Close() error { close(p); return nil }
func (pipes) Addr() net.Addr { return &net.TCPAddr{} }

// TestPatience: how long a connection waits for a first request, for the rest of one, and for the next.
func TestPatience(t *testing.T) {
	_ = new(fasthttp.ResponseHeader).Header() // starts fasthttp's clock, which is not to be in a bubble
	const get = "GET / HTTP/1.1\r\nHost: x\r\n\r\n"
	for name, c := range map[string]struct {
		says    []string        // by the client
		before  []time.Duration // it waits so long before each
		answers string
		ends    time.Duration // after the last
	}{
		"nothing":              {nil, nil, "408", 10 * time.Second},
		"half a request":       {[]string{get[:9]}, []time.Duration{7 * time.Second}, "408", 10 * time.Second},
		"one late":             {[]string{get}, []time.Duration{9 * time.Second}, "200", 60 * time.Second},
		"one too late":         {[]string{get}, []time.Duration{12 * time.Second}, "408", 0},
		"one, half of another": {[]string{get, get[:9]}, []time.Duration{0, 50 * time.Second}, "200 408", 10 * time.Second},
		"two":                  {[]string{get, get}, []time.Duration{0, 59 * time.Second}, "200 200", 60 * time.Second},
		"two, one too late":    {[]string{get, get}, []time.Duration{0, 68 * time.Second}, "200", 0},
		"half a body":          {[]string{"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nx"}, []time.Duration{0}, "408", 10 * time.Second},
	} {
		synctest.Test(t, func(t *testing.T) {
			b := h1.DefaultBounds()
			b.ReadTimeout, b.IdleTimeout = 10*time.Second, 60*time.Second
			refuse := func(ctx *fasthttp.RequestCtx, err error) { h1.WriteError(ctx, b.Refusal(err)) }
			s := h1.NewServer(h1.ServerConfig{Bounds: b, Refuse: refuse, Handler: func(ctx *fasthttp.RequestCtx) {
				if _, err := h1.ConnOf(ctx.Conn()).ReadBody(); err != nil {
					refuse(ctx, err)
				}
			}})
			ln := make(pipes)
			s.Start(ln)
			here, there := net.Pipe()
			ln <- there
			var answers []string
			var last time.Time
			read := make(chan struct{})
			go func() {
				defer close(read)
				for in := bufio.NewReader(here); ; {
					resp, err := http.ReadResponse(in, nil)
					if err != nil {
						return
					}
					_, _ = io.Copy(io.Discard, resp.Body)
					answers, last = append(answers, resp.Status[:3]), time.Now()
				}
			}()
			said := time.Now()
			for i, text := range c.says {
				time.Sleep(c.before[i])
				if _, err := io.WriteString(here, text); err != nil {
					break
				}
				said = time.Now()
				synctest.Wait()
			}
			<-read
			if got := strings.Join(answers, " "); got != c.answers {
				t.Errorf("%s: %s", name, got)
			}
			over := time.Now()
			if strings.HasSuffix(c.answers, "408") { // it lingers
				over = last
			}
			if d := over.Sub(said); c.ends > 0 && (d < c.ends || d > c.ends+c.ends/8) { // deadlines are not moved for an eighth
				t.Errorf("%s: over after %v, want %v", name, d, c.ends)
			}
			here.Close()
			s.Cut()
			s.Wait()
		})
	}
}
