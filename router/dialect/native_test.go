package dialect_test

import (
	"bytes"
	"encoding/json"
	"testing"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/router/dialect"
)

func joined(parts [][]byte) []byte { return bytes.Join(parts, nil) }

func TestNativeLegs(t *testing.T) {
	x := &dialect.Exchange{RequestID: `r"1`, Link: ticket.NewLink(), Path: "/v1/completions", Body: []byte(`{"x":1}`), Seed: -7,
		Prefill: &fleet.Instance{ID: "p0", Epoch: 9, KVAddr: "h:1"}, Decode: &fleet.Instance{ID: "d0"}, Left: 1500 * time.Millisecond}
	d := dialect.For("native")

	var h fasthttp.RequestHeader
	var body struct {
		Link      string `json:"link"`
		RequestID string `json:"request_id"`
		Deadline  int    `json:"deadline_ms"`
	}
	if err := json.Unmarshal(joined(d.Prefill(&h, x)), &body); err != nil {
		t.Fatal(err)
	}
	if body.Link != x.Link.String() || body.RequestID != x.RequestID || body.Deadline != 1500 ||
		string(h.RequestURI()) != "/xpyd/v1/prefill" || string(h.Method()) != "POST" {
		t.Errorf("%+v, %s", body, h.String())
	}

	h = fasthttp.RequestHeader{}
	if got := joined(d.Decode(&h, x)); string(got) != `{"x":1}` || string(h.RequestURI()) != "/v1/completions" {
		t.Errorf("%s, %s", got, h.String())
	}
	for name, want := range map[string]string{
		ticket.HeaderLink: x.Link.String(), ticket.HeaderPrefill: "p0", ticket.HeaderPrefillEpoch: "9",
		ticket.HeaderPrefillKV: "h:1", ticket.HeaderSeed: "-7", ticket.HeaderDeadline: "1500", ticket.HeaderProbe: "",
	} {
		if got := string(h.Peek(name)); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	if len(h.Peek(ticket.HeaderTokens))+len(h.Peek(ticket.HeaderGiven))+len(h.Peek(ticket.HeaderPromise))+len(h.Peek(ticket.HeaderCacheSalt)) > 0 {
		t.Errorf("it is asked for tokens: %s", h.String())
	}
	for name, leg := range map[string]func(*fasthttp.RequestHeader, *dialect.Exchange) [][]byte{"pair": d.Decode, "alone": dialect.Plain} {
		h = fasthttp.RequestHeader{}
		x.Tokens, x.Given, x.Promise, x.CacheSalt = true, nil, "ttft=1s", "alice"
		if got := joined(leg(&h, x)); string(got) != `{"x":1}` || string(h.Peek(ticket.HeaderTokens)) != "1" || len(h.Peek(ticket.HeaderGiven)) > 0 ||
			string(h.Peek(ticket.HeaderRequestID)) != x.RequestID || string(h.Peek(ticket.HeaderPromise)) != "ttft=1s" || string(h.Peek(ticket.HeaderCacheSalt)) != "alice" {
			t.Errorf("%s, with tokens: %s, %s", name, got, h.String())
		}
		x.Given = []byte(`{"created":1}`)
		if got := joined(leg(&h, x)); string(got) != `{"x":1}{"created":1}` || string(h.Peek(ticket.HeaderTokens)) != "1" || string(h.Peek(ticket.HeaderGiven)) != "7" {
			t.Errorf("%s, taken over: %s, %s", name, got, h.String())
		}
	}
	x.Brought, x.Peer = true, &dialect.Peer{Instance: &fleet.Instance{ID: "d1", Epoch: 3, URL: "http://h", KVAddr: "h:2"}, Tokens: 9}
	h = fasthttp.RequestHeader{}
	dialect.Plain(&h, x)
	if string(h.Peek(ticket.HeaderBrought)) != "1" || string(h.Peek(ticket.HeaderPeer)) != "d1 3 http://h h:2 9" || len(h.Peek(ticket.HeaderLink)) > 0 {
		t.Errorf("brought: %s", h.String())
	}
	x.Brought, x.Tokens, x.Top = false, false, &openai.Top{Messages: true}
	h = fasthttp.RequestHeader{}
	if got := joined(d.Bring(&h, x)); string(got) != `{"x":1}{"created":1}` || string(h.RequestURI()) != "/xpyd/v1/bring?chat=true" || string(h.Method()) != "POST" ||
		string(h.Peek(ticket.HeaderGiven)) != "7" || string(h.Peek(ticket.HeaderCacheSalt)) != "alice" || string(h.Peek(ticket.HeaderDeadline)) != "1500" || string(h.Peek(ticket.HeaderPeer)) != "d1 3 http://h h:2 9" ||
		len(h.Peek(ticket.HeaderTokens))+len(h.Peek(ticket.HeaderBrought)) > 0 {
		t.Errorf("to bring: %s, %s", got, h.String())
	}
	if dialect.For("telepathy") != nil {
		t.Error("an unknown dialect exists")
	}
}

func TestNativeBrought(t *testing.T) {
	f := func(status int, body string, want dialect.Brought, ok bool) {
		t.Helper()
		if got, err := dialect.For("native").Brought(dialect.Reply{Status: status, Body: []byte(body)}); got != want || (err == nil) != ok {
			t.Errorf("%d %s: %+v, %v", status, body, got, err)
		}
	}
	f(200, `{"prompt":true,"tokens":48}`, dialect.Brought{Prompt: true, Tokens: 48}, true)
	f(200, `{"prompt":false,"tokens":0}`, dialect.Brought{}, true)
	f(200, `{"prompt":true,"tokens":-1}`, dialect.Brought{}, false)
	f(200, `{"prompt":true}`, dialect.Brought{}, false)
	f(200, `{"tokens":1}`, dialect.Brought{}, false)
	f(200, `{`, dialect.Brought{}, false)
	f(404, `{"prompt":true,"tokens":48}`, dialect.Brought{}, false)
}

func TestNativeResult(t *testing.T) {
	f := func(status int, body, header string, want ticket.Outcome) {
		t.Helper()
		a := dialect.Reply{Status: status, Body: []byte(body), Outcome: header}
		if got := dialect.For("native").Result(a); got.Outcome != want {
			t.Errorf("%d %s: %s, want %s", status, body, got.Outcome, want)
		}
	}
	f(200, `{"outcome":"done","ms":3}`, "", ticket.Done)
	f(503, `{"outcome":"no_space","message":"full"}`, "", ticket.NoSpace)
	f(503, `{"error":{"message":"x"}}`, "dead", ticket.Dead)
	f(200, `{"outcome":"late"}`, "", ticket.Late)
	f(200, `{`, "", ticket.Refused)
	f(500, ``, "", ticket.Refused)
}
