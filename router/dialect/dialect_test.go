package dialect_test

import (
	"encoding/json"
	"math/big"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/router/dialect"
)

const (
	linkHex = "00112233445566778899aabbccddeeff"
	id      = "req-1-" + linkHex
	text    = `{"prompt":"a","stream":true,"stream_options":{"include_usage":true},"max_tokens":7,"min_tokens":2,"max_completion_tokens":9,"stop":["b"],"t":1.0}`
)

// exchange is one with known numbers: the link's.
func exchange(t *testing.T, body string, change ...func(p, d *fleet.Instance)) *dialect.Exchange {
	t.Helper()
	top, err := openai.Scan([]byte(body))
	if err != nil {
		t.Fatal(err)
	}
	link, lerr := ticket.ParseLink(linkHex)
	if lerr != nil {
		t.Fatal(lerr)
	}
	x := &dialect.Exchange{RequestID: "req-1", Link: link, Path: "/v1/completions", Body: []byte(body), Top: &top, Left: time.Second,
		Prefill: &fleet.Instance{ID: "p", URL: "http://10.0.0.1:8000"}, Decode: &fleet.Instance{ID: "d", URL: "http://10.0.0.2:8000"}}
	for _, c := range change {
		c(x.Prefill, x.Decode)
	}
	return x
}

// legs checks both legs' bodies, as JSON, and that they share path and id.
func legs(t *testing.T, name string, x *dialect.Exchange, prefill, decode string) (p, d *fasthttp.RequestHeader) {
	t.Helper()
	speak := dialect.For(name)
	p, d = &fasthttp.RequestHeader{}, &fasthttp.RequestHeader{}
	same(t, name+" prefill", joined(speak.Prefill(p, x)), prefill)
	same(t, name+" decode", joined(speak.Decode(d, x)), decode)
	for _, h := range []*fasthttp.RequestHeader{p, d} {
		if string(h.RequestURI()) != x.Path || string(h.Method()) != "POST" || string(h.ContentType()) != "application/json" {
			t.Errorf("%s: %s", name, h)
		}
	}
	if a, b := string(p.Peek("X-Request-Id")), string(d.Peek("X-Request-Id")); a != b || !strings.Contains(a, linkHex) {
		t.Errorf("%s: request ids %q and %q", name, a, b)
	}
	return p, d
}

func same(t *testing.T, what string, got []byte, want string) {
	t.Helper()
	decode := func(b string) (v any) {
		d := json.NewDecoder(strings.NewReader(b))
		d.UseNumber()
		if err := d.Decode(&v); err != nil {
			t.Errorf("%s: %v in %s", what, err, b)
		}
		return v
	}
	if !reflect.DeepEqual(decode(string(got)), decode(want)) {
		t.Errorf("%s:\n got %s\nwant %s", what, got, want)
	}
}

// onlyPrefill is what vLLM's prefill is asked, as vLLM's proxy does.
const onlyPrefill = `{"prompt":"a","stream":false,"max_tokens":1,"max_completion_tokens":1,"stop":["b"],"t":1.0`

// with adds members to a JSON object.
func with(object, members string) string {
	return strings.TrimSuffix(object, "}") + "," + members + "}"
}

func answer(body string) dialect.Reply { return dialect.Reply{Status: 200, Body: []byte(body)} }

func TestNIXLPull(t *testing.T) {
	x := exchange(t, text)
	asked := `"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}`
	kept := `{"do_remote_prefill":true, "remote_block_ids":[[1,2],[3]],"remote_port":5600,"x":1.50}`
	speak := dialect.For("vllm-nixl")
	r := speak.Result(answer(`{"choices":[],"kv_transfer_params": ` + kept + `,"usage":{"prompt_tokens":5}}`))
	if r.Outcome != ticket.Done || string(r.Kept.Params) != kept || !r.Counted || r.Prompt.Prompt != 5 {
		t.Fatalf("%+v", r)
	}
	x.Kept = r.Kept
	legs(t, "vllm-nixl", x, with(onlyPrefill, asked), with(text, `"kv_transfer_params":`+kept))
	if got := joined(speak.Decode(&fasthttp.RequestHeader{}, x)); !strings.Contains(string(got), kept) { // verbatim
		t.Errorf("%s", got)
	}
	for _, body := range []string{`{}`, `{"kv_transfer_params":null}`, `{"kv_transfer_params":{}}`, `{"kv_transfer_params":[1,2,3,4]}`, `{`} {
		if r := speak.Result(answer(body)); r.Outcome != ticket.Incompatible {
			t.Errorf("%s: %+v", body, r)
		}
	}
	x = exchange(t, text, func(p, d *fleet.Instance) { p.DPRanks = 4 })
	p, d := legs(t, "vllm-nixl", withKept(x, `{"a":1}`), with(onlyPrefill, asked), with(text, `"kv_transfer_params":{"a":1}`))
	if a, b := string(p.Peek("X-data-parallel-rank")), string(d.Peek("X-data-parallel-rank")); a == "" || b != "" {
		t.Errorf("ranks %q and %q", a, b)
	}
	x = exchange(t, text, func(p, d *fleet.Instance) { p.DPRanks, d.DPRanks = 4, 2 })
	x.PrefillRank, x.DecodeRank = 4, 2
	p, d = legs(t, "vllm-nixl", withKept(x, `{"a":1}`), with(onlyPrefill, asked), with(text, `"kv_transfer_params":{"a":1}`))
	if a, b := string(p.Peek("X-data-parallel-rank")), string(d.Peek("X-data-parallel-rank")); a != "3" || b != "1" {
		t.Errorf("chosen ranks %q and %q", a, b)
	}
	x = exchange(t, text, func(p, d *fleet.Instance) { p.DPRanks, p.EngineID, p.Bootstrap = 4, "e", "h:5600" })
	x.PrefillRank = 3
	if got := string(joined(dialect.For("vllm-nixl-push").Decode(&fasthttp.RequestHeader{}, x))); !strings.Contains(got, `"remote_engine_id":"e_dp2","remote_host":"h","remote_port":5602`) {
		t.Errorf("a push from a rank: %s", got)
	}
}

func withKept(x *dialect.Exchange, raw string) *dialect.Exchange {
	x.Kept.Params = []byte(raw)
	return x
}

func TestNIXLPush(t *testing.T) {
	x := exchange(t, text, func(p, d *fleet.Instance) { p.EngineID, p.Bootstrap, p.TP = "e1", "10.0.0.9:5601", 2 })
	p, _ := legs(t, "vllm-nixl-push", x,
		with(onlyPrefill, `"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}`),
		with(text, `"kv_transfer_params":{"do_remote_decode":false,"do_remote_prefill":true,"remote_engine_id":"e1","remote_host":"10.0.0.9","remote_port":5601,"tp_size":2,"pp_size":1,"remote_request_id":"`+id+`"}`))
	if string(p.Peek("X-Request-Id")) != id {
		t.Error(p)
	}
}

func TestMooncake(t *testing.T) {
	speak := dialect.For("vllm-mooncake")
	x := exchange(t, text)
	if url := speak.Ask(x.Prefill); url != "http://10.0.0.1:8998/query" {
		t.Error(url)
	}
	var err error
	if x.Facts, err = speak.Learn([]byte(`{"0":{"engine_id":"e0","worker_addr":{}},"1":{"engine_id":"e1"}}`)); err != nil {
		t.Fatal(err)
	}
	legs(t, "vllm-mooncake", x,
		strings.Replace(with(onlyPrefill, `"ignore_eos":true,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"xfer-`+linkHex+`"}`), `"stop":["b"],`, "", 1),
		with(text, `"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_bootstrap_addr":"http://10.0.0.1:8998","remote_engine_id":"e0","transfer_id":"xfer-`+linkHex+`"}`))
	for _, body := range []string{``, `{}`, `{"x":{"engine_id":"e"}}`, `{"0":{}}`, `[]`} {
		if _, err := speak.Learn([]byte(body)); err == nil {
			t.Errorf("%q was learnt", body)
		}
	}
}

func TestOffloading(t *testing.T) {
	legs(t, "vllm-offloading", exchange(t, text),
		with(onlyPrefill, `"kv_transfer_params":{"remote_decoder":{"kv_request_id":"`+linkHex+`"}}`),
		with(text, `"kv_transfer_params":{"remote_prefiller":{"kv_request_id":"`+linkHex+`","remote_host":"10.0.0.1","remote_port":5710}}`))
}

func TestStorage(t *testing.T) {
	legs(t, "storage", exchange(t, text), onlyPrefill+"}", text)
}

func TestP2pNccl(t *testing.T) {
	x := exchange(t, text, func(p, d *fleet.Instance) { p.Bootstrap, d.Bootstrap = "10.0.0.1:14579", "10.0.0.2:14580" })
	p, _ := legs(t, "vllm-p2pnccl", x, strings.NewReplacer(`"max_tokens":7`, `"max_tokens":1`, `"max_completion_tokens":9`, `"max_completion_tokens":1`).Replace(text), text)
	if got := string(p.Peek("X-Request-Id")); got != "___prefill_addr_10.0.0.1:14579___decode_addr_10.0.0.2:14580_"+linkHex {
		t.Error(got)
	}
}

// The room of linkHex: the first eight bytes, halved.
const room = "2411339094602555"

func TestSGLang(t *testing.T) {
	want, _ := new(big.Int).SetString(linkHex[:16], 16)
	if got := new(big.Int).Rsh(want, 1).String(); got != room {
		t.Fatalf("the room is %s", got)
	}
	x := exchange(t, text, func(p, d *fleet.Instance) { p.Bootstrap = "10.0.0.1:8998" })
	both := with(text, `"bootstrap_host":"10.0.0.1","bootstrap_port":8998,"bootstrap_room":`+room)
	legs(t, "sglang", x, both, both)

	x = exchange(t, `{"prompt":["a","b"],"n":2}`)
	p := joined(dialect.For("sglang").Prefill(&fasthttp.RequestHeader{}, x))
	d := joined(dialect.For("sglang").Decode(&fasthttp.RequestHeader{}, x))
	var v struct {
		Host []string `json:"bootstrap_host"`
		Port []*int   `json:"bootstrap_port"`
		Room []int64  `json:"bootstrap_room"`
	}
	if err := json.Unmarshal(p, &v); err != nil || len(v.Host) != 2 || v.Host[1] != "10.0.0.1" || len(v.Port) != 2 || v.Port[0] != nil ||
		len(v.Room) != 2 || v.Room[0] == v.Room[1] || v.Room[0] < 0 || v.Room[1] < 0 || string(p) != string(d) {
		t.Errorf("%v %s %s", err, p, d)
	}

	x = exchange(t, `{"prompt":"a"}`, func(p, d *fleet.Instance) { p.DPRanks, d.DPRanks, p.Bootstrap = 4, 3, "10.0.0.1:8998" })
	boot := `"bootstrap_host":"10.0.0.1","bootstrap_port":8998,"bootstrap_room":` + room // mod 4 is 3, mod 3 is 2
	legs(t, "sglang", x, `{"prompt":"a",`+boot+`,"routed_dp_rank":3}`, `{"prompt":"a",`+boot+`,"routed_dp_rank":2,"disagg_prefill_dp_rank":3}`)
	x.PrefillRank, x.DecodeRank = 2, 1 // chosen, from 1
	legs(t, "sglang", x, `{"prompt":"a",`+boot+`,"routed_dp_rank":1}`, `{"prompt":"a",`+boot+`,"routed_dp_rank":0,"disagg_prefill_dp_rank":1}`)
	x.PrefillRank, x.DecodeRank = 9, 0 // of an engine that had more of them
	legs(t, "sglang", x, `{"prompt":"a",`+boot+`,"routed_dp_rank":3}`, `{"prompt":"a",`+boot+`,"routed_dp_rank":2,"disagg_prefill_dp_rank":3}`)
}

// disagg is the room with the bit that the engines' own ids lack.
const disagg = "4614097357521990459"

func TestTRTContextFirst(t *testing.T) {
	speak := dialect.For("trtllm")
	noStream := strings.Replace(strings.Replace(text, `"stream":true`, `"stream":false`, 1), `"stream_options":{"include_usage":true},`, "", 1)
	prefill := func(x *dialect.Exchange) string {
		var v struct {
			P struct {
				ID json.Number `json:"disagg_request_id"`
			} `json:"disaggregated_params"`
		}
		b := joined(speak.Prefill(&fasthttp.RequestHeader{}, x))
		if err := json.Unmarshal(b, &v); err != nil {
			t.Fatal(err)
		}
		if n, err := v.P.ID.Int64(); err != nil || n < 1<<62 {
			t.Errorf("disagg_request_id %s", v.P.ID)
		}
		return v.P.ID.String()
	}
	x := exchange(t, text)
	did := prefill(x)
	r := speak.Result(answer(`{"prompt_token_ids":[1, 2],"usage":{"prompt_tokens":2},"choices":[{"finish_reason":"length","disaggregated_params":{"request_type":"context_only","ctx_request_id":5,"disagg_request_id":6,"encoded_opaque_state":"s"}}]}`))
	if r.Outcome != ticket.Done || r.Final != nil {
		t.Fatalf("%+v", r)
	}
	x.Kept = r.Kept
	legs(t, "trtllm", x, with(noStream, `"disaggregated_params":{"request_type":"context_only","disagg_request_id":`+did+`,"schedule_style":"context_first"}`),
		with(strings.Replace(text, `"prompt":"a"`, `"prompt":[1,2]`, 1), `"disaggregated_params":{"request_type":"generation_only","ctx_request_id":5,"disagg_request_id":6,"encoded_opaque_state":"s","ctx_usage":{"prompt_tokens":2}}`))

	chat := exchange(t, `{"messages":[]}`)
	chat.Kept = r.Kept
	if b := string(joined(speak.Decode(&fasthttp.RequestHeader{}, chat))); !strings.Contains(b, `"messages":[]`) || !strings.Contains(b, `"prompt_token_ids":[1, 2]`) {
		t.Error(b)
	}
	if r := speak.Result(answer(`{"choices":[{"finish_reason":"stop","text":""}]}`)); r.Outcome != ticket.Done || r.Final == nil {
		t.Errorf("%+v", r)
	}
	// The client gets none of what links the legs.
	if r := speak.Result(answer(`{"id":"c","prompt_token_ids":[1],"choices":[{"finish_reason":"stop","text":"a","disaggregated_params":{"ctx_request_id":5}}]}`)); string(r.Final) != `{"choices":[{"finish_reason":"stop","text":"a"}],"id":"c"}` {
		t.Errorf("%s", r.Final)
	}
	for body, want := range map[string]ticket.Outcome{`{"choices":[]}`: ticket.Refused, `{"choices":[{},{}]}`: ticket.Refused, `{"choices":[{"finish_reason":"length"}]}`: ticket.Incompatible} {
		if r := speak.Result(answer(body)); r.Outcome != want {
			t.Errorf("%s: %+v", body, r)
		}
	}
}

func TestTRTGenerationFirst(t *testing.T) {
	x := exchange(t, `{"prompt":"a","stream":true}`, func(p, d *fleet.Instance) { p.Bootstrap = "10.0.0.1:9000" })
	legs(t, "trtllm-generation-first", x,
		`{"prompt":"a","stream":false,"disaggregated_params":{"request_type":"context_only","disagg_request_id":`+disagg+`,"schedule_style":"generation_first"}}`,
		`{"prompt":"a","stream":true,"disaggregated_params":{"request_type":"generation_only","ctx_request_id":`+disagg+`,"disagg_request_id":`+disagg+`,"schedule_style":"generation_first","ctx_info_endpoint":"10.0.0.1:9000"}}`)
}

// TestCannot: what each dialect splits.
func TestCannot(t *testing.T) {
	shapes := map[dialect.Shape]string{dialect.Choices: `{"n":2}`, dialect.Batch: `{"prompt":["a","b"]}`, dialect.Echo: `{"echo":true}`,
		dialect.Logprobs: `{"logprobs":1}`, dialect.PromptLogprobs: `{"prompt_logprobs":0}`, dialect.Chat: `{"messages":[]}`, dialect.Twice: `{"stop":1,"stop":2}`}
	for _, name := range dialect.Names() {
		rules := dialect.For(name).Rules
		for shape, body := range shapes {
			var want dialect.Shape
			switch shape {
			case dialect.Chat, dialect.Logprobs:
			case dialect.Choices, dialect.Batch:
				if name != "sglang" {
					want = shape
				}
			default:
				want = shape
			}
			if name == fleet.Native || rules.Order == dialect.Alone {
				want = ""
			}
			top, err := openai.Scan([]byte(body))
			if err != nil {
				t.Fatal(err)
			}
			if got := rules.Cannot(&top); got != want {
				t.Errorf("%s, %s: %q, want %q", name, body, got, want)
			}
		}
		if rules.Gap > 0 && rules.Hold > 0 && rules.Gap >= rules.Hold {
			t.Errorf("%s: the gap outlasts the hold", name)
		}
	}
}

// TestStatuses: how a foreign prefill's answer is read.
func TestStatuses(t *testing.T) {
	f := func(status int, body string, want ticket.Outcome) {
		t.Helper()
		if r := dialect.For("storage").Result(dialect.Reply{Status: status, Body: []byte(body)}); r.Outcome != want || want != ticket.Done && r.Message == "" {
			t.Errorf("%d %s: %+v", status, body, r)
		}
	}
	f(200, `{}`, ticket.Done)
	f(200, `data: {"error":{"message":"x"}}`, ticket.Refused)
	f(200, `data: {"object":"error","message":"x"}`, ticket.Refused)
	f(503, `{"error":{"message":"full"}}`, ticket.NoSpace)
	f(429, ``, ticket.NoSpace)
	f(500, `{"object":"error","message":"x"}`, ticket.Refused)
}
