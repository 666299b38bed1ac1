package mock_test

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/mock"
)

func start(t *testing.T, dialect, role string) *mock.Engine {
	t.Helper()
	e, err := mock.Start(mock.Config{Listen: "127.0.0.1:0", Dialect: dialect, Role: role, Model: "m"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = e.Close() })
	return e
}

func post(t *testing.T, url, body, id string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/v1/completions", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-Request-Id", id)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

// TestStrict: a wrong field is a 400 that names it.
func TestStrict(t *testing.T) {
	f := func(dialect, role, body, want string) {
		t.Helper()
		if status, text := post(t, start(t, dialect, role).URL(), body, "r"); status != 400 || !strings.Contains(text, want) {
			t.Errorf("%s %s, %s: %d %s", dialect, role, body, status, text)
		}
	}
	pull := `"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}`
	f("vllm-nixl", "prefill", `{"prompt":"a","max_tokens":1,`+pull+`}`, "stream is absent")
	f("vllm-nixl", "prefill", `{"prompt":"a","max_tokens":2,"stream":false,`+pull+`}`, "max_tokens is 2")
	f("vllm-nixl", "prefill", `{"prompt":"a","max_tokens":1,"stream":false,"stream_options":{},`+pull+`}`, "stream_options")
	f("vllm-nixl", "decode", `{"prompt":"a","max_tokens":1,"stream":false,`+pull+`}`, "a prefill leg came to a decode engine")
	f("vllm-nixl", "decode", `{"prompt":"a","kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false}}`, "remote_engine_id is absent")
	f("vllm-mooncake", "prefill", `{"prompt":"a","max_tokens":1,"stream":false,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false}}`, "transfer_id is absent")
	f("vllm-p2pnccl", "decode", `{"prompt":"a"}`, "holds no addresses")
	f("sglang", "decode", `{"prompt":"a"}`, "bootstrap_room is absent")
	f("sglang", "prefill", `{"prompt":"a","bootstrap_host":"h","bootstrap_port":1,"bootstrap_room":9223372036854775808}`, "not within")
	f("sglang", "prefill", `{"prompt":["a","b"],"bootstrap_host":"h","bootstrap_port":1,"bootstrap_room":1}`, "a batch of 2")
	f("sglang", "prefill", `{"prompt":["a","b"],"bootstrap_host":["h","h"],"bootstrap_port":[1,1],"bootstrap_room":[1,1]}`, "came twice")
	f("trtllm", "decode", `{"prompt":"a","disaggregated_params":{"request_type":"generation_only","disagg_request_id":1,"encoded_opaque_state":"h:1"}}`, "want prefill's token ids")
	f("openai", "decode", `{"prompt":"a","bootstrap_room":1}`, "bootstrap_room")
	f("openai", "decode", `{`, "unexpected end")
}

// TestBounds: what a mock would take much memory for is a 400.
func TestBounds(t *testing.T) {
	url := start(t, "openai", "both").URL()
	f := func(body string, status int, want string) {
		t.Helper()
		if got, text := post(t, url, body, "r"); got != status || !strings.Contains(text, want) {
			t.Errorf("%s: %d %.200s", body, got, text)
		}
	}
	f(`{"prompt":"a","n":-1}`, 400, "n is -1")
	f(`{"prompt":"a","n":129}`, 400, "n is 129")
	f(`{"prompt":"a","max_tokens":-1}`, 400, "max_tokens is -1")
	f(`{"prompt":"a","max_tokens":1000000000}`, 400, "max_tokens is 1000000000")
	f(`{"prompt":["a","b"],"n":128,"max_tokens":32768}`, 400, "for 256 choices")
	f(`{"prompt":"a","n":2,"max_tokens":0}`, 200, `"index":1`)
}

// TestCollect: decode gets from prefill what it names, once, and only for the
// same prompt.
func TestCollect(t *testing.T) {
	p, d := start(t, "vllm-offloading", "prefill"), start(t, "vllm-offloading", "decode")
	host, port, _ := strings.Cut(p.Addr(), ":")
	keep := func(link string) {
		t.Helper()
		if status, text := post(t, p.URL(), `{"prompt":"a","stream":false,"max_tokens":1,"kv_transfer_params":{"remote_decoder":{"kv_request_id":"`+link+`"}}}`, "r"); status != 200 {
			t.Fatalf("%d %s", status, text)
		}
	}
	take := func(link, prompt string) (int, string) {
		return post(t, d.URL(), fmt.Sprintf(`{"prompt":%q,"max_tokens":2,"kv_transfer_params":{"remote_prefiller":{"kv_request_id":%q,"remote_host":%q,"remote_port":%s}}}`, prompt, link, host, port), "r")
	}
	keep("l1")
	if p.Held() != 1 {
		t.Errorf("%d held", p.Held())
	}
	if status, text := take("l1", "b"); status != 500 || !strings.Contains(text, "another prompt") {
		t.Errorf("%d %s", status, text)
	}
	if status, text := take("l1", "a"); status != 200 || !strings.Contains(text, strings.Join(mock.Words(`"a"`, 0, 2), "")) {
		t.Errorf("%d %s", status, text)
	}
	if status, text := take("l1", "a"); status != 500 || !strings.Contains(text, "collected before") {
		t.Errorf("%d %s", status, text)
	}
	if p.Held() != 0 || len(p.Records()) != 1 || len(d.Records()) != 3 {
		t.Errorf("%d held, %d and %d records", p.Held(), len(p.Records()), len(d.Records()))
	}
}

func TestConfig(t *testing.T) {
	for _, s := range []string{"status=200", "status", "cut=0", "hang=1", "fire", "freeze", "hang,fire"} {
		if _, err := mock.ParseFault(s); err == nil {
			t.Errorf("%q was taken", s)
		}
	}
	for s, want := range map[string]mock.Fault{"": {}, "status=503": {Status: 503}, "cut=3": {Cut: 3}, "hang": {Hang: true}, "refuse": {Refuse: true}, "error-event": {Event: true},
		"freeze=2": {Freeze: 2}, "mute": {Mute: true}, "no-params": {NoParams: true}, "hang,probes": {Hang: true, Probes: true}} {
		if got, err := mock.ParseFault(s); err != nil || got != want {
			t.Errorf("%q: %+v, %v", s, got, err)
		}
	}
	for _, c := range []mock.Config{{Dialect: "x", Role: "both"}, {Dialect: "openai", Role: "cook"}, {Dialect: "openai", Role: "both", TTFT: -1}} {
		if _, err := mock.Start(c); err == nil {
			t.Errorf("%+v was taken", c)
		}
	}
}
