package mock

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"io"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/xpyd/xpyd/internal/openai"
)

const maxBody = 64 << 20

func (e *Engine) mux() http.Handler {
	m := http.NewServeMux()
	if e.cfg.Embeds {
		m.HandleFunc("POST /v1/embeddings", e.embed)
	} else {
		m.HandleFunc("POST /v1/completions", e.serveCompletion)
		m.HandleFunc("POST /v1/chat/completions", e.serveCompletion)
	}
	m.HandleFunc("POST /mock/claim", e.serveClaim)
	m.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	m.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		model := map[string]any{"id": e.cfg.Model, "object": "model", "owned_by": "mock", "max_model_len": 32768}
		if e.cfg.Tokens {
			model["max_model_len"] = longest
		}
		writeJSON(w, map[string]any{"object": "list", "data": []any{model}})
	})
	m.HandleFunc("GET /version", func(w http.ResponseWriter, _ *http.Request) {
		if e.cfg.Version == "" {
			http.NotFound(w, nil)
			return
		}
		writeJSON(w, map[string]string{"version": e.cfg.Version})
	})
	m.HandleFunc("GET /query", func(w http.ResponseWriter, r *http.Request) {
		if e.cfg.Dialect != "vllm-mooncake" || e.cfg.Role == legDecode {
			http.NotFound(w, r)
			return
		}
		e.mu.Lock()
		defer e.mu.Unlock()
		writeJSON(w, map[string]any{"0": map[string]any{"engine_id": e.id, "worker_addr": map[string]any{"0": map[string]string{"0": "tcp://" + e.Addr()}}}})
	})
	m.HandleFunc("GET /mock/records", func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, e.Records()) })
	return m
}

func writeJSON(w http.ResponseWriter, v any) {
	body, err := json.Marshal(v)
	if err != nil {
		panic(err) // the mock's own types
	}
	writeBody(w, http.StatusOK, body)
}

func writeBody(w http.ResponseWriter, status int, body []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(body) // the reader may have left
}

func fail(w http.ResponseWriter, status int, format string, args ...any) {
	err := openai.BadRequest("", format, args...)
	if err.Status = status; status >= 500 {
		err.Type = openai.TypeServer
	}
	writeBody(w, status, err.Append(nil))
}

type job struct {
	e       *Engine
	w       http.ResponseWriter
	ctx     context.Context
	f       fieldsOf
	s       sight
	chat    bool
	prompt  string
	n       int
	max     int
	stream  bool
	usage   bool
	fault   Fault
	headers bool // sent
	chunks  int
}

func (e *Engine) serveCompletion(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(io.LimitReader(r.Body, maxBody))
	if err != nil {
		return
	}
	rec := e.record(&Record{}, r, body)
	sw := &statusWriter{ResponseWriter: w, e: e, rec: rec}
	e.mu.Lock()
	j := &job{e: e, w: sw, ctx: r.Context(), chat: r.URL.Path == "/v1/chat/completions", n: 1, max: 16, fault: e.fault}
	e.mu.Unlock()
	if rec.Probe && !j.fault.Probes {
		j.fault = Fault{}
	}
	for j.fault.Left != nil && j.fault.Left.Add(-1) < 0 {
		j.fault = *cmp.Or(j.fault.Then, &Fault{})
	}
	defer func() {
		e.mu.Lock()
		rec.Over, rec.Left = true, r.Context().Err() != nil
		e.mu.Unlock()
	}()
	if err = json.Unmarshal(body, &j.f); err == nil {
		j.s, err = e.check(r.Header, j.f)
	}
	e.mu.Lock()
	rec.Leg = j.s.leg
	e.mu.Unlock()
	if err != nil {
		e.cfg.Log.Warn("refused", "path", r.URL.Path, "err", err, "body", string(body))
		fail(sw, 400, "mock %s %s: %v", e.cfg.Dialect, e.cfg.Role, err)
		return
	}
	e.cfg.Log.Info("request", "leg", j.s.leg, "path", r.URL.Path, "links", j.s.links)
	if err := j.parse(); err != nil {
		fail(sw, 400, "%v", err)
		return
	}
	j.respond()
}

func (e *Engine) record(rec *Record, r *http.Request, body []byte) *Record {
	rec.Path, rec.Header, rec.Body, rec.Probe = r.URL.Path, r.Header, string(body), r.Header.Get("x-xpyd-probe") != ""
	e.mu.Lock()
	defer e.mu.Unlock()
	e.records = append(e.records, rec)
	e.records = e.records[max(0, len(e.records)-maxRecords):]
	return rec
}

type statusWriter struct {
	http.ResponseWriter
	e   *Engine
	rec *Record
}

func (w *statusWriter) WriteHeader(status int) {
	w.e.mu.Lock()
	w.rec.Status = status
	w.e.mu.Unlock()
	w.ResponseWriter.WriteHeader(status)
}

func (w *statusWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// Bounds of an answer.
const (
	maxN     = 128
	maxWords = 1 << 20 // of all choices
)

func (j *job) parse() error {
	j.prompt = compact(j.f["prompt"])
	if j.chat {
		j.prompt = compact(j.f["messages"])
		if ids := j.f["prompt_token_ids"]; j.s.leg == legDecode && ids != nil {
			j.prompt = compact(ids)
		}
	}
	if j.e.cfg.Tokens && j.chat {
		j.max = longest
	}
	j.get("n", &j.n)
	j.get("max_tokens", &j.max)
	j.get("max_completion_tokens", &j.max)
	j.stream = string(j.f["stream"]) == "true"
	if o, err := j.f.object("stream_options"); err == nil {
		j.usage = string(o["include_usage"]) == "true"
	}
	if err := j.fits(); err != nil {
		return err
	}
	switch count := j.n * promptsOf(j.f); {
	case j.n < 1 || j.n > maxN:
		return fmt.Errorf("n is %d, want 1 to %d", j.n, maxN)
	case j.max < 0 || j.max > maxWords/count:
		return fmt.Errorf("max_tokens is %d for %d choices, want 0 to %d for all", j.max, count, maxWords)
	}
	return nil
}

// get reads a number, if it is there.
func (j *job) get(name string, to *int) {
	if n, err := strconv.Atoi(string(j.f[name])); err == nil {
		*to = n
	}
}

func compact(raw json.RawMessage) string {
	var b bytes.Buffer
	if json.Compact(&b, raw) != nil {
		return string(raw)
	}
	return b.String()
}

// respond answers, with the fault.
func (j *job) respond() {
	switch {
	case j.fault.Hang:
		<-j.ctx.Done()
	case j.fault.Refuse:
		j.reset()
	case j.fault.Status != 0:
		fail(j.w, j.fault.Status, "mock: status %d was ordered", j.fault.Status)
	case j.fault.Event:
		j.header()
		j.errorEvent("mock: an error event was ordered")
	case j.s.leg == legPrefill:
		j.prefill()
		return
	default:
		j.decode()
		return
	}
	if j.s.leg == legPrefill {
		j.e.keep(j.s.links, "", "", false)
	}
}

// reset breaks the connection.
func (j *job) reset() {
	conn, _, err := http.NewResponseController(j.w).Hijack()
	if err != nil {
		return
	}
	if t, ok := conn.(*net.TCPConn); ok {
		_ = t.SetLinger(0) // only to make it a reset
	}
	_ = conn.Close() // broken on purpose
}

// pause returns false if the caller has left. The request of an engine that is closed gets no
// answer: to return would be an empty one, with status 200.
func (j *job) pause(d time.Duration) bool {
	if d > 0 {
		select {
		case <-time.After(d):
		case <-j.ctx.Done():
		case <-j.e.ctx.Done():
		}
	}
	if j.e.ctx.Err() != nil {
		panic(http.ErrAbortHandler)
	}
	return j.ctx.Err() == nil
}

func promptIDs(prompt string) string {
	h := fnv.New32a()
	_, _ = io.WriteString(h, prompt) // never fails
	return fmt.Sprintf("[1,%d,3]", h.Sum32()%1000+10)
}

// Token counts of mocks. Prefill finds a part of the prompt cached; decode, like vLLM's, reports
// what it received as cached.
const (
	promptTokens = 9
	cachedTokens = 3
)

func (j *job) prefill() {
	e, ids := j.e, promptIDs(j.prompt)
	if !j.pause(e.cfg.TTFT) {
		e.keep(j.s.links, "", "", false)
		return
	}
	e.blocks.store(j.prompt)
	e.keep(j.s.links, j.prompt, ids, true)
	if e.cfg.Dialect == "sglang" { // it answers when the transfer is over
		for _, link := range j.s.links {
			if !e.wait(j.ctx, link, func(k *kept) bool { return k.taken }) {
				e.keep(j.s.links, "", "", false)
				fail(j.w, 500, "mock: room %s: decode never came", link)
				return
			}
		}
	}
	j.n, j.max = 1, 1
	usage := openai.Usage{Prompt: promptTokens, Completion: 1, Cached: cachedTokens}
	if e.cfg.Tokens {
		usage.Prompt = len(promptOf(j.prompt))
	}
	body := j.encoder().AppendFull(nil, []openai.Choice{{Text: " x", Finish: "length"}}, usage)
	if j.fault.Mute {
		<-j.ctx.Done()
		return
	}
	switch {
	case j.fault.NoParams:
	case e.cfg.Dialect == "vllm-nixl":
		host, port, _ := net.SplitHostPort(e.Addr()) // of a listener: well formed
		params := fmt.Sprintf(`{"do_remote_prefill":true, "do_remote_decode":false,"remote_block_ids":[[1,2]],"remote_engine_id":%q,"remote_request_id":%q,`+
			`"remote_host":%q,"remote_port":%s,"tp_size":1,"remote_num_tokens":%d,"remote_blocks_expiry_time":null,"transfer_mode":"pull","mock_opaque":1.50}`,
			e.ID(), j.s.links[0], host, port, promptTokens)
		body = openai.With(body, [2]string{"kv_transfer_params", params})
	case e.cfg.Dialect == "trtllm":
		params := fmt.Sprintf(`{"request_type":"context_only","ctx_request_id":77,"disagg_request_id":%s,"first_gen_tokens":[5],"encoded_opaque_state":%q}`, j.s.disagg, e.Addr())
		choices := bytes.TrimSuffix(openai.Member(body, "choices"), []byte("}]"))
		choices = append(append(append([]byte{}, choices...), `,"disaggregated_params":`...), params+"}]"...)
		body = openai.With(body, [2]string{"choices", string(choices)}, [2]string{"prompt_token_ids", ids})
	}
	writeBody(j.w, http.StatusOK, body)
}

func (j *job) encoder() *openai.Encoder {
	id := "cmpl-mock"
	if j.chat {
		id = "chatcmpl-mock"
	}
	return openai.NewEncoder(openai.Meta{ID: id, Model: j.e.cfg.Model, Created: time.Now().Unix(), Chat: j.chat, IncludeUsage: j.usage,
		ReturnTokenIDs: string(j.f["return_token_ids"]) == "true" && j.e.cfg.Tokens && !j.fault.NoIDs})
}

func (j *job) header() {
	if !j.headers {
		j.headers = true
		j.w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		j.w.WriteHeader(200)
		_ = http.NewResponseController(j.w).Flush() // the reader may have left
	}
}

func (j *job) errorEvent(format string, args ...any) {
	_, _ = j.w.Write(openai.AppendDone(openai.AppendErrorEvent(nil, openai.Upstream(format, args...)))) // the reader may have left
}

// decode collects the prompt and answers.
func (j *job) decode() {
	e := j.e
	if j.stream && !Alone(e.cfg.Dialect) {
		j.header() // like vLLM, long before the first token
	}
	if j.s.leg == legDecode && j.s.peer != "" {
		for _, link := range j.s.links {
			prompt, err := e.collect(j.ctx, j.s.peer, claim{Link: link, Engine: j.s.engine, Prompt: j.prompt})
			if err != nil {
				if j.headers {
					j.errorEvent("%v", err)
				} else {
					fail(j.w, 500, "%v", err)
				}
				return
			}
			j.prompt = prompt
		}
	} else if !j.pause(e.cfg.TTFT) {
		return
	}
	e.blocks.store(j.prompt)
	j.writeAnswer()
}

// Words is the text of a choice. The prompt is raw JSON without white space.
func Words(prompt string, choice, n int) []string {
	list := []string{" once", " upon", " a", " time", " there", " was", " one", " small", " mock"}
	out, draw := make([]string, n), drawsOf(prompt, choice)
	for i := range out {
		out[i] = list[draw()>>33%uint64(len(list))]
	}
	return out
}

// drawsOf returns a random sequence, seeded by a text and a choice.
func drawsOf(text string, choice int) func() uint64 {
	h := fnv.New64a()
	_, _ = io.WriteString(h, text) // never fails
	x := h.Sum64() + uint64(choice)
	return func() uint64 {
		x = x*6364136223846793005 + 1442695040888963407
		return x
	}
}

func (j *job) writeAnswer() {
	if j.stream && j.e.cfg.Tokens {
		j.writeTokens()
		return
	}
	enc := j.encoder()
	count := j.n * promptsOf(j.f)
	texts := make([][]string, count)
	for c := range texts {
		texts[c] = Words(j.prompt, c, j.max)
	}
	usage := openai.Usage{Prompt: promptTokens, Completion: count * j.max}
	if j.s.leg == legDecode {
		usage.Cached = promptTokens - 1
	}
	if !j.stream {
		choices := make([]openai.Choice, count)
		for c := range choices {
			for i, t := range texts[c] {
				choices[c].Text += t
				if i > 0 && !j.pause(j.e.cfg.ITL) {
					return
				}
			}
			choices[c].Index, choices[c].Finish = c, "length"
		}
		if j.fault.Cut > 0 {
			j.reset()
			return
		}
		writeBody(j.w, http.StatusOK, enc.AppendFull(nil, choices, usage))
		return
	}
	j.header()
	for i := range j.max {
		if i > 0 && !j.pause(j.e.cfg.ITL) {
			return
		}
		for c := range texts {
			ch := openai.Choice{Index: c, Text: texts[c][i], Role: i == 0}
			if i == j.max-1 {
				ch.Finish = "length"
			}
			if !j.write(enc.AppendChunk(nil, &ch, nil)) {
				return
			}
		}
	}
	if j.usage {
		_, _ = j.w.Write(enc.AppendUsage(nil, usage))
	}
	_, _ = j.w.Write(openai.AppendDone(nil)) // the reader may have left
}
