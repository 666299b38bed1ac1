package e2e

import (
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router"
	"github.com/xpyd/xpyd/worker"
)

// TestEmbeddings: of a real fleet a prefill worker answers, with what any worker answers alone; when one is
// gone another does. No worker holds anything afterwards (startWorker).
func TestEmbeddings(t *testing.T) {
	watcher, nats := startFleet(t)
	of := func(c *worker.Config) { c.Fleet.URL = nats }
	first, second := startWorker(t, fleet.Prefill, of), startWorker(t, fleet.Prefill, of)
	decode := startWorker(t, fleet.Decode, of)
	url := startRouter(t, router.Deps{Fleet: watcher})
	ask := func(url, input string) (by string, vectors [][]float32, tokens int) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/v1/embeddings", strings.NewReader(`{"input":`+input+`}`))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		var a struct {
			Data  []struct{ Embedding []float32 }
			Usage struct {
				Prompt int `json:"prompt_tokens"`
			}
		}
		b, err := io.ReadAll(resp.Body)
		if err != nil || json.Unmarshal(b, &a) != nil || resp.StatusCode != 200 {
			t.Fatalf("%d %.300s %v", resp.StatusCode, b, err)
		}
		for _, d := range a.Data {
			vectors = append(vectors, d.Embedding)
		}
		return resp.Header.Get("x-xpyd-prefill"), vectors, a.Usage.Prompt
	}
	_, alone, n := ask(decode.URL(), `["Once upon a time","The end"]`)
	gone := false
	for i := range 12 {
		by, got, tokens := ask(url, `["Once upon a time","The end"]`)
		if len(got) != 2 || !slices.Equal(got[0], alone[0]) || !slices.Equal(got[1], alone[1]) || tokens != n {
			t.Errorf("request %d: other vectors than a worker's alone", i)
		}
		if by != first.ID() && by != second.ID() || gone && by == first.ID() {
			t.Errorf("request %d: %q answered", i, by)
		}
		if i == 5 {
			if err := first.Close(t.Context()); err != nil {
				t.Fatal(err)
			}
			gone = true
		}
	}
}
