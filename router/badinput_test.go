package router_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router"
)

// beside runs a stream while f is at work, and checks that it is undisturbed.
func beside(t *testing.T, g *rig, f func()) {
	t.Helper()
	d := g.workers["d0"]
	finish := make(chan struct{})
	d.on(&d.decode, streamed(3, func(i int) {
		if i == 1 {
			<-finish
		}
	}))
	started, got := make(chan struct{}), make(chan string, 1)
	go func() {
		_, text := g.stream(askStream, func() { close(started) })
		got <- text
	}()
	<-started
	d.on(&d.decode, whole)
	f()
	close(finish)
	if text := <-got; text != storyText {
		t.Errorf("the stream beside it got %q", text)
	}
}

func TestBadRequests(t *testing.T) {
	g := newRig(t, 1, 1)
	const ok = `"model":"m","prompt":"x"`
	deep := strings.Repeat("[", 100) + strings.Repeat("]", 100)
	type bad struct {
		path, body string
		status     int
		param      string
		header     []string
	}
	c, chat := "/v1/completions", "/v1/chat/completions"
	cases := []bad{
		{c, ``, 400, "", nil},
		{c, ` `, 400, "", nil},
		{c, `{`, 400, "", nil},
		{c, `}`, 400, "", nil},
		{c, `null`, 400, "", nil},
		{c, `[]`, 400, "", nil},
		{c, `"x"`, 400, "", nil},
		{c, `1`, 400, "", nil},
		{c, `{` + ok, 400, "", nil},
		{c, `{` + ok + `,}`, 400, "", nil},
		{c, `{` + ok + `}}`, 400, "", nil},
		{c, `{` + ok + `} x`, 400, "", nil},
		{c, `{` + ok + `,"a"}`, 400, "", nil},
		{c, `{` + ok + `,"a":}`, 400, "", nil},
		{c, `{` + ok + `,a:1}`, 400, "", nil},
		{c, `{` + ok + `,"a":NaN}`, 400, "", nil},
		{c, `{` + ok + `,"a":Infinity}`, 400, "", nil},
		{c, `{` + ok + `,"a":-Infinity}`, 400, "", nil},
		{c, `{` + ok + `,"a":+1}`, 400, "", nil},
		{c, `{` + ok + `,"a":.5}`, 400, "", nil},
		{c, `{` + ok + `,"a":0x10}`, 400, "", nil},
		{c, `{` + ok + `,"a":'x'}`, 400, "", nil},
		{c, `{` + ok + `,"a":"\q"}`, 400, "", nil},
		{c, `{` + ok + `,"a":"\ud83d"}`, 400, "", nil},
		{c, "{" + ok + ",\"a\":\"\t\"}", 400, "", nil},
		{c, "{" + ok + ",\"a\":\"\xff\xfe\"}", 400, "", nil},
		{c, "{" + ok + ",\"a\":\"\xed\xa0\x80\"}", 400, "", nil},
		{c, "\xef\xbb\xbf{" + ok + "}", 400, "", nil},
		{c, "{" + ok + "}\x00", 400, "", nil},
		{c, `{` + ok + `,"a":` + deep + `}`, 400, "", nil},
		{c, `{"model":"m"}`, 400, "prompt", nil},
		{c, `{"model":"m","prompt":null}`, 400, "prompt", nil},
		{c, `{"model":"m","messages":[]}`, 400, "prompt", nil},
		{chat, `{"model":"m"}`, 400, "messages", nil},
		{chat, `{` + ok + `}`, 400, "messages", nil},
		{c, `{"model":3,"prompt":"x"}`, 400, "model", nil},
		{c, `{"model":["m"],"prompt":"x"}`, 400, "model", nil},
		{c, `{"model":"no such","prompt":"x"}`, 404, "model", nil},
		{c, `{"model":"` + strings.Repeat("m", 5000) + `","prompt":"x"}`, 404, "model", nil},
		{c, `{` + ok + `,"stream":"true"}`, 400, "stream", nil},
		{c, `{` + ok + `,"stream":1}`, 400, "stream", nil},
		{c, `{` + ok + `,"n":0}`, 400, "n", nil},
		{c, `{` + ok + `,"n":-1}`, 400, "n", nil},
		{c, `{` + ok + `,"n":1.5}`, 400, "n", nil},
		{c, `{` + ok + `,"n":1e9}`, 400, "n", nil},
		{c, `{` + ok + `,"n":"1"}`, 400, "n", nil},
		{c, `{` + ok + `,"seed":1.5}`, 400, "seed", nil},
		{c, `{` + ok + `,"seed":99999999999999999999}`, 400, "seed", nil},
		{c, `{` + ok + `,"max_tokens":-5}`, 400, "max_tokens", nil},
		{c, `{` + ok + `,"max_tokens":1e300}`, 400, "max_tokens", nil},
		{c, `{` + ok + `,"max_tokens":true}`, 400, "max_tokens", nil},
		{c, `{` + ok + `,"kv_transfer_params":{"do_remote_decode":true}}`, 400, "kv_transfer_params", nil},
		{c, `{` + ok + `,"disaggregated_params":{}}`, 400, "disaggregated_params", nil},
		{c, `{` + ok + `,"bootstrap_host":"h"}`, 400, "bootstrap_host", nil},
		{c, `{` + ok + `,"bootstrap_port":1}`, 400, "bootstrap_port", nil},
		{c, `{` + ok + `,"bootstrap_room":1}`, 400, "bootstrap_room", nil},
		{c, `{` + ok + `}`, 400, "x-request-timeout-ms", []string{"x-request-timeout-ms", "soon"}},
		{c, `{` + ok + `}`, 400, "x-request-timeout-ms", []string{"x-request-timeout-ms", "0"}},
		{c, `{` + ok + `}`, 415, "", []string{"Content-Encoding", "gzip"}},
		{"/v1/embedding", `{}`, 404, "", nil},
		{"/v1/embeddings", `{"model":"no such"}`, 404, "model", nil},
		{"/v1/completions/", `{}`, 404, "", nil},
		{"/xpyd/v1/prefill", `{}`, 404, "", nil},
		{"/admin/v1/instances", `{}`, 404, "", nil},
		{"/debug/ledger", ``, 404, "", nil},
		{"/v1/models", `{}`, 405, "", nil},
		{"/tokenize", `{`, 400, "", nil},
		{"/tokenize", `{"model":"no such"}`, 404, "model", nil},
		{"/tokenize", `{"prompt":"x","kv_transfer_params":{}}`, 400, "kv_transfer_params", nil},
		{"/tokenize", `{"prompt":"x","bootstrap_room":1}`, 400, "bootstrap_room", nil},
		{"/detokenize", `{"tokens":[1],"disaggregated_params":{}}`, 400, "disaggregated_params", nil},
	}
	beside(t, g, func() {
		before := g.workers["d0"].calls.Load()
		for _, b := range cases {
			resp, text := g.post(b.path, b.body, b.header...)
			e := apiError(t, text)
			param := ""
			if e.Param != nil {
				param = *e.Param
			}
			if resp.StatusCode != b.status || param != b.param || resp.Header.Get("x-request-id") == "" {
				t.Errorf("%s %.80q: %d, param %q: %s", b.path, b.body, resp.StatusCode, param, text)
			}
			if len(text) > 1024 {
				t.Errorf("%s %.80q: %d bytes of error", b.path, b.body, len(text))
			}
		}
		if n := g.workers["d0"].calls.Load() - before; n != 0 {
			t.Errorf("%d bad requests reached decode", n)
		}
		// Headers that only the router may set do not pass.
		g.post(c, `{`+ok+`}`, "x-xpyd-link", "forged", "x-xpyd-prefill-kv", "evil:1", "x-xpyd-probe", "1", "x-xpyd-seed", "1")
		g.workers["d0"].mu.Lock()
		defer g.workers["d0"].mu.Unlock()
		if h := g.workers["d0"].last; h.Get("x-xpyd-link") == "forged" || h.Get("x-xpyd-prefill-kv") != "127.0.0.1:1" || h.Get("x-xpyd-probe") != "" {
			t.Errorf("forged headers passed: %v", h)
		}
	})
}

// TestBadHTTP sends what an HTTP client cannot.
func TestBadHTTP(t *testing.T) {
	t.Parallel()
	g := newRig(t, 1, 1, func(c *router.Config) {
		c.ReadTimeout, c.MaxBodyBytes, c.MaxHeaderBytes = 4*time.Second, 1<<20, 4096 // all take as long as the slow ones
	})
	head := "POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
	endless := func(w io.Writer) { // sends for as long as it is let
		buf := make([]byte, 64<<10)
		for range 1600 { // 100 MB
			if _, err := w.Write(buf); err != nil {
				return
			}
		}
	}
	send := func(s string) func(io.Writer) { return func(w io.Writer) { io.WriteString(w, s) } }
	cases := map[string]struct {
		send   func(w io.Writer)
		status int
	}{
		"no HTTP":             {send("hello\r\n\r\n"), 400},
		"TLS on a plain port": {send("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"), 400},
		"bad version":         {send("GET / HTTP/9.x\r\n\r\n"), 400},
		"another version":     {send("GET /health HTTP/1.2\r\nHost: x\r\n\r\n"), 505},
		"bad length":          {send(head + "Content-Length: x\r\n\r\n"), 400},
		"negative length":     {send(head + "Content-Length: -1\r\n\r\n"), 400},
		"bad chunk":           {send(head + "Transfer-Encoding: chunked\r\n\r\nzz\r\n"), 400},
		"header flood":        {send(head + strings.Repeat("x-a: b\r\n", 1000) + "\r\n"), 431},
		"one huge header":     {send(head + "x-a: " + strings.Repeat("b", 10000) + "\r\n\r\n"), 431},
		"endless header line": {func(w io.Writer) { io.WriteString(w, head); endless(w) }, 431},
		"announced 100 MB":    {func(w io.Writer) { io.WriteString(w, head+"Content-Length: 104857600\r\n\r\n"); endless(w) }, 413},
		"chunked 100 MB": {func(w io.Writer) {
			io.WriteString(w, head+"Transfer-Encoding: chunked\r\n\r\n6400000\r\n")
			endless(w)
		}, 413},
		"slow header": {send("POST /v1/comp"), 408},
		"slow body":   {send(head + "Content-Length: 100\r\n\r\n{"), 408},
		"slow chunk":  {send(head + "Transfer-Encoding: chunked\r\n\r\n5\r\n{"), 408},
	}
	beside(t, g, func() {
		var all sync.WaitGroup
		for name, c := range cases {
			conn := g.dial()
			conn.SetDeadline(time.Now().Add(patience))
			all.Go(func() { c.send(conn) })
			all.Go(func() {
				defer conn.Close()
				resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
				if err != nil {
					t.Errorf("%s: %v", name, err)
					return
				}
				body, _ := io.ReadAll(resp.Body)
				apiError(t, string(body))
				if resp.StatusCode != c.status {
					t.Errorf("%s: %d %s", name, resp.StatusCode, body)
				}
			})
		}
		all.Wait()
		// A client that closes its writing side counts as gone: no answer, no
		// trace.
		conn, err := net.Dial("tcp", g.r.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		fmt.Fprintf(conn, "%sContent-Length: 10\r\n\r\n{", head)
		conn.(*net.TCPConn).CloseWrite()
		conn.SetDeadline(time.Now().Add(patience))
		if _, err := io.ReadAll(conn); err != nil {
			t.Errorf("half-closed within a body: %v", err)
		}
	})
}

// TestFraming: a request whose end is stated twice or ambiguously is refused, because a
// proxy may see another end than the router. Nothing behind it is read.
func TestFraming(t *testing.T) {
	t.Parallel()
	g := newRig(t, 1, 1)
	body := "Content-Length: 5\r\n"
	post, chunked := "POST /tokenize HTTP/1.1\r\nHost: x\r\n", "POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
	last := "\r\n0\r\n\r\n"
	for name, request := range map[string]string{
		"length first":      post + body + "Transfer-Encoding: chunked\r\n" + last,
		"chunked first":     chunked + body + last,
		"in lower case":     "POST /tokenize HTTP/1.1\nhost: x\ntransfer-encoding: chunked\ncontent-length: 5\n" + last,
		"length, identity":  post + body + "Transfer-Encoding: identity\r\n" + last,
		"identity":          post + "Transfer-Encoding: identity\r\n\r\nhello",
		"version 1.0":       "POST /tokenize HTTP/1.0\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n" + last,
		"two of a kind":     post + body + body + last,
		"a list of lengths": post + "Content-Length: 5, 5\r\n\r\nhello",
		"two encodings":     chunked + "Transfer-Encoding: chunked\r\n" + last,
		"another coding":    post + "Transfer-Encoding: gzip, chunked\r\n" + last,
		"continued line":    post + "X-A: b\r\n Transfer-Encoding: chunked\r\n" + last,
		"bare LF":           post + "X-A: b\nTransfer-Encoding: chunked\r\n" + last,
		"bare CR":           post + "X-A: b\rTransfer-Encoding: chunked\r\n" + last,
		"LF ends a size":    chunked + "\r\n1\nx\r\n0\r\n\r\n",
		"LF ends a chunk":   chunked + "\r\n1\r\nx\n0\r\n\r\n",
		"LF in a size":      chunked + "\r\n1;a\nb\r\nx\r\n0\r\n\r\n",
		"CR in a size":      chunked + "\r\n1;a\rb\r\nx\r\n0\r\n\r\n",
		"text in a size":    chunked + "\r\n1 x\r\nx\r\n0\r\n\r\n",
		"LF ends a trailer": chunked + "\r\n0\r\na: b\n\r\n",
		"LF ends a body":    chunked + "\r\n0\r\n\n",
		"short trailer":     chunked + "\r\n0\r\nx\n\r\n",
	} {
		for where, addr := range map[string]string{"public": g.r.Addr().String(), "admin": g.r.AdminAddr().String()} {
			conn, err := net.Dial("tcp", addr)
			if err != nil {
				t.Fatal(err)
			}
			conn.SetDeadline(time.Now().Add(patience))
			if where == "admin" { // nobody else's body is read
				request = strings.Replace(request, "Host: x", "Host: x\r\nAuthorization: Bearer secret", 1)
			}
			io.WriteString(conn, request+"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
			in := bufio.NewReader(conn)
			resp, err := http.ReadResponse(in, nil)
			if err != nil {
				t.Fatalf("%s, %s: %v", name, where, err)
			}
			text, _ := io.ReadAll(resp.Body)
			// The admin listener takes the trailers, and nothing behind them.
			trailers := where == "admin" && (name == "LF ends a trailer" || name == "LF ends a body")
			if resp.StatusCode != 400 && !trailers || !resp.Close {
				t.Errorf("%s, %s: %d, close %t: %s", name, where, resp.StatusCode, resp.Close, text)
			}
			if more, _ := io.ReadAll(in); len(more) > 0 {
				t.Errorf("%s, %s: goes on with %.80q", name, where, more)
			}
			conn.Close()
		}
	}
}

func TestTooManyConnections(t *testing.T) {
	g := newRig(t, 1, 1, func(c *router.Config) { c.MaxConns = 2 })
	var held []net.Conn
	for range 2 {
		conn, err := net.Dial("tcp", g.r.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, conn)
		fmt.Fprint(conn, "GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
		if _, err := http.ReadResponse(bufio.NewReader(conn), nil); err != nil {
			t.Fatal(err)
		}
	}
	conn, err := net.Dial("tcp", g.r.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil || resp.StatusCode != 503 {
		t.Errorf("%v, %v", resp, err)
	}
	conn.Close()
	for _, conn := range held {
		conn.Close()
	}
	g.until("room", func() bool {
		resp, err := g.client.Get(g.url + "/health")
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == 200
	})
}

func TestAPIKeys(t *testing.T) {
	g := newRig(t, 1, 1, func(c *router.Config) { c.APIKeys = []string{"one", "two"} })
	if resp, body := g.post("/v1/completions", ask); resp.StatusCode != 401 {
		t.Errorf("%d %q", resp.StatusCode, body)
	}
	for _, key := range []string{"one", "two"} {
		if resp, body := g.post("/v1/completions", ask, "Authorization", "Bearer "+key); resp.StatusCode != 200 {
			t.Errorf("%d %q", resp.StatusCode, body)
		}
	}
	if code, _ := g.get("/ready"); code != 200 {
		t.Errorf("/ready: %d", code)
	}
}

// refuses returns a check that an edit of the defaults is refused because of key.
func refuses(t *testing.T) func(key string, edit func(*router.Config)) {
	return func(key string, edit func(*router.Config)) {
		t.Helper()
		c := router.DefaultConfig()
		edit(&c)
		if err := c.Validate(); err == nil || !strings.HasPrefix(err.Error(), key+":") || strings.Contains(err.Error(), "%!") {
			t.Errorf("%s: %v", key, err)
		}
	}
}

func TestConfig(t *testing.T) {
	if err := router.DefaultConfig().Validate(); err != nil {
		t.Error(err)
	}
	f := refuses(t)
	f("listen", func(c *router.Config) { c.Listen = "8000" })
	f("listen", func(c *router.Config) { c.Listen = "" })
	f("admin_listen", func(c *router.Config) { c.AdminListen = "x" })
	f("tls_cert", func(c *router.Config) { c.TLSKey = "k" })
	f("tls_cert", func(c *router.Config) { c.TLSCert = "c" })
	f("tls_client_ca", func(c *router.Config) { c.TLSClientCA = "a" })
	f("admin_tls_cert", func(c *router.Config) { c.AdminTLSKey = "k" })
	f("admin_tls_cert", func(c *router.Config) { c.AdminTLSCert = "c" })
	f("upstream.api_key", func(c *router.Config) { c.Discovery.P2PListen, c.Upstream.APIKey = "h:1", "k" })
	f("upstream.pass_authorization", func(c *router.Config) { c.Discovery.P2PListen, c.Upstream.PassAuthorization = "h:1", true })
	f("upstream.cert", func(c *router.Config) { c.Upstream.Key = "k" })
	f("probe_timeout", func(c *router.Config) { c.ProbeTimeout = 0 })
	f("attempts", func(c *router.Config) { c.Attempts = 0 })
	f("retry_ratio", func(c *router.Config) { c.RetryRatio = 2 })
	f("read_timeout", func(c *router.Config) { c.ReadTimeout = 0 })
	f("limits.max_in_flight", func(c *router.Config) { c.Limits.MaxInFlight = 0 })
	f("pick.policy", func(c *router.Config) { c.Pick.Policy = "best" })
	all := router.DefaultConfig()
	all.AdminListen, all.TLSCert, all.TLSKey, all.TLSClientCA, all.AdminTLSCert, all.AdminTLSKey, all.Discovery.P2PListen = "", "c", "k", "a", "c", "k", "h:1"
	if err := all.Validate(); err != nil {
		t.Error(err)
	}
}

// TestWhichModel: a request that names no model means the only one that is served; of several it
// must name one, also where it is passed on.
func TestWhichModel(t *testing.T) {
	t.Parallel()
	g := newRig(t, 1, 1, func(c *router.Config) { c.MaxBodyBytes = 300 << 10 })
	const text, input = `{"prompt":"x"}`, `{"input":"x"}`
	ask := func(path, body string, status int, says string) {
		t.Helper()
		resp, got := g.post(path, body)
		if resp.StatusCode != status || !strings.Contains(got, says) {
			t.Errorf("%s %.40s: %d %.200s, want %d %q", path, body, resp.StatusCode, got, status, says)
		}
	}
	ask("/v1/completions", text, 200, "")
	ask("/v1/embeddings", input, 200, "")
	g.add("other-p", fleet.Prefill, func(i *fleet.Instance) { i.Model = "other" })
	g.add("other-d", fleet.Decode, func(i *fleet.Instance) { i.Model = "other" })
	g.until("the other model", func() bool { return g.r.Members.Serves(g.watcher.Snapshot().Get("other-d")) })
	g.add("d9", fleet.Decode, func(i *fleet.Instance) { i.MaxModelLen = 100 })
	g.until("another decode", func() bool { return g.r.Members.Serves(g.watcher.Snapshot().Get("d9")) })
	var list struct {
		Data []struct {
			ID  string
			Len int `json:"max_model_len"`
		}
	}
	if _, models := g.get("/v1/models"); json.Unmarshal([]byte(models), &list) != nil || len(list.Data) != 2 || list.Data[0].ID != "m" || list.Data[0].Len != 100 {
		t.Errorf("%s", models)
	}
	ask("/v1/completions", text, 400, "model is required: 2 are served")
	ask("/v1/embeddings", input, 400, "model is required, within the first 262144 bytes: 2 are served")
	ask("/v1/embeddings", `{"model":"m","input":"x"}`, 200, "")
	ask("/v1/embeddings", `{"model":"m","input":"`+strings.Repeat("x", 300<<10)+`"}`, 413, "larger than 307200 bytes")
	ask("/v1/embeddings", `{"model":"m","input":"`+strings.Repeat("x", 299<<10)+`"}`, 200, "")
}
