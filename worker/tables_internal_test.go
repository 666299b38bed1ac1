package worker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/decode"
	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier"
	"github.com/xpyd/xpyd/engine/tier/host"
	"github.com/xpyd/xpyd/engine/tier/level"
	"github.com/xpyd/xpyd/engine/tier/ssd"
	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/prefill"
)

// TestFailures: what clients and routers are told of each error, however it is wrapped: the status,
// the code, and the outcome of those that are not the client's fault.
func TestFailures(t *testing.T) {
	fetched := func(o ticket.Outcome) error { return &decode.Error{Outcome: o, Err: errors.New("x")} }
	errOf := func(f *failure) error { return f }
	for _, c := range []struct {
		of      string
		to      func(error) error
		err     error
		status  int
		code    string
		param   string
		outcome ticket.Outcome
	}{
		{"engine", func(e error) error { return errOf(engineFailure(e)) }, &engine.RequestError{Field: "n", Msg: "m"}, 400, "", "n", ""},
		{"engine", func(e error) error { return errOf(engineFailure(e)) }, &engine.TooLongError{}, 400, "", "prompt", ""},
		{"engine", func(e error) error { return errOf(engineFailure(e)) }, &engine.OutputError{}, 500, "model_output_invalid", "", ticket.Invalid},
		{"engine", func(e error) error { return errOf(engineFailure(e)) }, engine.ErrLate, 503, "shed", "", ticket.Shed},
		{"engine", func(e error) error { return errOf(engineFailure(e)) }, engine.ErrQueueFull, 503, "unavailable", "", ticket.NoSpace},
		{"engine", func(e error) error { return errOf(engineFailure(e)) }, engine.ErrClosed, 503, "unavailable", "", ticket.NoSpace},
		{"engine", func(e error) error { return errOf(engineFailure(e)) }, errors.New("x"), 502, "engine_failed", "", ticket.Dead},
		{"fetch", func(e error) error { return errOf(fetchFailure(e)) }, fetched(ticket.NoSpace), 503, "unavailable", "", ticket.NoSpace},
		{"fetch", func(e error) error { return errOf(fetchFailure(e)) }, fetched(ticket.Late), 504, "deadline_exceeded", "", ticket.Late},
		{"fetch", func(e error) error { return errOf(fetchFailure(e)) }, fetched(ticket.Shed), 503, "shed", "", ticket.Shed},
		{"fetch", func(e error) error { return errOf(fetchFailure(e)) }, fetched(ticket.Invalid), 500, "model_output_invalid", "", ticket.Refused},
		{"fetch", func(e error) error { return errOf(fetchFailure(e)) }, fetched(ticket.Corrupt), 502, "engine_failed", "", ticket.Corrupt},
		{"fetch", func(e error) error { return errOf(fetchFailure(e)) }, errors.New("x"), 502, "engine_failed", "", ticket.Dead},
		{"keep", keepFailure, prefill.ErrLeaseExists, 400, "", fieldTransfer, ""},
		{"keep", keepFailure, prefill.ErrTooManyLeases, 503, "unavailable", "", ticket.NoSpace},
		{"keep", keepFailure, prefill.ErrClaimGone, 502, "engine_failed", "", ticket.Cancelled},
		{"keep", keepFailure, engine.ErrLate, 503, "shed", "", ticket.Shed},
		{"keep", keepFailure, engine.ErrQueueFull, 503, "unavailable", "", ticket.NoSpace},
		{"memory", func(e error) error { return errOf(memoryFailure(e)) }, errMemory, 503, "unavailable", "", ticket.NoSpace},
		{"memory", func(e error) error { return errOf(memoryFailure(e)) }, errWaiters, 503, "unavailable", "", ticket.NoSpace},
		{"memory", func(e error) error { return errOf(memoryFailure(e)) }, errClosing, 503, "unavailable", "", ticket.NoSpace},
		{"memory", func(e error) error { return errOf(memoryFailure(e)) }, errors.New("x"), 502, "engine_failed", "", ticket.Cancelled},
		{"any", func(e error) error { return e }, errors.New("x"), 500, "internal_error", "", ""},
	} {
		var ctx fasthttp.RequestCtx
		writeError(&ctx, fmt.Errorf("outer: %w", c.to(fmt.Errorf("wrapped: %w", c.err))))
		body := string(ctx.Response.Body())
		null := func(s string) string {
			if s == "" {
				return "null"
			}
			return `"` + s + `"`
		}
		if ctx.Response.StatusCode() != c.status || !strings.Contains(body, `"param":`+null(c.param)+`,"code":`+null(c.code)) ||
			string(ctx.Response.Header.Peek(ticket.HeaderOutcome)) != string(c.outcome) || string(ctx.Response.Header.Peek("Retry-After")) != map[bool]string{true: "1"}[c.status == 503] {
			t.Errorf("%s, %v: %d %s, outcome %q", c.of, c.err, ctx.Response.StatusCode(), body, ctx.Response.Header.Peek(ticket.HeaderOutcome))
		}
	}
}

// TestTierErrors: what a fetch from a peer failed of, in the words of the tiers.
func TestTierErrors(t *testing.T) {
	for _, c := range []struct {
		outcome  ticket.Outcome
		url      string
		is, isnt error
	}{
		{ticket.Cancelled, "", context.Canceled, tier.ErrAbsent},
		{ticket.Corrupt, "", tier.ErrCorrupt, tier.ErrBusy},
		{ticket.NoSpace, "", tier.ErrBusy, tier.ErrAbsent},
		{ticket.Refused, "", tier.ErrAbsent, tier.ErrBusy},
		{ticket.Refused, "http://h", nil, tier.ErrAbsent},
		{ticket.Dead, "", nil, tier.ErrAbsent},
	} {
		cause := &decode.Error{Outcome: c.outcome, Err: errors.New("x")}
		err := tierError(&tier.Fetch{Peer: tier.Peer{URL: c.url}}, cause)
		if !errors.Is(err, cause) || c.is != nil && !errors.Is(err, c.is) || errors.Is(err, c.isnt) {
			t.Errorf("%s, %q: %v", c.outcome, c.url, err)
		}
	}
	if err := tierError(&tier.Fetch{}, nil); err != nil {
		t.Error(err)
	}
	for setting, key := range map[string]string{host.SettingBytes: "kv.host_memory", ssd.SettingDir: "kv.ssd_dir", ssd.SettingBytes: "kv.ssd_size", ssd.SettingIO: "kv.ssd_io"} {
		var e *config.KeyError
		if err := settingError(fmt.Errorf("tier: %w", &level.SettingError{Setting: setting, Err: errors.New("x")})); !errors.As(err, &e) || e.Key != key {
			t.Errorf("%s: %v", setting, err)
		}
	}
	if x := errors.New("x"); settingError(x) != x {
		t.Error("another error is not left as it is")
	}
}

// TestTransferParams: what of a foreign proxy's parameters is taken.
func TestTransferParams(t *testing.T) {
	id := strings.Repeat("x", maxTransferID)
	for raw, ok := range map[string]bool{
		`{}`: true, `{"do_remote_decode":true}`: true, `{"do_remote_prefill":true,"unknown":[1]}`: true, `{"transfer_id":"` + id + `"}`: true,
		`{"transfer_id":"` + id + `x"}`: false, `{"do_remote_decode":true,"do_remote_prefill":true}`: false, `{"remote_port":"a"}`: false,
	} {
		p, err := parseTransfer([]byte(raw))
		var e *openai.Error
		if (err == nil) != ok || (p != nil) != ok || err != nil && (!errors.As(err, &e) || e.Param != fieldTransfer || e.Status != 400) {
			t.Errorf("%.60s: %+v, %v", raw, p, err)
		}
	}
	if p, err := parseTransfer(nil); p != nil || err != nil {
		t.Errorf("%+v, %v", p, err)
	}
	for s, want := range map[string]kvconn.PeerID{"a@7": {ID: "a", Epoch: 7}, "a@b@7": {ID: "a@b", Epoch: 7}, "@7": {}, "a": {}, "": {}} {
		if got, ok := parseEngineID(s); got != want || ok != (want.ID != "") {
			t.Errorf("%q: %+v, %t", s, got, ok)
		}
	}
	for _, s := range []string{"a@", "a@x", "a@-1"} {
		if _, ok := parseEngineID(s); ok {
			t.Errorf("%q is an engine's id", s)
		}
	}
	if got, ok := parseEngineID(engineID(kvconn.PeerID{ID: "w", Epoch: math.MaxUint64})); !ok || got != (kvconn.PeerID{ID: "w", Epoch: math.MaxUint64}) {
		t.Errorf("%+v", got)
	}
}

// TestTooLargeField: the field to lower is the one that adds most.
func TestTooLargeField(t *testing.T) {
	none := openai.Shape{Tokens: 100, Prompt: 100, Logprobs: -1, PromptLogprobs: -1}
	f := func(want string, change func(*job, *openai.Shape)) {
		t.Helper()
		j, s := &job{items: make([]item, 1)}, none
		j.N = 1
		change(j, &s)
		if got := j.field(&s); got != want {
			t.Errorf("%+v: %s, want %s", s, got, want)
		}
	}
	f("max_tokens", func(*job, *openai.Shape) {})
	f("prompt", func(j *job, _ *openai.Shape) { j.items = make([]item, 2) })
	f("messages", func(j *job, _ *openai.Shape) { j.items, j.chat = make([]item, 2), true })
	f("n", func(j *job, _ *openai.Shape) { j.N, j.items = 2, make([]item, 2) })
	f("max_tokens", func(_ *job, s *openai.Shape) { s.IDs, s.Echo = true, true })
	f("return_token_ids", func(_ *job, s *openai.Shape) { s.IDs, s.Prompt = true, 101 })
	f("return_token_ids", func(j *job, s *openai.Shape) { s.IDs, j.Stream = true, true })
	f("echo", func(_ *job, s *openai.Shape) { s.IDs, s.Echo, s.Prompt = true, true, 101 })
	f("logprobs", func(_ *job, s *openai.Shape) { s.Logprobs, s.Echo, s.Prompt = 0, true, 101 })
	f("logprobs", func(j *job, s *openai.Shape) { s.Logprobs, j.chat = 0, true })
	f("top_logprobs", func(j *job, s *openai.Shape) { s.Logprobs, j.chat = 1, true })
	f("prompt_logprobs", func(_ *job, s *openai.Shape) { s.PromptLogprobs = 0 })
	f("prompt_logprobs", func(_ *job, s *openai.Shape) { s.Logprobs, s.PromptLogprobs = 4, 5 })
	f("logprobs", func(_ *job, s *openai.Shape) { s.Logprobs, s.PromptLogprobs = 5, 5 })
}

// TestTooLargeSays: what a too large answer comes from, in numbers.
func TestTooLargeSays(t *testing.T) {
	j := &job{items: make([]item, 2)}
	j.N = 3
	s := openai.Shape{Tokens: 5, Logprobs: 6, PromptLogprobs: -1}
	err := j.tooLarge(&s, 7000, 6000)
	var e *openai.Error
	want := "the answer could have 7000 bytes, with 2 prompts x n 3, each of 5 tokens and 35 log probabilities; 6000 is the limit: lower logprobs or one of these, or ask for a stream"
	if !errors.As(err, &e) || e.Param != "logprobs" || e.Message != want {
		t.Errorf("%v", err)
	}
	if j.Stream = true; !errors.As(j.tooLarge(&s, 1, 1), &e) || !strings.HasPrefix(e.Message, "an event of the stream could have 1 bytes") || strings.Contains(e.Message, "ask for a stream") {
		t.Errorf("%v", e)
	}
}

// TestListed: how many log probabilities of a prompt may be asked for.
func TestListed(t *testing.T) {
	n := func(v int) *int { return &v }
	f := func(want string, tokens int, change func(*job)) {
		t.Helper()
		j := &job{logprobs: -1, items: []item{{}, {tokens: make([]int32, tokens)}}}
		change(j)
		err := j.checkListed()
		var e *openai.Error
		if got := ""; errors.As(err, &e) {
			if got = e.Param; got != want {
				t.Errorf("%d tokens: %v, want %q", tokens, err, want)
			}
		} else if want != "" || err != nil {
			t.Errorf("%d tokens: %v, want %q", tokens, err, want)
		}
	}
	f("", maxListed+1, func(*job) {})
	f("", maxListed+1, func(j *job) { j.logprobs = 0 }) // of what is generated
	f("", maxListed+1, func(j *job) { j.echo = true })
	f("", maxListed, func(j *job) { j.echo, j.logprobs = true, 0 })
	f("logprobs", maxListed+1, func(j *job) { j.echo, j.logprobs = true, 0 })
	f("", maxListed/21, func(j *job) { j.echo, j.logprobs = true, 20 })
	f("logprobs", maxListed/21+1, func(j *job) { j.echo, j.logprobs = true, 20 })
	f("", maxListed, func(j *job) { j.PromptLogprobs = n(0) })
	f("prompt_logprobs", maxListed+1, func(j *job) { j.PromptLogprobs = n(0) })
	f("prompt_logprobs", maxListed/2+1, func(j *job) { j.echo, j.logprobs, j.PromptLogprobs = true, 0, n(1) })
	f("logprobs", maxListed/2+1, func(j *job) { j.echo, j.logprobs, j.PromptLogprobs = true, 1, n(1) })
}

// TestEnds: how the times and tokens of a choice are counted once it has ended.
func TestEnds(t *testing.T) {
	m := newVLLMMetrics(prometheus.Labels{"engine": "0"}, 5000)
	m.promises = newPromises(engine.Promise{TTFT: 4 * time.Second, TPOT: 3 * time.Second, ITL: 4 * time.Second})
	read := func(c prometheus.Metric) (count uint64, sum float64) {
		var out dto.Metric
		if err := c.Write(&out); err != nil {
			t.Fatal(err)
		}
		if h := out.GetHistogram(); h != nil {
			return h.GetSampleCount(), h.GetSampleSum()
		}
		return 0, out.GetCounter().GetValue()
	}
	f := func(name string, c prometheus.Metric, count uint64, sum float64) {
		t.Helper()
		if n, s := read(c); n != count || math.Abs(s-sum) > 1e-9 {
			t.Errorf("%s: %d times, %v in all; want %d and %v", name, n, s, count, sum)
		}
	}
	begin := time.Unix(1e6, 0)
	at := func(s int) time.Time { return begin.Add(time.Duration(s) * time.Second) }
	it := &item{tokens: make([]int32, 7), info: &engine.PromptInfo{Prefill: 2 * time.Second}}
	j, unsaid := &job{Sampling: openai.Sampling{N: 2, MaxTokens: new(4)}}, &job{Sampling: openai.Sampling{N: 1}}
	three, one, none := &choice{j: j, item: it}, &choice{j: j, item: it}, &choice{j: unsaid, item: &item{tokens: make([]int32, 5)}}
	for i, s := range []int{3, 4, 9} {
		m.token(three, begin, at(s))
		three.tokens = i + 1
	}
	m.token(one, begin, at(5))
	one.tokens = 1
	m.ended(three, "stop", 10*time.Second, 0)
	m.ended(one, "length", 20*time.Second, 3)
	m.ended(none, "abort", 30*time.Second, 0)
	m.ended(none, "error", 40*time.Second, 0)
	f("n", m.asked, 4, 2+2+1+1)
	f("max_tokens", m.most, 4, float64(4+4+2*(m.longest-5)))
	f("preemptions", m.preempted, 4, 3)
	f("first tokens", m.ttft, 2, 3+5)
	f("between tokens", m.itl, 2, 1+5)
	f("mean between tokens", m.tpot, 1, 3)
	f("whole", m.e2e, 4, 100)
	f("prompts", m.prompts, 4, 7+7+5+5)
	f("generations", m.generations, 4, 3+1)
	f("prefill", m.prefill, 2, 4)
	f("decode", m.decode, 2, 6)
	f("inference", m.inference, 2, 10)
	f("tokens", m.generation, 0, 4)
	f("first tokens in time", m.promises.kept.WithLabelValues("ttft", "kept"), 0, 1)
	f("first tokens too late", m.promises.kept.WithLabelValues("ttft", "broken"), 0, 1)
	f("means as promised", m.promises.kept.WithLabelValues("tpot", "kept"), 0, 1)
	f("longer means", m.promises.kept.WithLabelValues("tpot", "broken"), 0, 0)
	f("a gap that is longer", m.promises.kept.WithLabelValues("itl", "broken"), 0, 1)
	f("gaps as promised", m.promises.kept.WithLabelValues("itl", "kept"), 0, 0)
	for name, c := range map[string]prometheus.Metric{"stop": m.stopped, "length": m.cut, "abort": m.aborted, "error": m.failed} {
		f(name, c, 0, 1)
	}
	m.prefilled(&engine.PromptInfo{Tokens: 9, CachedTokens: 4, Queued: time.Second, Prefill: 3 * time.Second}, 2, 6*time.Second)
	f("first tokens", m.ttft, 4, 3+5+6+6)
	f("n of prompts run for others", m.asked, 6, 6+2+2)
	f("preemptions of these", m.preempted, 6, 3)
	f("prompt tokens", m.prompt, 0, 9)
	f("looked for", m.queries, 0, 9)
	f("found", m.hits, 0, 4)
	f("queue", m.queue, 1, 1)
	f("length", m.cut, 0, 3)
	f("prefill", m.prefill, 4, 10)
	f("decode", m.decode, 4, 6)
	f("generations", m.generations, 6, 6)
	for most, want := range map[int][]float64{0: nil, 1: {1}, 4: {1, 2}, 5: {1, 2, 5}, 10: {1, 2, 5, 10}, 99: {1, 2, 5, 10, 20, 50}} {
		if got := upTo(most); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("up to %d: %v, want %v", most, got, want)
		}
	}
	for _, c := range []struct {
		err  *failure
		want string
	}{{nil, reasonAbort}, {failed(ticket.Cancelled, errClosing), reasonAbort}, {failed(ticket.Refused, errClosing), ""}, {failed(ticket.Dead, errClosing), reasonError}} {
		if got := (&generation{err: c.err}).reason(); got != c.want {
			t.Errorf("%v: %q, want %q", c.err, got, c.want)
		}
	}
}

// TestPoolBlocks: as many blocks as are set, or as the memory holds, but of the default no more than 64
// contexts.
func TestPoolBlocks(t *testing.T) {
	const block = 2 * 2 * 2 * 4 * 4 * 16 // bytes
	for _, c := range []struct {
		longest, blocks int
		size            int64
		want            int
	}{{33, 9, 0, 9}, {33, 0, block, 1}, {33, 0, block - 1, 0}, {33, 0, 2*block - 1, 1}, {33, 0, 191 * block, 191}, {33, 0, 193 * block, 192}, {33, 0, 1 << 40, 192}, {32, 0, 1 << 40, 128}} {
		a := &arch.Config{Layers: 2, KVHeads: 2, HeadDim: 4, MaxPositions: c.longest}
		cfg := DefaultConfig(fleet.Decode)
		cfg.BlockTokens, cfg.Blocks = 16, c.blocks
		got, err := poolBlocks(&cfg, a, "f32", c.size)
		if got != c.want || (err == nil) != (c.want > 0) {
			t.Errorf("%d blocks, %d bytes: %d, %v, want %d", c.blocks, c.size, got, err, c.want)
		}
		cfg.KVMemory = config.AutoSize(c.size)
		if got, err := poolBlocks(&cfg, a, "f32", c.size); err == nil && c.blocks == 0 && got != int(c.size/block) {
			t.Errorf("%d bytes that are set: %d", c.size, got)
		}
		cfg.TensorParallel = 4 // each of two heads twice
		if got, err := poolBlocks(&cfg, a, "f32", c.size); err == nil && c.blocks == 0 && got != int(c.size/(2*block)) {
			t.Errorf("%d bytes for four ranks: %d", c.size, got)
		}
	}
}

// TestRequests: the ledger of requests lists them in order of age, admits none once it is closed,
// and tells who waits for the last.
func TestRequests(t *testing.T) {
	r := newRequests()
	a, ok := r.enter("generate", "a")
	if !ok {
		t.Fatal("refused")
	}
	b, _ := r.enter("keep", "b")
	b.Since = a.Since.Add(time.Second)
	r.note(b, stateWaiting, 10)
	if l := r.ledger(); len(l) != 2 || l[0].ID != "a" || l[0].State != "started" || l[0].Why != why["generate"] || l[1].State != stateWaiting || l[1].Bytes != 10 || l[1].Why == why["keep"] {
		t.Errorf("%+v", l)
	}
	a.Since, b.Since = b.Since, a.Since
	r.note(b, "started", 5)
	r.answering(a)
	if l := r.ledger(); l[0].ID != "b" || l[0].Bytes != 15 || l[0].Why != why["keep"] || l[1].State != "answering" {
		t.Errorf("%+v", l)
	}
	r.leave(a)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	r.close()
	r.close()
	if _, ok := r.enter("generate", "c"); ok {
		t.Error("admitted after its close")
	}
	if err := r.wait(ctx); !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "1 requests") {
		t.Error(err)
	}
	r.leave(b)
	if err := r.wait(t.Context()); err != nil {
		t.Error(err)
	}
	none := newRequests()
	none.close()
	if err := none.wait(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestBootstrapAnswers: prefill's bootstrap is asked where to dial, and only one that may be named is believed.
func TestBootstrapAnswers(t *testing.T) {
	status, answer := 200, ""
	server := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/query" {
			t.Errorf("asked %s", r.URL)
		}
		rw.WriteHeader(status)
		_, _ = rw.Write([]byte(answer))
	}))
	defer server.Close()
	w := &Worker{client: server.Client()}
	rank := func(engine, addr string) string {
		return `{"0":{"engine_id":"` + engine + `","worker_addr":{"0":{"0":"` + addr + `"}}}}`
	}
	id := func(s string) *string { return &s }
	f := func(code int, body string, p transferParams, outcome ticket.Outcome, bad bool) *origin {
		t.Helper()
		status, answer = code, body
		if p.RemoteBootstrapAddr == "" {
			p.RemoteBootstrapAddr = server.URL
		}
		p.TransferID = "t"
		from, err := w.mooncakeOrigin(t.Context(), &p)
		var fail *failure
		var api *openai.Error
		switch isFail, isAPI := errors.As(err, &fail), errors.As(err, &api); {
		case outcome != "" && (!isFail || fail.outcome != outcome), bad && (isFail || !isAPI || api.Status != 400), outcome == "" && !bad && err != nil:
			t.Errorf("%d %s: %v", code, body, err)
		}
		return from
	}
	good := rank("p@3", "tcp://127.0.0.1:9")
	from := f(200, good, transferParams{}, "", false)
	if from == nil || from.addr != "127.0.0.1:9" || from.leaseID != prefill.EarlyClaim+"t" || from.peer != (kvconn.PeerID{ID: "p", Epoch: 3}) {
		t.Errorf("%+v", from)
	}
	f(200, good, transferParams{RemoteEngineID: id("p@3")}, "", false)
	f(200, good, transferParams{RemoteEngineID: id("p@4")}, ticket.Dead, false)
	f(200, `{}`, transferParams{}, ticket.Dead, false)
	f(200, `x`, transferParams{}, ticket.Dead, false)
	f(500, good, transferParams{}, ticket.Dead, false)
	f(401, good, transferParams{}, ticket.Dead, false)
	f(200, rank("nobody", "tcp://127.0.0.1:9"), transferParams{}, "", true)
	f(200, rank("p@3", "tcp://192.0.2.1:9"), transferParams{}, "", true)
	f(200, rank("p@3", ""), transferParams{}, "", true)
	f(200, good, transferParams{RemoteBootstrapAddr: "https" + strings.TrimPrefix(server.URL, "http")}, "", true)
	f(200, good, transferParams{RemoteBootstrapAddr: "http://192.0.2.1:1"}, "", true)
	f(200, good, transferParams{RemoteBootstrapAddr: "http://%"}, "", true)
	f(200, good, transferParams{RemoteBootstrapAddr: "http:///x"}, "", true)
	w.shutOut.Store(&[]string{"p"})
	f(200, good, transferParams{}, ticket.Incompatible, false)
	server.Close()
	f(200, good, transferParams{}, ticket.Dead, false)
}

// TestAskReach: a peer is asked of the units beyond those at hand, and what it says is taken within
// bounds.
func TestAskReach(t *testing.T) {
	cache, err := kvcache.New(kvcache.Config{Blocks: 8, BlockTokens: 16})
	if err != nil {
		t.Fatal(err)
	}
	chain := cache.NewChain("")
	chain.Extend(make([]int32, 160))
	var status int
	var answer string
	var asked []kvcache.Hash
	server := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err == nil {
			asked, err = tier.ParseReach(body)
		}
		if err != nil || r.URL.Path != "/xpyd/v1/cache/reach" || r.Method != http.MethodPost || r.Header.Get(trust.Header) != "" {
			t.Errorf("%s %s: %v", r.Method, r.URL, err)
		}
		rw.WriteHeader(status)
		_, _ = io.WriteString(rw, answer)
	}))
	defer server.Close()
	w := &Worker{client: server.Client(), tokens: trust.NewTokens(nil)}
	f := func(from, upto, code int, body string, want, units int) {
		t.Helper()
		status, answer, asked = code, body, nil
		n, err := w.askReach(t.Context(), &tier.Peer{ID: "p", URL: server.URL}, &chain, 32, from, upto)
		if (err == nil) != (want >= 0) || err == nil && n != want || len(asked) != units {
			t.Errorf("from %d to %d, %d %s: %d, %v, asked of %d units; want %d and %d", from, upto, code, body, n, err, len(asked), want, units)
		}
		for i, name := range asked {
			if name != chain.Name(from+32*(i+1)) {
				t.Errorf("from %d: unit %d is another one", from, i)
			}
		}
	}
	f(0, 160, 200, `{"units":3}`, 96, 5)
	f(64, 160, 200, `{"units":3}`, 160, 3)
	f(64, 159, 200, `{"units":0}`, 64, 2)
	f(64, 95, 200, ``, 64, 0) // there is nothing to ask
	f(64, 96, 200, `{"units":1}`, 96, 1)
	f(64, 96, 200, `{"units":2}`, -1, 1)
	f(64, 96, 404, `{"units":1}`, -1, 1)
	f(64, 96, 200, strings.Repeat(" ", 2000), -1, 1)
	server.Close()
	f(64, 96, 200, ``, -1, 0)
	server.URL = "http://%zz"
	f(64, 96, 200, ``, -1, 0)
}

// TestAppendError: only what another worker may do better is kept from the client.
func TestAppendError(t *testing.T) {
	for _, o := range []ticket.Outcome{ticket.NoSpace, ticket.Late, ticket.Dead, ticket.Incompatible, ticket.Corrupt, ticket.Cancelled, ticket.Refused, ticket.Invalid, ticket.Shed} {
		err := failed(o, errors.New("two\nlines"))
		event := string(openai.AppendErrorEvent(nil, err.api))
		if got := string((*frames)(nil).appendError(nil, err)); got != event {
			t.Errorf("%s, without frames: %q", o, got)
		}
		want := ":e " + strings.TrimPrefix(event, "data: ")
		if o == ticket.Refused || o == ticket.Invalid || o == ticket.Shed {
			want = event
		}
		if got := string((&frames{}).appendError(nil, err)); got != want || strings.Count(got, "\n") != 2 {
			t.Errorf("%s: %q", o, got)
		}
	}
}

// TestEngineConfig: what the engine is told, from the configuration or by the device.
func TestEngineConfig(t *testing.T) {
	for _, gpu := range []bool{false, true} {
		running, step, prefill := 64, 512, 0
		if gpu {
			running, step, prefill = 256, 8192, 8192
		}
		c := Config{Compute: Compute{MaxModelLen: 4}, MaxWaiting: 3, MaxStepTime: 5, QueueTime: 6, Promises: Promises{TTFTPromise: 9, TPOTPromise: 10, ITLPromise: 11}}
		got := EngineConfig(&c, gpu)
		if got.MaxRunning != running || got.StepTokens != step || gpu && got.PrefillTokens != prefill {
			t.Errorf("gpu %t: %+v", gpu, got)
		}
		c.MaxBatch, c.StepTokens = 7, 8
		got = EngineConfig(&c, gpu)
		if got.MaxRunning != 7 || got.StepTokens != 8 || got.MaxWaiting != 3 || got.MaxModelLen != 4 || got.MaxStepTime != 5 || got.QueueTime != 6 || got.Promise != (engine.Promise{TTFT: 9, TPOT: 10, ITL: 11}) || gpu && got.PrefillTokens != 8 {
			t.Errorf("gpu %t: %+v", gpu, got)
		}
	}
}

// TestRoutes: who may ask for what, in the order of the reference.
func TestRoutes(t *testing.T) {
	list := Routes()
	who := map[string]string{}
	for i, r := range list {
		who[r.Method+" "+r.Path] = r.For
		if i > 0 && cmp.Or(strings.Compare(list[i-1].Path, r.Path), strings.Compare(list[i-1].Method, r.Method)) >= 0 || r.What == "" {
			t.Errorf("%+v behind %+v", r, list[max(i-1, 0)])
		}
	}
	for route, want := range map[string]access{"GET /health": forAnybody, "GET /metrics": forScrapers, "POST /v1/completions": forUsers, "POST /xpyd/v1/drain": forMembers, "POST /xpyd/v1/profile": forMembers} {
		if who[route] != want.String() {
			t.Errorf("%s is for %q, want %q", route, who[route], want)
		}
	}
}
