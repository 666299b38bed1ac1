package router_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime/multipart"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf16"

	"github.com/xpyd/xpyd/internal/fleet"
	fake "github.com/xpyd/xpyd/internal/mock"
	"github.com/xpyd/xpyd/router"
	"github.com/xpyd/xpyd/router/apikey"
)

// TestPass: a request that one engine answers goes to decode unchanged, and so does the
// answer to the client.
func TestPass(t *testing.T) {
	g := newRig(t, 1, 1)
	d := g.workers["d0"]
	var uri, kind, accept, body string
	d.on(&d.other, func(w http.ResponseWriter, r *http.Request) {
		d.mu.Lock()
		uri, kind, accept, body = r.URL.RequestURI(), r.Header.Get("Content-Type"), r.Header.Get("Accept"), string(d.body)
		d.mu.Unlock()
		w.Header().Set("Content-Type", "audio/mpeg")
		w.Header().Set("Content-Disposition", "attachment")
		w.WriteHeader(201)
		fmt.Fprint(w, "sound")
	})
	ask := `{"input":"x", "model":"m"}`
	resp, text := g.post("/v1/audio/speech?a=b", ask, "Content-Type", "application/json", "Accept", "audio/*")
	if resp.StatusCode != 201 || text != "sound" || resp.ContentLength != 5 || resp.Header.Get("Content-Type") != "audio/mpeg" ||
		resp.Header.Get("Content-Disposition") != "attachment" || resp.Header.Get("x-xpyd-decode") != "d0" || resp.Header.Get("x-xpyd-prefill") != "" ||
		resp.Header.Get("x-request-id") == "" || !strings.Contains(resp.Header.Get("Server-Timing"), "ttft;dur=") {
		t.Errorf("%d %q %v", resp.StatusCode, text, resp.Header)
	}
	if uri != "/v1/audio/speech?a=b" || kind != "application/json" || accept != "audio/*" || body != ask {
		t.Errorf("the engine got %s %s %s %s", uri, kind, accept, body)
	}
	f := func(path, body string, status int, param string) {
		t.Helper()
		resp, text := g.post(path, body)
		e := apiError(t, text)
		got := ""
		if e.Param != nil {
			got = *e.Param
		}
		if resp.StatusCode != status || got != param {
			t.Errorf("%s %.60s: %d %s", path, body, resp.StatusCode, text)
		}
	}
	f("/v1/embeddings", `{"model":"none","input":"x"}`, 404, "model")
	f("/v1/moderations", `{"model":"m","kv_transfer_params":{}}`, 400, "kv_transfer_params")
	f("/v1/moderations", `{"model":"m","input":"`+strings.Repeat("x", 400<<10)+`","bootstrap_room":1}`, 400, "bootstrap_room")
	f("/v1/files", `{}`, 404, "")
	if resp, err := g.client.Get(g.url + "/v1/embeddings"); err != nil || resp.StatusCode != 405 {
		t.Errorf("%v %v", resp, err)
	} else {
		resp.Body.Close()
	}
}

// TestPassGuard: what a client may not send does not pass under another media type, in
// another encoding, or after the part that is read before an engine is chosen.
func TestPassGuard(t *testing.T) {
	keys := newKeyFile(t, apikey.Key{Name: "a", Models: []string{"m"}})
	g := newRig(t, 1, 1, keys.config)
	far := strings.Repeat("x", 2*256<<10)
	wide := func(s string) string {
		var b []byte
		for _, u := range utf16.Encode([]rune(s)) {
			b = append(b, byte(u), byte(u>>8))
		}
		return string(b)
	}
	f := func(kind, body string, status int, param string) {
		t.Helper()
		resp, text := g.post("/v1/moderations", body, append(keys.of("a"), "Content-Type", kind)...)
		got := ""
		if resp.StatusCode != 200 {
			if e := apiError(t, text); e.Param != nil {
				got = *e.Param
			}
		}
		if resp.StatusCode != status || got != param {
			t.Errorf("%s %.80q: %d %s", kind, body, resp.StatusCode, text)
		}
	}
	const link, image = `{"model":"m","kv_transfer_params":{}}`, `{"model":"m","input":[{"image_url":"http://169.254.169.254/latest"}]}`
	for _, kind := range []string{"application/json", "Application/JSON", "application/vnd.api+json", "text/plain", "multipart/form-data, application/json"} {
		f(kind, link, 400, "kv_transfer_params")
		f(kind, image, 400, "messages")
		f(kind, wide(link), 400, "")
		f(kind, "\xff\xfe"+wide(image), 400, "")
		f(kind, `{"model":"m","x":"`+far+`","image_url":"http://169.254.169.254/latest"}`, 400, "messages")
		f(kind, `{"model":"m","bootstrap_pair_key":"k"}`, 400, "bootstrap_*")
		f(kind, `{"model":"m","input":"`+far+`"}`, 200, "")
		f(kind, `{"model":"m","x":NaN,"kv_transfer_params":{}}`, 400, "")
		f(kind, `{"model":"m","x":"`+far+`\ud800"}`, 400, "")
	}
	f("application/json", `{"model":"secret","input":"x"}`, 404, "model")
	f("application/json", `{"input":"`+far+`","model":"m"}`, 200, "")
	f("application/json", `{"input":"`+far+`","model":"secret"}`, 400, "model")
	f("application/json", `{"model":"m","input":"`+far+`","model":"secret"}`, 400, "model")
	f("application/json", `{"model":"m","model":"secret"}`, 400, "model")
	part := func(name, value string) string {
		return "--B\r\nContent-Disposition: form-data; name=\"" + name + "\"\r\n\r\n" + value + "\r\n"
	}
	f("Multipart/Form-Data; boundary=B", part("model", "m")+part("file", far+"\x00")+"--B--\r\n", 200, "")
	f("Multipart/Form-Data; boundary=B", part("model", "secret")+part("file", far)+"--B--\r\n", 404, "model")
	f("Multipart/Form-Data; boundary=B", part("model", "m")+part("file", far)+part("model", "secret")+"--B--\r\n", 400, "model")
	f("multipart/form-data; boundary=B", part("model", "m")+part("url", "http://169.254.169.254/latest")+"--B--\r\n", 400, "url")
	f("multipart/form-data; boundary=B", part("model", "m")+part("file", far)+part("image", "http://169.254.169.254/latest")+"--B--\r\n", 400, "image")
}

// TestPassKind: a body checked as JSON reaches the engine as JSON, not as a form in which
// it would read other fields.
func TestPassKind(t *testing.T) {
	g := newRig(t, 1, 1)
	kinds := make(chan string, 1)
	d := g.workers["d0"]
	d.on(&d.other, func(_ http.ResponseWriter, r *http.Request) { kinds <- r.Header.Get("Content-Type") })
	for kind, want := range map[string]string{
		"application/x-www-form-urlencoded":              "application/json",
		"multipart/form-data; boundary=B; boundary=C":    "application/json",
		"application/json; charset=utf-8":                "application/json; charset=utf-8",
		"multipart/form-data; boundary=B":                "multipart/form-data; boundary=B",
		"Application/X-WWW-Form-Urlencoded; charset=bad": "application/json",
	} {
		body := `{"model":"m","x":"&url=http://169.254.169.254/latest&"}`
		if want == kind && strings.HasPrefix(kind, "multipart") {
			body = "--B\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--B--\r\n"
		}
		if resp, text := g.post("/v1/images/edits", body, "Content-Type", kind); resp.StatusCode != 200 {
			t.Errorf("%s: %d %s", kind, resp.StatusCode, text)
			continue
		}
		if got := <-kinds; got != want {
			t.Errorf("%q becomes %q, want %q", kind, got, want)
		}
	}
}

// TestPassStream: another API's stream has ends of its own, and one that breaks
// gets an error event; a body that breaks is cut.
func TestPassStream(t *testing.T) {
	g := newRig(t, 1, 1)
	d := g.workers["d0"]
	const events = "event: response.created\ndata: {\"n\":1}\n\nevent: response.completed\ndata: {\"n\":2}\n\n"
	d.on(&d.other, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		for _, e := range strings.SplitAfter(events, "\n\n") {
			io.WriteString(w, e)
			w.(http.Flusher).Flush()
		}
	})
	resp, text := g.post("/v1/moderations", `{"model":"m","stream":true}`)
	if text != events || resp.Header.Get("Content-Type") != "text/event-stream; charset=utf-8" {
		t.Errorf("%q %v", text, resp.Header)
	}
	d.on(&d.other, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, events+"event: half")
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	})
	_, text = g.post("/v1/moderations", `{"model":"m","stream":true}`)
	if !strings.HasPrefix(text, events+"data: {\"error\":") {
		t.Errorf("%q", text)
	}
	d.on(&d.other, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "100")
		io.WriteString(w, "half")
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	})
	resp, err := g.client.Post(g.url+"/v1/audio/speech", "", strings.NewReader(`{"model":"m"}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if got, err := io.ReadAll(resp.Body); string(got) != "half" || !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("%q %v", got, err)
	}
}

// form is a transcription request with the given bytes of sound.
func form(t *testing.T, sound int) (kind string, body []byte) {
	t.Helper()
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	err := w.WriteField("model", "m")
	part, perr := w.CreateFormFile("file", "a.wav")
	if err = errors.Join(err, perr); err == nil {
		_, err = part.Write(bytes.Repeat([]byte("sound"), sound/5))
	}
	if err = errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	return w.FormDataContentType(), b.Bytes()
}

// TestPassUpload: an upload reaches the engine while the client still sends it,
// with a length and in chunks.
func TestPassUpload(t *testing.T) {
	g := newRig(t, 1, 1)
	kind, body := form(t, 2<<20)
	begun, got := make(chan struct{}), make(chan []byte, 1)
	g.workers["d0"].raw.Store(&rawHandler{func(w http.ResponseWriter, r *http.Request) bool {
		if r.URL.Path != "/v1/audio/transcriptions" {
			return false
		}
		all := make([]byte, 1<<20)
		if _, err := io.ReadFull(r.Body, all); err != nil {
			t.Error(err)
		}
		begun <- struct{}{}
		rest, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		got <- append(all, rest...)
		fmt.Fprint(w, `{"text":"hello"}`)
		return true
	}})
	for _, length := range []int64{int64(len(body)), -1} {
		in, out := io.Pipe()
		go func() {
			out.Write(body[:3<<19])
			<-begun // the engine has what was sent so far
			out.Write(body[3<<19:])
			out.Close()
		}()
		req, _ := http.NewRequest("POST", g.url+"/v1/audio/transcriptions", in)
		req.ContentLength = length
		req.Header.Set("Content-Type", kind)
		resp, err := g.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		text, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if sent := <-got; resp.StatusCode != 200 || string(text) != `{"text":"hello"}` || !bytes.Equal(sent, body) {
			t.Errorf("length %d: %d %s, %d of %d bytes", length, resp.StatusCode, text, len(sent), len(body))
		}
	}
}

// TestPassRetry: a body that was read whole is sent again; one that is still being read
// cannot be.
func TestPassRetry(t *testing.T) {
	g := newRig(t, 1, 2, func(c *router.Config) { c.Pick.Policy = "round_robin" })
	for _, id := range []string{"d0", "d1"} {
		m := g.workers[id]
		m.on(&m.other, reset)
	}
	healthy := g.workers["d1"]
	healthy.on(&healthy.other, whole)
	for range 2 { // each of the two comes first once
		if resp, text := g.post("/v1/moderations", `{"model":"m","input":"x"}`); resp.StatusCode != 200 || resp.Header.Get("x-xpyd-decode") != "d1" {
			t.Errorf("%d %s", resp.StatusCode, text)
		}
	}
	healthy.on(&healthy.other, reset)
	kind, body := form(t, 2<<20)
	calls := g.workers["d0"].calls.Load() + healthy.calls.Load()
	resp, err := g.client.Post(g.url+"/v1/audio/transcriptions", kind, bytes.NewReader(body))
	if err == nil { // else the refusal crossed what was still being sent
		text, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		apiError(t, string(text))
		if resp.StatusCode != 502 {
			t.Errorf("%d %s", resp.StatusCode, text)
		}
	}
	if n := g.workers["d0"].calls.Load() + healthy.calls.Load() - calls; n > 1 {
		t.Errorf("tried %d times", n)
	}
}

// TestPassCancel: the request to the engine ends when the client leaves.
func TestPassCancel(t *testing.T) {
	g := newRig(t, 1, 1)
	d := g.workers["d0"]
	started, ended := make(chan time.Time, 16), make(chan time.Time, 16)
	d.on(&d.other, hold(started, ended))
	conn, err := net.Dial("tcp", g.r.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	const ask = `{"model":"m","input":"x"}`
	fmt.Fprintf(conn, "POST /v1/moderations HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(ask), ask)
	<-started
	conn.Close()
	g.until("the leg to end", func() bool { return len(ended) == 1 })
	<-ended
	g.until("a 499 in the log", func() bool { return strings.Contains(g.logs.String(), "status=499") })
	g.untilLate("/v1/moderations", ask, started)
	g.until("its leg to end", func() bool { return d.active.Load() == 0 })
}

// TestExpect: a client that sent Expect is told to send its body.
func TestExpect(t *testing.T) {
	g := newRig(t, 1, 1)
	for _, path := range []string{"/v1/completions", "/v1/embeddings"} {
		conn, err := net.Dial("tcp", g.r.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n", path, len(ask))
		in := bufio.NewReader(conn)
		if line, err := in.ReadString('\n'); err != nil || line != "HTTP/1.1 100 Continue\r\n" {
			t.Fatalf("%s: %q %v", path, line, err)
		}
		in.ReadString('\n')
		io.WriteString(conn, ask)
		resp, err := http.ReadResponse(in, nil)
		if err != nil || resp.StatusCode != 200 {
			t.Fatalf("%s: %v %v", path, resp, err)
		}
	}
}

// TestOldClient: HTTP/1.0 knows no chunks; the body ends with the connection.
func TestOldClient(t *testing.T) {
	g := newRig(t, 1, 1)
	conn, err := net.Dial("tcp", g.r.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s", len(askStream), askStream)
	all, err := io.ReadAll(conn)
	if err != nil || !strings.HasSuffix(string(all), "\r\n\r\n"+storyText) || strings.Contains(string(all), "chunked") {
		t.Errorf("%q %v", all, err)
	}
}

// TestPipelined requests are answered in order.
func TestPipelined(t *testing.T) {
	g := newRig(t, 1, 1)
	conn, err := net.Dial("tcp", g.r.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	one := fmt.Sprintf("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(askStream), askStream)
	io.WriteString(conn, one+"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"+one)
	in := bufio.NewReader(conn)
	for i, want := range []string{storyText, `{"version":"1.2.3"}`, storyText} {
		resp, err := http.ReadResponse(in, nil)
		if err != nil {
			t.Fatal(i, err)
		}
		if text, err := io.ReadAll(resp.Body); err != nil || string(text) != want {
			t.Errorf("%d: %q %v", i, text, err)
		}
	}
}

// TestEmbedder: an engine that has no completions, in either way that engines
// say so, gets the requests for embeddings, and no others.
func TestEmbedder(t *testing.T) {
	t.Parallel()
	text, list := engines(t, "openai", fleet.Decode, 1)
	vectors, more := engines(t, "openai", fleet.Decode, 1, func(c *fake.Config) { c.Model, c.Embeds = "vectors", true })
	list, more[0].ID, more[0].Model = append(list, more...), "embedder", "vectors"
	list[1] = more[0]
	g := newRig(t, 0, 0, func(c *router.Config) { c.Static = list })
	g.allProbed(2)
	resp, body := g.post("/v1/embeddings", `{"model":"vectors","input":["a","b"]}`)
	var answer struct {
		Data []struct{ Embedding []float32 }
	}
	if err := json.Unmarshal([]byte(body), &answer); err != nil || resp.StatusCode != 200 || len(answer.Data) != 2 || !slices.Equal(answer.Data[1].Embedding, fake.Vector(`"b"`)) {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
	for path, ask := range map[string]string{"/v1/completions": `"prompt":"x"`, "/v1/chat/completions": `"messages":[{"role":"user","content":"x"}]`} {
		resp, body := g.post(path, `{"model":"vectors",`+ask+`}`)
		if e := apiError(t, body); resp.StatusCode != 400 || e.Param == nil || *e.Param != "model" || !strings.Contains(e.Message, "does not generate") {
			t.Errorf("%s: %d %s", path, resp.StatusCode, body)
		}
	}
	if resp, body := g.post("/v1/completions", askText); resp.StatusCode != 200 || resp.Header.Get("x-xpyd-decode") != list[0].ID {
		t.Errorf("the other model: %d %s", resp.StatusCode, body)
	}
	if a, b := len(text[0].Records()), len(vectors[0].Records()); a != 1 || b != 1 {
		t.Errorf("%d and %d requests", a, b)
	}
	var info struct {
		Instances []struct {
			ID     string
			Embeds bool `json:"embeds_only"`
		}
	}
	g.adminJSON("GET", "/admin/v1/instances", "", &info)
	for _, i := range info.Instances {
		if i.Embeds != (i.ID == "embedder") {
			t.Errorf("%+v", i)
		}
	}
}

// TestEmbedderReady: a fleet that only embeds is ready; where engines generate,
// one that embeds does not hide that they are lost.
func TestEmbedderReady(t *testing.T) {
	t.Parallel()
	_, list := engines(t, "openai", fleet.Decode, 1, func(c *fake.Config) { c.Model, c.Embeds = "vectors", true })
	list[0].Model = "vectors"
	g := newRig(t, 0, 0, func(c *router.Config) { c.Static = list })
	g.until("ready to embed", g.r.Ready)
	p, d := g.add("p0", fleet.Prefill), g.add("d0", fleet.Decode)
	g.until("a pair", func() bool { return p.probes.Load() > 0 && d.probes.Load() > 0 && g.idle() })
	g.until("ready", g.r.Ready)
	d.srv.CloseClientConnections()
	d.srv.Close()
	g.watcher.ReportDead("d0", d.inst.Epoch, "test")
	if status, _ := g.get("/ready"); status != 503 {
		t.Errorf("the only pair is lost, and /ready says %d", status)
	}
	if resp, body := g.post("/v1/embeddings", `{"model":"vectors","input":"x"}`); resp.StatusCode != 200 {
		t.Errorf("embeddings: %d %s", resp.StatusCode, body)
	}
}

// TestEmbedderBeside: of two engines of one model, the one that says by a 400 that it
// does not generate gets no requests to generate. An engine that answers nothing else
// either never passes its probe.
func TestEmbedderBeside(t *testing.T) {
	t.Parallel()
	g := newRig(t, 0, 0, func(c *router.Config) { c.Limits.PairWait = time.Minute })
	alone := func(i *fleet.Instance) { i.Dialect = "openai" }
	says := func(m *mock, status int, embeds bool) {
		m.raw.Store(&rawHandler{serve: func(w http.ResponseWriter, r *http.Request) bool {
			if embeds && r.URL.Path == "/v1/embeddings" {
				w.Header().Set("Content-Type", "application/json")
				fmt.Fprintf(w, `{"of":%q}`, m.id)
				return true
			}
			if r.Method == "POST" {
				w.Header().Set("Content-Type", "application/json")
				w.WriteHeader(status)
				fmt.Fprint(w, `{"error":{"message":"The model does not support Completions API"}}`)
				return true
			}
			return false
		}})
	}
	for i, status := range []int{404, 405, 400, 422, 501} {
		id := fmt.Sprintf("e%d", i)
		says(g.add(id, fleet.Decode, alone, func(i *fleet.Instance) { i.Model = id }), status, true)
	}
	broken := g.add("broken", fleet.Decode, alone)
	says(broken, 404, false)
	g.add("whole", fleet.Decode, alone)
	for i := range 5 {
		id := fmt.Sprintf("e%d", i)
		resp, body := g.post("/v1/embeddings", `{"model":"`+id+`","input":"x"}`)
		if resp.StatusCode != 200 || body != `{"of":"`+id+`"}` {
			t.Errorf("%s: %d %s", id, resp.StatusCode, body)
		}
	}
	for range 8 {
		if resp, body := g.post("/v1/completions", ask); resp.StatusCode != 200 || resp.Header.Get("x-xpyd-decode") != "whole" {
			t.Errorf("%d %s", resp.StatusCode, body)
		}
	}
	if strings.Contains(g.logs.String(), "does not generate\" id=broken") {
		t.Error("an engine without any path passed")
	}
}
