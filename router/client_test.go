package router_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
)

const (
	ask       = `{"model":"m","prompt":"Once upon a time","max_tokens":8}`
	askStream = `{"model":"m","prompt":"Once upon a time","max_tokens":8,"stream":true}`
)

// post sends a body and returns the whole answer.
func (g *rig) post(path, body string, header ...string) (*http.Response, string) {
	g.t.Helper()
	req, _ := http.NewRequest("POST", g.url+path, strings.NewReader(body))
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := g.client.Do(req)
	if err != nil {
		g.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		g.t.Fatal(err)
	}
	return resp, string(b)
}

// stream posts a body and calls first once the first event is here.
func (g *rig) stream(body string, first func()) (status int, text string) {
	g.t.Helper()
	resp, err := g.client.Post(g.url+"/v1/completions", "application/json", strings.NewReader(body))
	if err != nil {
		g.t.Fatal(err)
	}
	defer resp.Body.Close()
	head := make([]byte, 16)
	n, err := io.ReadAtLeast(resp.Body, head, 1)
	if err != nil {
		g.t.Fatal(err)
	}
	first()
	rest, err := io.ReadAll(resp.Body)
	if err != nil {
		g.t.Fatal(err)
	}
	return resp.StatusCode, string(head[:n]) + string(rest)
}

// dial connects to the public listener.
func (g *rig) dial() net.Conn {
	g.t.Helper()
	conn, err := net.Dial("tcp", g.r.Addr().String())
	if err != nil {
		g.t.Fatal(err)
	}
	return conn
}

// sendRaw sends a completion's request and reads nothing.
func sendRaw(t *testing.T, conn net.Conn, body string) {
	t.Helper()
	if _, err := fmt.Fprintf(conn, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(body), body); err != nil {
		t.Fatal(err)
	}
}

// get reads a public path.
func (g *rig) get(path string) (int, string) {
	g.t.Helper()
	resp, err := g.client.Get(g.url + path)
	if err != nil {
		g.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b)
}

// apiError checks the shape of an error and returns it.
func apiError(t *testing.T, body string) (e struct {
	Message, Type string
	Param, Code   *string
}) {
	t.Helper()
	var v struct {
		Error map[string]json.RawMessage `json:"error"`
	}
	if err := json.Unmarshal([]byte(body), &v); err != nil || len(v.Error) != 4 {
		t.Errorf("not an API error: %q", body)
		return e
	}
	for key, dst := range map[string]any{"message": &e.Message, "type": &e.Type, "param": &e.Param, "code": &e.Code} {
		if err := json.Unmarshal(v.Error[key], dst); err != nil {
			t.Errorf("%s: %v in %q", key, err, body)
		}
	}
	return e
}
