package router_test

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"
)

// TestSameDecodeAgain: a decode that lost its prefill keeps what has arrived,
// so the next attempt goes there too, whoever tells of the loss; one that lost
// two in a row may be the reason, so a third attempt goes elsewhere.
func TestSameDecodeAgain(t *testing.T) {
	for _, c := range []struct {
		name   string
		dead   []string
		decode http.HandlerFunc // of an attempt with a dead one
	}{
		{"prefill's leg breaks", []string{"p0"}, func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }},
		{"decode says it", []string{"p0"}, outcome(502, "dead")},
		{"two in a row", []string{"p0", "p1"}, outcome(502, "dead")},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := newRig(t, 3, 4)
			for _, id := range []string{"p0", "p1", "p2"} {
				if slices.Contains(c.dead, id) {
					p := g.workers[id]
					p.on(&p.prefill, reset)
				}
			}
			for _, id := range []string{"d0", "d1", "d2", "d3"} {
				d := g.workers[id]
				d.on(&d.decode, func(w http.ResponseWriter, r *http.Request) {
					if slices.Contains(c.dead, r.Header.Get("x-xpyd-prefill")) {
						c.decode(w, r)
						return
					}
					story(w, r)
				})
			}
			lost := 0
			for range 12 { // some meet the dead ones
				resp, text := g.post("/v1/completions", ask, "x-xpyd-explain", "1")
				if resp.StatusCode != 200 || text != storyText {
					t.Fatalf("%d %q", resp.StatusCode, text)
				}
				var explain struct{ Failed []string }
				if err := json.Unmarshal([]byte(resp.Header.Get("x-xpyd-explain")), &explain); err != nil {
					t.Fatal(err)
				}
				var went []string // decodes, in order
				for _, f := range explain.Failed {
					pair, _, _ := strings.Cut(f, ":")
					_, d, _ := strings.Cut(pair, "/")
					went = append(went, d)
				}
				went = append(went, resp.Header.Get("x-xpyd-decode"))
				if len(went) > 1 {
					lost++
				}
				if len(went) > 1 && went[1] != went[0] || len(went) > 2 && went[2] == went[0] {
					t.Errorf("went to %v: %v", went, explain.Failed)
				}
			}
			if lost == 0 {
				t.Error("no attempt was lost")
			}
		})
	}
}
