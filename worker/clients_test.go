package worker_test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/worker"
)

const long = `"prompt":"Once upon a time","ignore_eos":true,"max_tokens":480`

// TestClientLeaves: in mid prompt and in mid stream everything is free soon.
func TestClientLeaves(t *testing.T) {
	w := start(t, func(c *worker.Config) { c.KVMemory = 64 << 20 })
	prompt := strings.Repeat("Once upon a time there was. ", 30)
	prompts := `["` + strings.Join(strings.Split(strings.Repeat(prompt+"|", 200), "|")[:200], `","`) + `"]`
	for _, body := range []string{`{"max_tokens":90,"prompt":` + prompts + `}`, `{"max_tokens":90,"stream":true,"prompt":` + prompts + `}`} {
		c, _ := dial(t, w, "/v1/completions", body)
		soon(t, patience, func() error {
			if l := w.Ledger(); len(l.Requests) != 1 || len(l.Blocks) == 0 {
				return fmt.Errorf("%+v", l.Requests)
			}
			return nil
		})
		c.Close()
		empty(t, w)
	}
	c, r := dial(t, w, "/v1/completions", `{`+long+`,"n":16,"stream":true}`)
	firstEvent(t, r)
	if l := w.Ledger(); len(l.Requests) != 1 || l.Requests[0].State != "answering" || l.Requests[0].Kind != "generate" {
		t.Errorf("%+v", l.Requests)
	}
	c.Close()
	empty(t, w)
}

// paused waits until the engine has nothing to do, though a request runs.
func paused(t testing.TB, w *worker.Worker) {
	t.Helper()
	last, still := 0.0, 0
	soon(t, patience, func() error {
		time.Sleep(20 * time.Millisecond)
		now := counter(t, w, `xpyd_engine_tokens_total{phase="decode"}`)
		if still++; now != last {
			last, still = now, 0
		}
		if still < 10 {
			return fmt.Errorf("%v tokens drawn", now)
		}
		return nil
	})
}

// many is a stream of some 30 MB: more than the sockets hold.
const many = `{` + long + `,"n":24,"logprobs":20,"stream":true}`

// TestSlowReader: a client that stops reading pauses its own choices, in bounded memory, and
// loses nothing when it reads on. Others are served.
func TestSlowReader(t *testing.T) {
	if testing.Short() {
		t.Skip("reads tens of megabytes")
	}
	w := start(t, func(c *worker.Config) { c.KVMemory = 32 << 20 })
	_, raw := dial(t, w, "/v1/completions", many)
	resp, err := http.ReadResponse(raw, nil) // whose body is without chunks: one can end within a line
	if err != nil {
		t.Fatal(err)
	}
	r := bufio.NewReaderSize(resp.Body, 64<<10)
	if _, err := r.ReadSlice('\n'); err != nil {
		t.Fatal(err)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	paused(t, w)
	runtime.GC()
	runtime.ReadMemStats(&after)
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 24<<20 {
		t.Errorf("%d MB more for a stream that nobody reads", grown>>20)
	}
	if l := w.Ledger(); len(l.Requests) != 1 {
		t.Errorf("%+v", l)
	}
	if a := complete(t, w, nil, `{"prompt":"Lily","max_tokens":5,"ignore_eos":true}`); a.Usage.Completion != 5 {
		t.Errorf("%+v", a)
	}
	ends := 0
	for {
		line, err := r.ReadSlice('\n') // an event is much shorter than the buffer
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(line, []byte(`"finish_reason":"length"`)) {
			ends++
		}
		if bytes.HasPrefix(line, []byte("data: [DONE]")) {
			break
		}
	}
	if ends != 24 {
		t.Errorf("%d choices ended", ends)
	}
	empty(t, w)
}

// TestStalledReader: a client that never reads is cut off, and does not hold up the end.
func TestStalledReader(t *testing.T) {
	w := start(t, func(c *worker.Config) { c.StallTimeout = 300 * time.Millisecond })
	_, r := dial(t, w, "/v1/completions", many)
	firstEvent(t, r)
	soon(t, patience/4, func() error { // by default a minute, then
		if l := w.Ledger(); !l.Empty() {
			return fmt.Errorf("%+v", l.Requests)
		}
		return nil
	})

	w = start(t, nil)
	_, r = dial(t, w, "/v1/completions", many)
	firstEvent(t, r)
	paused(t, w)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	began := time.Now()
	if err := w.Close(ctx); err != nil {
		t.Error(err)
	}
	if d := time.Since(began); d > slack {
		t.Errorf("close took %v", d)
	}
}
