package router_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/requestlog"
	"github.com/xpyd/xpyd/router"
)

// TestRequestLog: each request that is over has a line, whatever became of it, and no word of a client, of an
// engine or of a key is in the log.
func TestRequestLog(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "requests")
	g := newRig(t, 1, 1, func(c *router.Config) {
		c.RequestLog.File, c.Attempts = path, 2
	})
	d := g.workers["d0"]
	began, long := time.Now(), strings.Repeat("word ", 200)
	completion := func(more string) string {
		return `{"model":"m","prompt":"` + long + `","max_tokens":8,"user":"word"` + more + `}`
	}
	prompted := func(h http.HandlerFunc) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("x-xpyd-prompt", "250 128")
			h(w, r)
		}
	}
	tells := func(h http.HandlerFunc) { d.on(&d.decode, h) }
	tells(prompted(streamed(3, func(i int) { time.Sleep(time.Duration(i) * 50 * time.Millisecond) })))
	g.post("/v1/completions", completion(`,"stream":true`))
	tells(events("data: {\"text\":\"word\"}\n\n", "data: {\"text\":\"word\",\"usage\":{\"prompt_tokens\":250,\"completion_tokens\":7}}\n\n", "data: [DONE]\n\n"))
	g.post("/v1/completions", completion(`,"stream":true,"n":2`))
	tells(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, `{"text":"word","usage":{"prompt_tokens":249,"completion_tokens":6}}`)
	})
	g.post("/v1/completions", completion(``), "Authorization", "Bearer word", "x-request-id", "word")
	ids := string(openai.AppendIDs(nil, []int32{7, 8}))
	tells(prompted(events(fmt.Sprintf(":t 0 %s %d %s\ndata: {\"text\":\"word\"}\n\n", ids, madeAt, hashed), ":f 0 "+ids+"\ndata: {\"text\":\"word\"}\n\n", "data: [DONE]\n\n")))
	g.post("/v1/completions", completion(`,"stream":true`))
	tells(story)
	g.post("/v1/completions", completion(`,"stream":true`))
	tells(func(w http.ResponseWriter, r *http.Request) { // an engine may say anything
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(500)
		fmt.Fprint(w, `{"error":{"message":"word"}}`)
	})
	g.post("/v1/completions", completion(``))
	tells(func(w http.ResponseWriter, r *http.Request) { begin(w); reset(w, r) })
	g.post("/v1/completions", completion(`,"stream":true`), "x-xpyd-takeover", "0")
	g.post("/v1/completions", `{"model":"word","prompt":"word"}`)
	g.post("/v1/completions", `{"word":`)
	d.on(&d.other, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, `{"text":"word","usage":{"input_tokens":21,"output_tokens":4}}`)
	})
	g.post("/v1/moderations", `{"model":"m","input":"word"}`)
	tells(func(w http.ResponseWriter, r *http.Request) { begin(w); <-r.Context().Done() })
	ctx, leave := context.WithCancel(t.Context())
	req, _ := http.NewRequestWithContext(ctx, "POST", g.url+"/v1/completions", strings.NewReader(completion(`,"stream":true`)))
	resp, err := g.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := resp.Body.Read(make([]byte, 1)); err != nil { // it has its first token
		t.Error(err)
	}
	leave()
	resp.Body.Close()
	g.until("the ledger to be empty", g.idle)
	g.shutdown()

	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, word := range []string{"word", "127.0.0.1", "\"n\""} {
		if bytes.Contains(text, []byte(word)) {
			t.Errorf("%q is in the log\n%s", word, text)
		}
	}
	log, err := requestlog.Read(bytes.NewReader(text))
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	if log.Xpyd != "1.2.3" || log.Policy != "prefix" || strings.Join(log.Models, ",") != "m" || log.Start.Before(began.Add(-time.Minute)) {
		t.Errorf("header %+v", log.Header)
	}
	const path1 = "/v1/completions"
	guess := len(long)/4 + 1
	for i, want := range []requestlog.Request{
		{Path: path1, Model: "m", Stream: true, Status: 200, Prompt: 250, Output: 3, Prefill: "p0", Decode: "d0", Attempts: 1},
		{Path: path1, Model: "m", Stream: true, Status: 200, Prompt: 250, Output: 7, Choices: 2, Prefill: "p0", Decode: "d0", Attempts: 1},
		{Path: path1, Model: "m", Status: 200, Prompt: 249, Output: 6, Prefill: "p0", Decode: "d0", Attempts: 1},
		{Path: path1, Model: "m", Stream: true, Status: 200, Prompt: 250, Output: 4, Prefill: "p0", Decode: "d0", Attempts: 1},
		{Path: path1, Model: "m", Stream: true, Status: 200, Prompt: guess, Estimated: true, Output: 3, Prefill: "p0", Decode: "d0", Attempts: 1},
		{Path: path1, Model: "m", Status: 500, Prefill: "p0", Decode: "d0", Attempts: 1},
		{Path: path1, Model: "m", Stream: true, Status: 200, Broken: true, Prompt: guess, Estimated: true, Output: 1, Prefill: "p0", Decode: "d0", Attempts: 1},
		{Path: path1, Status: 404},
		{Path: path1, Status: 400},
		{Path: "/v1/moderations", Model: "m", Status: 200, Prompt: 21, Output: 4, Decode: "d0", Attempts: 1},
		{Path: path1, Model: "m", Stream: true, Status: 499, Prompt: guess, Estimated: true, Output: 1, Prefill: "p0", Decode: "d0", Attempts: 1},
	} {
		if i == len(log.Requests) {
			t.Fatalf("%d lines\n%s", i, text)
		}
		got := log.Requests[i]
		if got.Took <= 0 || (got.TTFT > 0) != (want.Status == 200 || want.Status == 499 || want.Status == 500) || got.Took > requestlog.Millis(time.Minute) {
			t.Errorf("%d: times of %+v", i, got)
		}
		if i == 0 && (got.Gap < requestlog.Millis(40*time.Millisecond) || got.Gap > got.Took) {
			t.Errorf("longest gap %v", time.Duration(got.Gap))
		}
		if hashes := len(got.Prefix); want.Path == path1 && want.Model == "m" && (hashes != len(long)/256 || got.Prefix[0] != log.Requests[0].Prefix[0] || got.Bytes != len(long)+2) {
			t.Errorf("%d: %d hashes of %d bytes", i, hashes, got.Bytes)
		}
		if (got.Cached != nil) != (i == 0 || i == 3) || got.Cached != nil && *got.Cached != 128 {
			t.Errorf("%d: cached %v", i, got.Cached)
		}
		got.Cached, got.Arrived, got.Took, got.TTFT, got.Gap, got.Prefix, got.Bytes, got.Line = nil, 0, 0, 0, 0, nil, 0, 0
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%d: %+v, want %+v", i, got, want)
		}
	}
}
