package router_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xpyd/xpyd/engine/tier/redis/redistest"
	"github.com/xpyd/xpyd/router"
	"github.com/xpyd/xpyd/router/apikey"
)

// apart is a rig whose decode answers chats when it is let go, and who asks it for responses in the background.
type apart struct {
	*rig
	free, begun chan struct{}
	secret      string
	gone        atomic.Int64 // answers whose router has left
}

func newApart(t *testing.T, edit ...func(*router.Config)) *apart {
	a := &apart{rig: newRig(t, 1, 1, edit...), free: make(chan struct{}), begun: make(chan struct{}, 16)}
	a.chats("d0", func(w http.ResponseWriter, r *http.Request, body string) {
		stream := strings.Contains(body, `"stream":true`)
		if stream {
			w.Header().Set("x-xpyd-prompt", "9 4")
			w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
			io.WriteString(w, saidStream(r.Header.Get("x-xpyd-tokens") == "1", 0)[0])
			w.(http.Flusher).Flush()
		}
		a.begun <- struct{}{}
		select {
		case <-a.free:
		case <-r.Context().Done():
			a.gone.Add(1)
			return
		}
		if !stream {
			says(w, r, body)
			return
		}
		for _, e := range saidStream(r.Header.Get("x-xpyd-tokens") == "1", 0)[1:] {
			io.WriteString(w, e)
		}
	})
	return a
}

func (a *apart) do(method, path, body string) (int, string) {
	a.t.Helper()
	req, _ := http.NewRequest(method, a.url+"/v1/responses"+path, strings.NewReader(body))
	req.Header.Set("Content-Type", "application/json")
	if a.secret != "" {
		req.Header.Set("Authorization", "Bearer "+a.secret)
	}
	resp, err := a.client.Do(req)
	if err != nil {
		a.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b)
}

// begin asks for a response and returns its ID, once a worker has it.
func (a *apart) begin(more string) string {
	a.t.Helper()
	code, text := a.do("POST", "", `{"model":"m","input":"one","background":true`+more+`}`)
	if code != 200 || status(text) != "queued" || !strings.Contains(text, `"background":true`) || !strings.Contains(text, `"output":[]`) {
		a.t.Fatalf("%d %s", code, text)
	}
	<-a.begun
	return idOf(text)
}

// opens asks for a response as a stream, and reads up to a part. It leaves then, or has the rest read later.
func (a *apart) opens(part string, leaves bool) (id, head string, rest func() string) {
	a.t.Helper()
	ctx, leave := context.WithCancel(a.t.Context())
	a.t.Cleanup(leave)
	req, _ := http.NewRequestWithContext(ctx, "POST", a.url+"/v1/responses", strings.NewReader(`{"model":"m","input":"one","background":true,"stream":true}`))
	req.Header.Set("Content-Type", "application/json")
	if a.secret != "" {
		req.Header.Set("Authorization", "Bearer "+a.secret)
	}
	resp, err := a.client.Do(req)
	if err != nil || resp.StatusCode != 200 || resp.Header.Get("Content-Type") != "text/event-stream" {
		a.t.Fatal(resp, err)
	}
	<-a.begun
	piece := make([]byte, 4096)
	for !strings.Contains(head, part) {
		n, err := resp.Body.Read(piece)
		if head += string(piece[:n]); err != nil {
			a.t.Fatal(err, head)
		}
	}
	if leaves {
		leave()
		resp.Body.Close()
	}
	return idOf(head), head, func() string {
		b, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		return head + string(b)
	}
}

// becomes waits until a response has a status.
func (a *apart) becomes(id, want string) string {
	a.t.Helper()
	text := ""
	a.until(want, func() bool {
		_, text = a.do("GET", "/"+id, "")
		return status(text) == want
	})
	return text
}

func idOf(text string) string { return regexp.MustCompile(`resp_[0-9a-f]{48}`).FindString(text) }

func status(text string) string {
	if m := regexp.MustCompile(`^\{"id":"resp_[0-9a-f]{48}","object":"response","created_at":\d+,"status":"(\w+)"`).FindStringSubmatch(text); m != nil {
		return m[1]
	}
	return ""
}

// TestBackground: a response goes on without its client, is asked for, gone on with, and kept as any.
func TestBackground(t *testing.T) {
	t.Parallel()
	a := newApart(t)
	id := a.begin("")
	text := a.becomes(id, "in_progress")
	if !strings.Contains(text, `"output":[],"usage":null`) || a.gauge("xpyd_router_responses_background") != 1 {
		t.Error(text)
	}
	if code, text := a.do("GET", "/"+id+"/input_items", ""); code != 200 || !strings.Contains(text, `"one"`) {
		t.Errorf("%d %s", code, text)
	}
	if code, text := a.do("POST", "", `{"model":"m","input":"two","previous_response_id":"`+id+`"}`); code != 400 || !strings.Contains(apiError(t, text).Message, "is in_progress") {
		t.Errorf("%d %s", code, text)
	}
	if code, text := a.do("GET", "/"+id+"?stream=true", ""); code != 400 || !strings.Contains(text, "not made with stream") {
		t.Errorf("%d %s", code, text)
	}
	close(a.free)
	if text = a.becomes(id, "completed"); !strings.Contains(text, `Hello \"ä\"`) || !strings.Contains(text, `"input_tokens":9`) {
		t.Error(text)
	}
	a.until("it rests", func() bool { return a.gauge("xpyd_router_responses_background") == 0 })
	if code, again := a.do("POST", "/"+id+"/cancel", ""); code != 200 || again != text {
		t.Errorf("cancelled when it is over: %d %s", code, again)
	}
	if code, text := a.do("POST", "", `{"model":"m","input":"two","previous_response_id":"`+id+`"}`); code != 200 {
		t.Errorf("%d %s", code, text)
	}
	if code, text := a.do("DELETE", "/"+id, ""); code != 200 {
		t.Errorf("%d %s", code, text)
	}
	if code, text := a.do("GET", "/"+id, ""); code != 404 {
		t.Errorf("%d %s", code, text)
	}
	for body, part := range map[string]string{`{"model":"m","input":"x","background":true,"store":false}`: "background can only be used when `store` is true",
		`{"model":"none","input":"x","background":true}`: "none", `{"model":"m","input":[],"background":true}`: "input"} {
		if code, text := a.do("POST", "", body); code < 400 || code > 404 || !strings.Contains(apiError(t, text).Message, part) {
			t.Errorf("%s: %d %s", body, code, text)
		}
	}
	if n := a.gauge("xpyd_router_responses_background"); n != 0 {
		t.Errorf("%v run after refusals", n)
	}
}

// TestBackgroundStream: its events are numbered, and told again from any place on, while it runs and after.
func TestBackgroundStream(t *testing.T) {
	t.Parallel()
	a := newApart(t)
	id, head, _ := a.opens(`"delta":"th"`, true) // and the response goes on
	got := make(chan string)
	go func() {
		_, text := a.do("GET", "/"+id+"?stream=true&starting_after=1", "")
		got <- text
	}()
	if text := a.becomes(id, "in_progress"); !strings.Contains(text, `"text":"th"`) {
		t.Errorf("what there is: %s", text)
	}
	close(a.free)
	rest := <-got
	final := a.becomes(id, "completed")
	_, whole := a.do("GET", "/"+id+"?stream=true", "")
	events := strings.SplitAfter(strings.TrimSuffix(whole, "\n\n")+"\n\n", "\n\n")
	events = events[:len(events)-1]
	for i, want := range []string{"response.created", "response.queued", "response.in_progress", "response.output_item.added"} {
		if !strings.HasPrefix(events[i], "event: "+want+"\n") {
			t.Errorf("event %d: %s", i, events[i])
		}
	}
	for i, e := range events {
		if !strings.Contains(e, fmt.Sprintf(`"sequence_number":%d,`, i)) {
			t.Errorf("event %d: %s", i, e)
		}
	}
	last := events[len(events)-1]
	if !strings.HasPrefix(last, "event: response.completed\n") || !strings.Contains(last, final) {
		t.Errorf("%s, want %s", last, final)
	}
	if rest != strings.Join(events[2:], "") || !strings.HasPrefix(whole, head) {
		t.Errorf("told apart:\n%s\n%s\nwhole:\n%s", head, rest, whole)
	}
	for i := range events {
		if _, text := a.do("GET", fmt.Sprintf("/%s?stream=true&starting_after=%d", id, i), ""); text != strings.Join(events[i+1:], "") {
			t.Errorf("after %d: %s", i, text)
		}
	}
	for args, param := range map[string]string{"stream=maybe": "stream", "starting_after=1": "starting_after", "stream=false&starting_after=1": "starting_after"} {
		if code, text := a.do("GET", "/"+id+"?"+args, ""); code != 400 || *apiError(t, text).Param != param {
			t.Errorf("%s: %d %s", args, code, text)
		}
	}
	if code, text := a.do("GET", "/"+id+"?stream=true&starting_after=x", ""); code != 400 || *apiError(t, text).Param != "starting_after" {
		t.Errorf("%d %s", code, text)
	}
}

// TestBackgroundEnds: what ends a response before its time is known afterwards, and ends its work.
func TestBackgroundEnds(t *testing.T) {
	t.Parallel()
	a := newApart(t)
	id := a.begin("")
	for range 2 {
		if code, text := a.do("POST", "/"+id+"/cancel", ""); code != 200 || status(text) != "cancelled" {
			t.Errorf("%d %s", code, text)
		}
	}
	a.until("the worker is free", func() bool { return a.gone.Load() == 1 && a.idle() })
	a.becomes(id, "cancelled")

	id = a.begin("")
	if code, text := a.do("DELETE", "/"+id, ""); code != 200 {
		t.Errorf("%d %s", code, text)
	}
	a.until("the worker is free", func() bool { return a.gone.Load() == 2 && a.idle() })
	if code, text := a.do("GET", "/"+id, ""); code != 404 {
		t.Errorf("%d %s", code, text)
	}

	id, _, rest := a.opens("response.created", false)
	text := ""
	a.until("a piece", func() bool { _, text = a.do("GET", "/"+id, ""); return strings.Contains(text, `"text":"th"`) })
	if code, text := a.do("POST", "/"+id+"/cancel", ""); code != 200 || status(text) != "cancelled" || !strings.Contains(text, `"status":"incomplete"`) || !strings.Contains(text, `"text":"th"`) {
		t.Errorf("%d %s", code, text)
	}
	if text := rest(); !strings.Contains(text, "event: error\n") || !strings.Contains(text, `"code":"response_cancelled"`) {
		t.Error(text)
	}

	a.chats("d0", func(w http.ResponseWriter, _ *http.Request, _ string) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(400)
		io.WriteString(w, `{"error":{"message":"too long","type":"invalid_request_error","param":"messages","code":null}}`)
	})
	_, text = a.do("POST", "", `{"model":"m","input":"one","background":true}`)
	if text = a.becomes(idOf(text), "failed"); !strings.Contains(text, `"error":{"code":"invalid_prompt","message":"too long"}`) {
		t.Error(text)
	}
	if code, text := a.do("POST", "", `{"model":"m","input":"two","previous_response_id":"`+idOf(text)+`"}`); code != 400 || !strings.Contains(text, "is failed") {
		t.Errorf("%d %s", code, text)
	}
}

// TestBackgroundBounds: so many run at once, and a key may have half of them; another key finds none of its responses.
func TestBackgroundBounds(t *testing.T) {
	t.Parallel()
	f := newKeyFile(t, apikey.Key{Name: "a"}, apikey.Key{Name: "b"})
	a := newApart(t, f.config, func(c *router.Config) { c.Responses.Background, c.Responses.BackgroundBytes = 4, 3000 })
	a.secret = f.secrets["a"]
	one := a.begin("")
	a.begin("")
	const ask = `{"model":"m","input":"one","background":true}`
	if code, text := a.do("POST", "", ask); code != 429 || !strings.Contains(text, "2 of them yours") {
		t.Errorf("%d %s", code, text)
	}
	a.secret = f.secrets["b"]
	for _, ask := range [][2]string{{"GET", ""}, {"GET", "?stream=true"}, {"POST", "/cancel"}, {"DELETE", ""}, {"GET", "/input_items"}} {
		if code, text := a.do(ask[0], "/"+one+ask[1], ""); code != 404 {
			t.Errorf("%v: %d %s", ask, code, text)
		}
	}
	a.begin("")
	for bytes, want := range map[int]int{2900: 429, 3000: 413} { // of others' there is some; more than all may hold
		if code, text := a.do("POST", "", strings.Replace(ask, "one", strings.Repeat("x", bytes), 1)); code != want || !strings.Contains(text, "hold") {
			t.Errorf("%d bytes: %d %s", bytes, code, text)
		}
	}
	id, _, rest := a.opens("response.created", false)
	close(a.free)
	rest() // its events are more than 3000 bytes, so that what it says depends on who is faster
	a.until("they rest", func() bool { return a.gauge("xpyd_router_responses_background") == 0 })
	if code, text := a.do("GET", "/"+id+"?stream=true", ""); code != 400 || !strings.Contains(text, "not there any more") {
		t.Errorf("%d %s", code, text)
	}
}

// TestBackgroundOff: there is none where the operator wants none, or nothing is kept.
func TestBackgroundOff(t *testing.T) {
	t.Parallel()
	for _, edit := range []func(*router.Config){func(c *router.Config) { c.Responses.Background = 0 }, func(c *router.Config) { c.Responses.Entries = 0 }} {
		g := newRig(t, 1, 1, edit)
		if resp, text := g.post("/v1/responses", `{"model":"m","input":"x","background":true}`); resp.StatusCode != 400 || *apiError(t, text).Param != "background" {
			t.Errorf("%d %s", resp.StatusCode, text)
		}
	}
}

// TestBackgroundShutdown: a drain waits for what runs, and what it does not wait for is known to have failed.
func TestBackgroundShutdown(t *testing.T) {
	t.Parallel()
	url := redistest.StartFake(t).URL()
	shared := func(c *router.Config) { c.Responses.Redis = url }
	for _, patient := range []bool{true, false} {
		a := newApart(t, shared)
		id := a.begin("")
		other := newRig(t, 1, 1, shared)
		if code, text := other.get("/v1/responses/" + id); code != 200 || status(text) != "queued" {
			t.Errorf("%d %s", code, text)
		}
		if resp, text := other.post("/v1/responses/"+id+"/cancel", ""); resp.StatusCode != 409 || !strings.Contains(text, "another router") {
			t.Errorf("%d %s", resp.StatusCode, text)
		}
		a.stopped = true
		timeout := time.Minute
		if !patient {
			timeout = 150 * time.Millisecond
		}
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		done := make(chan error, 1)
		go func() { done <- a.r.Shutdown(ctx) }()
		a.until("not ready", func() bool { return !a.r.Ready() })
		want := "failed"
		if patient {
			close(a.free)
			want = "completed"
		}
		err := <-done
		cancel()
		if (err == nil) != patient {
			t.Errorf("%v: %v", patient, err)
		}
		if code, text := other.get("/v1/responses/" + id); code != 200 || status(text) != want {
			t.Errorf("%d %s", code, text)
		}
	}
}
