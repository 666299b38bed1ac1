package input

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/internal/requestlog"
	"github.com/xpyd/xpyd/internal/steptable"
)

// TestReplay: a fleet's request log, also after it was moved away, is run again by xpyd replay.
func TestReplay(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file, log := filepath.Join(dir, "up.yaml"), filepath.Join(dir, "requests.jsonl")
	if err := os.WriteFile(file, []byte("request_log: {file: "+log+"}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s := &system{Router: cluster.Up(t, "--config", file, "--decode", "2"), client: cluster.NewClient(t)}
	body := func(prompt, more string) string {
		return fmt.Sprintf(`{"prompt":%q,"max_tokens":20,"seed":1%s}`, prompt, more)
	}
	once := strings.Repeat("Once upon a time ", 20)
	send := func(ctx context.Context, body string) {
		t.Helper()
		if r := cluster.Post(ctx, s.client, s.URL+completions, body); !r.Good() {
			t.Errorf("%v", r)
		}
	}
	send(t.Context(), body(once, ``))
	cluster.Wait(t, 10*time.Second, "the request's line", func() error {
		text, err := os.ReadFile(log)
		if err == nil && strings.Count(string(text), "\n") < 2 { // and the header
			err = errors.New("it is not written")
		}
		return err
	})
	if err := os.Rename(log, log+".old"); err != nil {
		t.Fatal(err)
	}
	s.Signal(syscall.SIGHUP)
	cluster.Wait(t, 10*time.Second, "a new file", func() error {
		send(t.Context(), body("Lily", ``))
		_, err := os.Stat(log)
		return err
	})
	for range 3 {
		send(t.Context(), body(once, `,"stream":true`))
	}
	if r := cluster.Post(t.Context(), s.client, s.URL+completions, body("", `,"model":"none"`)); r.Status != 404 {
		t.Errorf("%v", r)
	}
	left, leave := context.WithCancel(t.Context())
	leave()
	cluster.Post(left, s.client, s.URL+completions, body(once, ``))
	s.Signal(syscall.SIGINT)
	if code := s.Exit(t, time.Minute); code != 0 {
		t.Errorf("exit %d", code)
	}

	text, err := os.ReadFile(log)
	if err != nil {
		t.Fatal(err)
	}
	read, err := requestlog.Read(strings.NewReader(string(text)))
	if err != nil || strings.Contains(string(text), "upon") || strings.Contains(string(text), "none") {
		t.Fatalf("%v\n%s", err, text)
	}
	streams := 0
	for _, q := range read.Requests {
		if !q.Stream {
			continue
		}
		if streams++; q.Prompt < 60 || q.Estimated || q.Output != 20 || q.Cached == nil || streams > 1 && *q.Cached < 32 || q.Prefill == "" || q.Decode == "" || len(q.Prefix) != 1 {
			t.Errorf("%+v", q)
		}
	}
	if streams != 3 {
		t.Errorf("%d streams\n%s", streams, text)
	}
	table := filepath.Join(dir, "steps.json")
	writeTable(t, table)
	for _, path := range []string{log, log + ".old"} {
		out, err := exec.Command(cluster.Binary(t), "replay", path, "--table", table, "--fleet", "1P2D", "--fleet", "2", "--json", "-").Output()
		if err != nil {
			said := ""
			if exit, ok := errors.AsType[*exec.ExitError](err); ok {
				said = string(exit.Stderr)
			}
			t.Fatalf("%v: %s", err, said)
		}
		var result struct {
			Runs []struct {
				Fleet  string
				Failed int
			}
			Requests []struct{ Line int }
		}
		if err := json.Unmarshal(out, &result); err != nil || len(result.Runs) != 3 || len(result.Requests) == 0 {
			t.Fatalf("%v\n%s", err, out)
		}
		for i, want := range []string{"log", "1P2D", "2 whole"} {
			if r := result.Runs[i]; r.Fleet != want || r.Failed > 0 {
				t.Errorf("%+v, want %s", r, want)
			}
		}
	}
}

// writeTable writes a table of a device on which a step takes a millisecond, and a token of a prompt 10 µs.
func writeTable(t *testing.T, path string) {
	t.Helper()
	at := func(ms float64) steptable.Time { return steptable.Time{Seconds: ms / 1e3, Runs: 5} }
	tab := &steptable.Table{Version: steptable.Version, KV: steptable.KV{BytesPerToken: 1280, Bandwidth: 1e9, Latency: 1e-4},
		About:   steptable.About{Model: "stories260k", Device: "test", Backend: "cpu", BlockTokens: 16, Blocks: 500, MaxBatch: 16, StepTokens: 512, MaxContext: 512, Shape: steptable.Shape{Layers: 5}},
		Prefill: []steptable.Prefill{{Tokens: 1, Time: at(1)}, {Tokens: 512, Time: at(6)}}}
	for _, batch := range []int{1, 16} {
		for _, context := range []int{16, 512} {
			tab.Decode = append(tab.Decode, steptable.Decode{Batch: batch, Context: context, Time: at(1)})
		}
	}
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := tab.Write(f); err != nil {
		t.Fatal(err)
	}
}
