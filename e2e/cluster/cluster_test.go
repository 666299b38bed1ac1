package cluster_test

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/internal/fleet"
)

func TestMain(m *testing.M) { os.Exit(cluster.Main(m)) }

// TestCluster uses the whole package: a router on an external NATS, two workers that join with one
// flag, a stream, the counts.
func TestCluster(t *testing.T) {
	nats := cluster.StartNATS(t)
	r := cluster.Alone(t, "--nats", nats.URL)
	r.Worker(t, fleet.Prefill, "--id", "p")
	r.Worker(t, fleet.Decode, "--id", "d")
	r.WaitServing(t, 20*time.Second, 1, 1)
	if err := r.Ready(); err != nil {
		t.Error(err)
	}
	client := cluster.NewClient(t)
	for _, stream := range []string{"true", "false"} {
		a := cluster.Post(t.Context(), client, r.URL+"/v1/completions",
			`{"model":"stories260k","prompt":"Once upon a time","max_tokens":8,"temperature":0,"stream":`+stream+`}`)
		if !a.Good() || a.Prefill != "p" || a.Decode != "d" || a.Text != ", there was a little girl" || a.Finish != "length" {
			t.Errorf("stream %s: %v, %q", stream, a, a.Text)
		}
	}
	cluster.Wait(t, time.Second, "ledgers empty", r.Idle)
	counts, err := r.Counts()
	if err != nil || len(counts) != 3 || counts["router"].FDs == 0 || counts["router"].Goroutines == 0 {
		t.Errorf("counts %v, %v", counts, err)
	}
	nats.Kill()
	nats.Restart(t)
	out, _, code := r.CLI(t, "status")
	if code != 0 {
		t.Errorf("status: %d %s", code, out)
	}
}

// TestProfile: /admin/v1/profile turns profiling on and off in every process and returns the
// profiles.
func TestProfile(t *testing.T) {
	r := cluster.Up(t)
	ask := func(method, query string, status int) []byte {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), method, r.Admin+"/admin/v1/profile"+query, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+r.Token)
		resp, err := cluster.NewClient(t).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode != status {
			t.Fatalf("%s %s: %d %s %v, want %d", method, query, resp.StatusCode, body, err, status)
		}
		return body
	}
	type state struct {
		On    bool
		Bytes int
	}
	all := func(method, query string) map[string]state {
		t.Helper()
		var s struct {
			Router  state
			Workers map[string]state
		}
		if err := json.Unmarshal(ask(method, query, 200), &s); err != nil || len(s.Workers) != 2 {
			t.Fatalf("%s %s: %+v %v", method, query, s, err)
		}
		s.Workers["router"] = s.Router
		return s.Workers
	}
	ask("GET", "?instance=decode-0", 404) // none was made
	ask("GET", "?instance=nobody", 404)
	ask("POST", "?seconds=601", 400)
	for id, s := range all("POST", "?seconds=600") {
		if !s.On {
			t.Errorf("%s: %+v", id, s)
		}
	}
	ask("POST", "?instance=decode-0", 409)
	for id, s := range all("DELETE", "") {
		if s.On || s.Bytes == 0 {
			t.Errorf("%s: %+v", id, s)
		}
		if b := ask("GET", "?instance="+id, 200); len(b) != s.Bytes || !bytes.HasPrefix(b, []byte("\x1f\x8b")) {
			t.Errorf("%s: a profile of %d bytes, want %d", id, len(b), s.Bytes)
		}
	}
}
