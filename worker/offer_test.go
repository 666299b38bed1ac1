package worker_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/xpyd/xpyd/worker"
)

// TestOffers: where blocks run short, routers that asked for frames hear of it between two events,
// and nothing else changes.
func TestOffers(t *testing.T) {
	const streams = 6
	ample := start(t, nil)
	tight := start(t, func(c *worker.Config) { c.Blocks = 36 })
	stream := func(w *worker.Worker, i int, tokens string) string {
		body := fmt.Sprintf(`{"prompt":"Once upon a time","max_tokens":240,"ignore_eos":true,"temperature":1,"seed":%d,"stream":true}`, i)
		resp, b := ask(t, w.URL()+"/v1/completions", map[string]string{"x-xpyd-tokens": tokens, "x-request-id": fmt.Sprint(i)}, body)
		if resp.StatusCode != 200 {
			t.Errorf("%d %s", resp.StatusCode, b)
		}
		return string(b)
	}
	created := func(s string) string { // without what the clock says
		var out []string
		for _, line := range strings.Split(s, "\n") {
			if before, after, ok := strings.Cut(line, `"created":`); ok {
				_, after, _ = strings.Cut(after, ",")
				line = before + after
			}
			if strings.HasPrefix(line, ":t ") || strings.HasPrefix(line, ":f ") {
				line = strings.Join(strings.Split(line, " ")[:3], " ")
			}
			out = append(out, line)
		}
		return strings.Join(out, "\n")
	}
	for _, tokens := range []string{"1", ""} {
		got := make([]string, streams)
		var wg sync.WaitGroup
		for i := range got {
			wg.Go(func() { got[i] = stream(tight, i, tokens) })
		}
		wg.Wait()
		offers := 0
		for i, text := range got {
			rest := strings.ReplaceAll(strings.ReplaceAll(text, ":s soon\n\n", ""), ":s now\n\n", "")
			offers += (len(text) - len(rest)) / len(":s now\n\n")
			if want := stream(ample, i, tokens); created(rest) != created(want) {
				t.Errorf("stream %d differs:\n%s\n%s", i, text, want)
			}
		}
		if (offers > 0) != (tokens == "1") {
			t.Errorf("%d offers, asked for frames: %q", offers, tokens)
		}
	}
	if n := counter(t, tight, "xpyd_engine_preemptions_total"); n == 0 {
		t.Error("nothing was preempted")
	}
	empty(t, tight)
}
