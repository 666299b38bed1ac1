package flight

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/router/h1"
)

// TestGetSmall: a question to an engine that is not a leg ends with its answer, with the request that it
// is for, or in time, and what is no answer is not taken for one.
func TestGetSmall(t *testing.T) {
	const most = 1 << 20
	answer := func(status, size int) string {
		return fmt.Sprintf("HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s", status, size, strings.Repeat("x", size))
	}
	for name, c := range map[string]struct {
		url, says string
		leaves    bool // the request ends when the engine has the question
		dial      error
		asks      string
		n         int
		after     time.Duration
		err       string
	}{
		"an answer":   {says: answer(200, 3), n: 3},
		"a query":     {url: "http://10.0.0.1:80/a/b?c=d", says: answer(200, 0), asks: "/a/b?c=d"},
		"no path":     {url: "http://10.0.0.1:80", says: answer(200, 1), asks: "/", n: 1},
		"much":        {says: answer(200, most), n: most},
		"too much":    {says: answer(200, most+1), err: "answer"},
		"a status":    {says: answer(404, 3), err: "/q: status 404"},
		"half of it":  {says: "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nx", after: askTimeout, err: "body"},
		"silence":     {after: askTimeout, err: "answer"},
		"it leaves":   {leaves: true, err: "answer"},
		"nobody":      {dial: io.ErrUnexpectedEOF, err: "connect"},
		"no such URL": {url: "x", err: `worker URL "x"`},
	} {
		synctest.Test(t, func(t *testing.T) {
			var asker h1.Life
			s, asks := bareService(t), ""
			s.Client = h1.NewClient(h1.DefaultTimeouts(), h1.Upstream{}, nil)
			s.Client.Dial = func(context.Context, string, string) (net.Conn, error) {
				if c.dial != nil {
					return nil, c.dial
				}
				here, there := net.Pipe()
				go func() {
					defer there.Close()
					r := bufio.NewReader(there)
					if req, err := http.ReadRequest(r); err == nil {
						asks = req.RequestURI
					}
					if c.leaves {
						asker.End(errClientGone)
					}
					_, _ = io.WriteString(there, c.says)
					_, _ = r.ReadByte() // its end
				}()
				return here, nil
			}
			if c.url == "" {
				c.url, c.asks = "http://10.0.0.1:80/q", "/q"
			}
			begin := time.Now()
			b, err := s.getSmall(&asker, c.url)
			if len(b) != c.n || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) || time.Since(begin) != c.after {
				t.Errorf("%s: %d bytes after %v, %v", name, len(b), time.Since(begin), err)
			}
			s.Client.Close()
			synctest.Wait()
			if c.dial == nil && c.url != "x" && asks != c.asks {
				t.Errorf("%s: it is asked for %q, want %q", name, asks, c.asks)
			}
			if c.leaves && !errors.Is(asker.Cause(), errClientGone) {
				t.Errorf("%s: %v", name, asker.Cause())
			}
		})
	}
}
