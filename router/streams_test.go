package router_test

import (
	"io"
	"net/http"
	"testing"
	"time"
)

// TestLineEnds: events are relayed as they come, whatever their lines end in.
func TestLineEnds(t *testing.T) {
	t.Parallel()
	g := newRig(t, 1, 1)
	d := g.workers["d0"]
	for _, end := range []string{"\n", "\r\n", "\r"} {
		first, last := "data:{\"n\":1}"+end+end, "data: [DONE]"+end+end
		seen := make(chan struct{})
		h := func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			io.WriteString(w, first)
			w.(http.Flusher).Flush()
			select {
			case <-seen:
			case <-r.Context().Done():
			case <-time.After(20 * time.Second):
				t.Errorf("%q: the first event did not come", end)
			}
			io.WriteString(w, last)
		}
		d.on(&d.decode, h)
		if status, text := g.stream(askStream, func() { close(seen) }); status != 200 || text != first+last {
			t.Errorf("%d %q", status, text)
		}
	}
}
