package worker_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/worker"
)

// pair starts a prefill and a decode worker.
func pair(t *testing.T, change func(p, d *worker.Config)) (p, d *worker.Worker) {
	t.Helper()
	var pc, dc worker.Config
	f := func(role fleet.Role, own *worker.Config) *worker.Worker {
		return start(t, func(c *worker.Config) {
			c.Role = string(role)
			*own = *c
			if change != nil {
				change(&pc, &dc)
			}
			*c = *own
		})
	}
	p = f(fleet.Prefill, &pc)
	d = f(fleet.Decode, &dc)
	return p, d
}

// linked are the headers of our router for a pair.
func linked(p *worker.Worker, link string) map[string]string {
	i := p.Instance()
	return map[string]string{"x-xpyd-link": link, "x-xpyd-prefill": i.ID, "x-xpyd-prefill-epoch": fmt.Sprint(i.Epoch),
		"x-xpyd-prefill-kv": i.KVAddr, "x-request-id": "req-1", "x-xpyd-deadline-ms": "120000"}
}

// leg asks prefill to expect a link, as our router does.
func leg(p *worker.Worker, link string) chan string {
	answer := make(chan string, 1)
	go func() {
		resp, err := client.Post(p.URL()+"/xpyd/v1/prefill", "application/json", strings.NewReader(`{"link":"`+link+`","request_id":"req-1","deadline_ms":120000}`))
		if err != nil {
			answer <- err.Error()
			return
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		answer <- fmt.Sprint(resp.StatusCode, " ", resp.Header.Get("x-xpyd-outcome"), " ", string(b))
	}()
	return answer
}

// same compares two answers, ids and what was cached aside.
func same(t *testing.T, how string, got, want *answer) {
	t.Helper()
	g, w := *got.Usage, *want.Usage
	g.Details.Cached, w.Details.Cached = 0, 0
	if !reflect.DeepEqual(got.Choices, want.Choices) || g != w {
		t.Errorf("%s:\n got %+v %+v\nwant %+v %+v", how, got.Choices, g, want.Choices, w)
	}
}

// bodies cover what a first token depends on and what comes back with it.
var bodies = []string{
	`"prompt":"Once upon a time, there was","max_tokens":24,"temperature":0`,
	`"prompt":"Once upon a time","max_tokens":12,"n":3,"seed":11,"temperature":1.3,"top_p":0.9,"logit_bias":{"403":5}`,
	`"prompt":"Lily and","max_tokens":9,"echo":true,"logprobs":3,"prompt_logprobs":2,"seed":2`,
	`"prompt":"Lily","max_tokens":20,"min_tokens":7,"stop":["."],"seed":5,"stop_token_ids":[403]`,
	`"prompt":"Once","max_tokens":1,"temperature":0`,
	`"prompt":"Once upon","max_tokens":0,"echo":true,"logprobs":1`,
}

func TestNative(t *testing.T) {
	p, d := pair(t, nil)
	for _, body := range append(slices.Clone(bodies), `"prompt":["Once upon","Lily was","Tim had a"],"n":2,"max_tokens":8,"seed":3`) {
		want := complete(t, d, nil, "{"+body+"}")
		for _, how := range []string{"cold", "warm"} {
			link := ticket.NewLink().String()
			report := leg(p, link)
			got := complete(t, d, linked(p, link), "{"+body+"}")
			same(t, how+" "+body, got, want)
			if r := <-report; !strings.HasPrefix(r, "200 ") || !strings.Contains(r, `"outcome":"done"`) {
				t.Errorf("%s: the leg got %s", body, r)
			}
			if got.ID != "cmpl-req-1" {
				t.Errorf("id %q", got.ID)
			}
		}
	}
	prompt := `{"prompt":"` + strings.Repeat("The dog ran. ", 12) + `","max_tokens":2}`
	for i := range 2 { // what prefill did not have to compute is cached
		link := ticket.NewLink().String()
		report := leg(p, link)
		resp, b := ask(t, d.URL()+"/v1/completions", linked(p, link), prompt)
		var a answer
		if err := json.Unmarshal(b, &a); err != nil || (a.Usage.Details.Cached >= 16) != (i == 1) {
			t.Errorf("%d: %v %+v", i, err, a.Usage)
		}
		for _, phase := range []string{"wait;dur=", "prefill;dur=", "kv;dur="} {
			if !strings.Contains(resp.Header.Get("Server-Timing"), phase) {
				t.Errorf("Server-Timing %q", resp.Header.Get("Server-Timing"))
			}
		}
		<-report
	}
	empty(t, p)
	empty(t, d)
}

// TestNativeFails: outcomes reach both of the router's legs.
func TestNativeFails(t *testing.T) {
	p, d := pair(t, func(p, d *worker.Config) {
		d.Blocks = 8 // 128 tokens
		p.Blocks = 4
	})
	f := func(header map[string]string, body string, status int, outcome, msg string) {
		t.Helper()
		resp, b := ask(t, d.URL()+"/v1/completions", header, body)
		if resp.StatusCode != status || resp.Header.Get("x-xpyd-outcome") != outcome || !strings.Contains(string(b), msg) {
			t.Errorf("%d %q %s; want %d %q %q", resp.StatusCode, resp.Header.Get("x-xpyd-outcome"), b, status, outcome, msg)
		}
	}
	with := func(change func(h map[string]string)) map[string]string {
		h := linked(p, ticket.NewLink().String())
		change(h)
		return h
	}
	const body = `{"prompt":"Once","max_tokens":2}`
	f(with(func(h map[string]string) { h["x-xpyd-link"] = "zz" }), body, 400, "", "x-xpyd-link")
	f(with(func(h map[string]string) { h["x-xpyd-prefill-epoch"] = "" }), body, 400, "", "x-xpyd-prefill-epoch")
	f(with(func(h map[string]string) { h["x-xpyd-deadline-ms"] = "0" }), body, 400, "", "x-xpyd-deadline-ms")
	f(with(func(h map[string]string) { h["x-xpyd-seed"] = "-1" }), body, 400, "", "x-xpyd-seed")
	f(with(func(h map[string]string) { h["x-xpyd-prefill-kv"] = "192.0.2.1:1" }), body, 502, "incompatible", "allow_hosts")
	f(with(func(h map[string]string) { h["x-xpyd-prefill-kv"] = "127.0.0.1:1" }), body, 502, "dead", "")
	f(with(func(h map[string]string) { h["x-xpyd-prefill-epoch"] = "1" }), body, 502, "dead", "")

	// Prefill has no room for what decode has room for.
	link := ticket.NewLink().String()
	report := leg(p, link)
	f(linked(p, link), `{"prompt":"`+strings.Repeat("Once upon ", 40)+`","max_tokens":2}`, 503, "no_space", "tokens")
	if r := <-report; !strings.HasPrefix(r, "503 no_space") {
		t.Errorf("the leg got %s", r)
	}
	empty(t, p)
	empty(t, d)

	// No ticket comes.
	hasty := start(t, func(c *worker.Config) { c.Role, c.TicketWait = string(fleet.Prefill), 100*time.Millisecond })
	if r := <-leg(hasty, ticket.NewLink().String()); !strings.HasPrefix(r, "504 late") {
		t.Errorf("the leg got %s", r)
	}
	empty(t, hasty)
}

// TestNativeRefusedLate: an engine that refuses a prompt whose KV has arrived leaves none of its
// blocks held.
func TestNativeRefusedLate(t *testing.T) {
	p, d := pair(t, nil)
	if err := d.CloseEngine(t.Context()); err != nil { // as one that shuts down does
		t.Fatal(err)
	}
	link := ticket.NewLink().String()
	report := leg(p, link)
	resp, b := ask(t, d.URL()+"/v1/completions", linked(p, link), `{"prompt":"`+strings.Repeat("The dog ran. ", 12)+`","max_tokens":2}`)
	if resp.StatusCode != 503 || resp.Header.Get("x-xpyd-outcome") != "no_space" {
		t.Errorf("%d %q %s", resp.StatusCode, resp.Header.Get("x-xpyd-outcome"), b)
	}
	if r := <-report; !strings.Contains(r, `"outcome":"done"`) {
		t.Errorf("the leg got %s: nothing was fetched, so the test shows nothing", r)
	}
	empty(t, p)
	empty(t, d)
}

// TestLegEnds: in mid exchange, the end of either leg ends the other.
func TestLegEnds(t *testing.T) {
	p, d := pair(t, func(p, d *worker.Config) { p.StepTokens, p.KVMemory, d.KVMemory = 16, 64<<20, 64<<20 })
	busy := strings.Repeat(`"`+strings.Repeat("Once upon a time. ", 40)+`",`, 250) // more than a moment's work
	body := `{"max_tokens":1,"prompt":[` + strings.TrimSuffix(busy, ",") + `]}`
	for _, ends := range []string{"prefill's", "decode's"} {
		link := ticket.NewLink().String()
		legConn, _ := dial(t, p, "/xpyd/v1/prefill", `{"link":"`+link+`"}`)
		var h strings.Builder
		for k, v := range linked(p, link) {
			fmt.Fprintf(&h, "%s: %s\r\n", k, v)
		}
		decConn, decRead := dialWith(t, d, "/v1/completions", h.String(), body)
		soon(t, patience, func() error {
			if len(p.Ledger().Tickets) == 0 {
				return fmt.Errorf("no ticket yet")
			}
			return nil
		})
		if ends == "prefill's" {
			legConn.Close()
			resp, err := http.ReadResponse(decRead, nil)
			if err != nil || resp.Header.Get("x-xpyd-outcome") != "cancelled" {
				t.Errorf("decode's leg: %v %+v", err, resp)
			}
		} else {
			decConn.Close()
			soon(t, slack, func() error {
				if l := p.Ledger(); len(l.Tickets)+len(l.Blocks) > 0 {
					return fmt.Errorf("%d tickets, %d holders of blocks", len(l.Tickets), len(l.Blocks))
				}
				return nil
			})
			// A link between two of its tickets has none that could fail: it
			// is the router that ends its leg then.
			legConn.Close()
		}
		empty(t, p)
		empty(t, d)
		legConn.Close()
		decConn.Close()
	}
}

// nixl is vLLM's proxy for the NIXL connector: prefill, then decode.
func nixl(t *testing.T, p *worker.Worker, body string) (params map[string]any, first *answer) {
	t.Helper()
	resp, b := ask(t, p.URL()+"/v1/completions", map[string]string{"x-request-id": "req-1"},
		`{`+body+`,"max_tokens":1,"min_tokens":0,"stream":false,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}}`)
	var a answer
	if err := json.Unmarshal(b, &a); err != nil || resp.StatusCode != 200 {
		t.Fatalf("%d %s", resp.StatusCode, b)
	}
	return a.KV, &a
}

func transfer(t *testing.T, params map[string]any) string {
	t.Helper()
	b, err := json.Marshal(params)
	if err != nil {
		t.Fatal(err)
	}
	return `,"kv_transfer_params":` + string(b)
}

func TestNIXL(t *testing.T) {
	p, d := pair(t, nil)
	for _, body := range bodies {
		want := complete(t, d, nil, "{"+body+"}")
		params, first := nixl(t, p, body)
		keys := []string{"do_remote_decode", "do_remote_prefill", "remote_block_ids", "remote_blocks_expiry_time", "remote_engine_id",
			"remote_host", "remote_num_tokens", "remote_port", "remote_request_id", "tp_size", "transfer_mode"}
		var have []string
		for k := range params {
			have = append(have, k)
		}
		if slices.Sort(have); !slices.Equal(have, keys) {
			t.Fatalf("kv_transfer_params has %v, want %v", have, keys)
		}
		if params["do_remote_prefill"] != true || params["do_remote_decode"] != false || params["transfer_mode"] != "pull" ||
			params["remote_blocks_expiry_time"] != nil || params["remote_num_tokens"] != float64(first.Usage.Prompt) ||
			len(params["remote_block_ids"].([]any)) != 1 {
			t.Errorf("%v", params)
		}
		if *first.Choices[0].Finish == "" || first.ID != "cmpl-req-1" {
			t.Errorf("%+v", first)
		}
		if l := p.Ledger(); len(l.Held) != 1 || l.Held[0].Kind != "leased" {
			t.Errorf("%+v", l.Held)
		}
		same(t, body, complete(t, d, nil, "{"+body+transfer(t, params)+"}"), want)
		empty(t, p)
		resp, b := ask(t, d.URL()+"/v1/completions", nil, "{"+body+transfer(t, params)+"}")
		if resp.StatusCode != 504 || resp.Header.Get("x-xpyd-outcome") != "late" {
			t.Errorf("a second claim: %d %s", resp.StatusCode, b)
		}
	}
	// What is not ours, not allowed, or not there.
	params, _ := nixl(t, p, `"prompt":"Once"`)
	f := func(change func(m map[string]any), status int, msg string) {
		t.Helper()
		m := map[string]any{}
		for k, v := range params {
			m[k] = v
		}
		change(m)
		resp, b := ask(t, d.URL()+"/v1/completions", nil, `{"prompt":"Once"`+transfer(t, m)+"}")
		if resp.StatusCode != status || !strings.Contains(string(b), msg) {
			t.Errorf("%v: %d %s", m, resp.StatusCode, b)
		}
	}
	f(func(m map[string]any) { m["remote_host"] = "192.0.2.1" }, 400, "allow_hosts")
	f(func(m map[string]any) { m["remote_engine_id"] = "vllm-1" }, 400, "none of ours")
	f(func(m map[string]any) { m["remote_engine_id"] = "x@1" }, 502, "")
	f(func(m map[string]any) { m["remote_request_id"] = nil }, 400, "remote_request_id")
	f(func(m map[string]any) { m["remote_request_id"] = "xfer:1" }, 400, "remote_request_id")
	f(func(m map[string]any) { m["remote_port"] = 1 }, 502, "")
	for _, port := range []int{-5, 0, 65536, 70000} {
		f(func(m map[string]any) { m["remote_port"] = port }, 400, "remote_port")
	}
	f(func(m map[string]any) { m["do_remote_decode"] = true }, 400, "exclude")
	f(func(m map[string]any) { m["remote_block_ids"] = []int{1, 2} }, 200, "choices") // opaque, as from older vLLM
	if resp, b := ask(t, p.URL()+"/v1/completions", nil, `{"prompt":"a","stream":true,"kv_transfer_params":{"do_remote_decode":true}}`); resp.StatusCode != 400 {
		t.Errorf("a stream from prefill: %d %s", resp.StatusCode, b)
	}
	// A batch is decode's alone: prefill keeps nothing and says so by silence.
	const batch = `{"prompt":["a","b"],"temperature":0,"max_tokens":1,"kv_transfer_params":`
	resp, b := ask(t, p.URL()+"/v1/completions", nil, batch+`{"do_remote_decode":true}}`)
	if resp.StatusCode != 200 || bytes.Contains(b, []byte("kv_transfer_params")) {
		t.Errorf("a batch at prefill: %d %s", resp.StatusCode, b)
	}
	resp, b = ask(t, d.URL()+"/v1/completions", nil, batch+`{"do_remote_prefill":true,"transfer_id":"x","remote_bootstrap_addr":"`+p.URL()+`"}}`)
	if resp.StatusCode != 200 || bytes.Count(b, []byte(`"finish_reason"`)) != 2 {
		t.Errorf("a batch at decode: %d %s", resp.StatusCode, b)
	}
	empty(t, p)
	empty(t, d)
}

// TestLeaseEnds: without a claim the blocks become free again.
func TestLeaseEnds(t *testing.T) {
	p, _ := pair(t, func(p, d *worker.Config) { p.LeaseTime = 50 * time.Millisecond })
	nixl(t, p, `"prompt":"Once upon a time"`)
	empty(t, p)
}

// TestLeaseRenewed: a proxy keeps a finished prompt until its decode comes.
func TestLeaseRenewed(t *testing.T) {
	p, d := pair(t, func(p, d *worker.Config) { p.LeaseTime = time.Minute })
	const body = `"prompt":"Once upon a time","temperature":0`
	want := complete(t, d, nil, "{"+body+"}")
	kept, _ := nixl(t, p, body)
	params, err := json.Marshal(kept)
	if err != nil {
		t.Fatal(err)
	}
	renew := func(in string, status int, part string) {
		t.Helper()
		if resp, b := ask(t, p.URL()+"/xpyd/v1/lease", nil, in); resp.StatusCode != status || !strings.Contains(string(b), part) {
			t.Errorf("%s: %d %s, want %d %s", in, resp.StatusCode, b, status, part)
		}
	}
	renew(string(params), 200, `{"expires_ms":60000,"renewable_ms":4`)
	if _, b := send(t, http.MethodGet, p.URL()+"/debug/ledger", nil, ""); !strings.Contains(string(b), "renewed 1 times") {
		t.Errorf("%s", b)
	}
	renew(`{`, 400, "unexpected end")
	renew(`{}`, 400, `"param":"remote_request_id"`)
	renew(`{"remote_request_id":"a","transfer_id":"b"}`, 400, `"param":"remote_request_id"`)
	renew(`{"remote_request_id":"xfer:b"}`, 400, "none of ours")
	renew(`{"transfer_id":"`+strings.Repeat("x", 257)+`"}`, 400, `"param":"transfer_id"`)
	renew(`{"remote_request_id":"nobody's"}`, 404, "no_lease")
	same(t, "renewed", complete(t, d, nil, "{"+body+transfer(t, kept)+"}"), want)
	renew(string(params), 404, "no_lease")
	if resp, b := ask(t, p.URL()+"/v1/completions", nil, "{"+body+`,"max_tokens":1,"kv_transfer_params":{"do_remote_decode":true,"transfer_id":"t"}}`); resp.StatusCode != 200 {
		t.Fatalf("%d %s", resp.StatusCode, b)
	}
	renew(`{"transfer_id":"t"}`, 200, "expires_ms")
	same(t, "of a transfer", complete(t, d, nil, "{"+body+`,"kv_transfer_params":{"do_remote_prefill":true,"transfer_id":"t","remote_bootstrap_addr":"`+p.URL()+`"}}`), want)
	empty(t, p)
}

// TestMooncake: both legs at once, in either order.
func TestMooncake(t *testing.T) {
	p, d := pair(t, func(p, d *worker.Config) { p.TicketWait = patience })
	query := func() map[string]any {
		_, b := send(t, http.MethodGet, p.URL()+"/query", nil, "")
		var ranks map[string]map[string]any
		if err := json.Unmarshal(b, &ranks); err != nil {
			t.Fatal(err)
		}
		return ranks["0"]
	}
	rank := query()
	if addr := rank["worker_addr"].(map[string]any)["0"].(map[string]any)["0"]; addr != "tcp://"+p.Instance().KVAddr {
		t.Errorf("%v", rank)
	}
	sides := func(id string) (string, string) {
		return fmt.Sprintf(`,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":%q}}`, id),
			fmt.Sprintf(`,"kv_transfer_params":{"do_remote_decode":false,"do_remote_prefill":true,"transfer_id":%q,"remote_bootstrap_addr":%q,"remote_engine_id":%q}}`, id, p.URL(), rank["engine_id"])
	}
	post := func(w *worker.Worker, body string) chan []byte {
		c := make(chan []byte, 1)
		go func() {
			resp, err := client.Post(w.URL()+"/v1/completions", "application/json", strings.NewReader(body))
			if err != nil {
				c <- []byte(err.Error())
				return
			}
			defer resp.Body.Close()
			b, _ := io.ReadAll(resp.Body)
			c <- append([]byte(fmt.Sprint(resp.StatusCode, " ")), b...)
		}()
		return c
	}
	for i, body := range bodies {
		want := complete(t, d, nil, "{"+body+"}")
		ps, ds := sides(fmt.Sprint("xfer-", i))
		pbody := "{" + body + `,"max_tokens":1,"min_tokens":0` + ps
		var pc, dc chan []byte
		if i%2 == 0 {
			pc, dc = post(p, pbody), post(d, "{"+body+ds)
		} else { // decode is early
			dc = post(d, "{"+body+ds)
			soon(t, slack, func() error {
				if len(p.Ledger().Held) == 0 {
					return fmt.Errorf("no claim yet")
				}
				return nil
			})
			pc = post(p, pbody)
		}
		if b := <-pc; !bytes.HasPrefix(b, []byte("200 ")) || bytes.Contains(b, []byte("kv_transfer_params")) {
			t.Errorf("%s: prefill %s", body, b)
		}
		b := <-dc
		var got answer
		if err := json.Unmarshal(bytes.TrimPrefix(b, []byte("200 ")), &got); err != nil {
			t.Fatalf("%s: decode %s", body, b)
		}
		same(t, body, &got, want)
	}
	// Prefill's leg fails: decode hears of it at once.
	ps, ds := sides("xfer-bad")
	dc := post(d, `{"prompt":"Lily was here"`+ds)
	soon(t, slack, func() error {
		if len(p.Ledger().Held) == 0 {
			return fmt.Errorf("no claim yet")
		}
		return nil
	})
	if b := <-post(p, `{"prompt":"Lily was there"`+ps); !bytes.HasPrefix(b, []byte("200 ")) {
		t.Errorf("prefill %s", b)
	}
	if b := <-dc; !bytes.Contains(b, []byte("another prompt")) {
		t.Errorf("decode %s", b)
	}
	// A bootstrap that is allowed, and names an address that is not.
	astray := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(rw, `{"0":{"engine_id":"prefill-9@1","worker_addr":{"0":{"0":"tcp://192.0.2.1:9000"}}}}`)
	}))
	defer astray.Close()
	if b := <-post(d, `{"prompt":"x","kv_transfer_params":{"do_remote_prefill":true,"transfer_id":"astray","remote_bootstrap_addr":"`+astray.URL+`"}}`); !bytes.HasPrefix(b, []byte("400 ")) || !bytes.Contains(b, []byte("allow_hosts")) {
		t.Errorf("%s", b)
	}
	// An engine of a former epoch, a stranger's bootstrap, an id used twice.
	_, ds = sides("xfer-old")
	if b := <-post(d, `{"prompt":"x"`+strings.Replace(ds, "@", "@1", 1)); !bytes.HasPrefix(b, []byte("502 ")) {
		t.Errorf("%s", b)
	}
	if b := <-post(d, `{"prompt":"x"`+strings.Replace(ds, p.URL(), "http://192.0.2.1:80", 1)); !bytes.HasPrefix(b, []byte("400 ")) {
		t.Errorf("%s", b)
	}
	if b := <-post(d, `{"prompt":"x"`+strings.Replace(ds, p.URL(), "http://127.0.0.1:1", 1)); !bytes.HasPrefix(b, []byte("502 ")) {
		t.Errorf("%s", b)
	}
	empty(t, p)
	empty(t, d)
}
