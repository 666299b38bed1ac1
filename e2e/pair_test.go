// Package e2e tests whole clusters: workers and router in one process, and as
// real processes. Nothing imports it.
package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/kvconn/shm"
	"github.com/xpyd/xpyd/kvconn/tcp"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/kvconn/way"
	"github.com/xpyd/xpyd/worker"
)

// startWorker runs a worker in this process until the test ends, and checks
// that its ledger is empty then.
func startWorker(t testing.TB, role fleet.Role, change func(*worker.Config), given ...func(*worker.Deps)) *worker.Worker {
	t.Helper()
	cfg := worker.DefaultConfig(role)
	cfg.Threads = 1
	cfg.KVMemory = 8 << 20
	if change != nil {
		change(&cfg)
	}
	tr := tcp.New(nil)
	deps := worker.Deps{Log: testLog(), Registry: prometheus.NewRegistry(), Ways: []way.Kind{way.Network(tr)}, Build: "test"}
	if cfg.KV.Transport == "shm" {
		deps.Ways = []way.Kind{shm.Way(""), way.Network(tr)}
	}
	for _, give := range given {
		give(&deps)
	}
	w, err := worker.Start(t.Context(), cfg, deps)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		waitFor(t, 30*time.Second, func() error {
			if l := w.Ledger(); !l.Empty() {
				b, _ := json.Marshal(l)
				return fmt.Errorf("ledger of %s: %s", w.ID(), b)
			}
			return nil
		})
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := w.Close(ctx); err != nil {
			t.Errorf("close %s: %v", w.ID(), err)
		}
	})
	return w
}

// waitFor polls until f is nil.
func waitFor(t testing.TB, limit time.Duration, f func() error) {
	t.Helper()
	deadline := time.Now().Add(limit)
	for {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Errorf("not within %v: %v", limit, err)
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// answer is what the tests read of a completion.
type answer struct {
	Choices []struct {
		Index    int
		Text     string
		Finish   *string `json:"finish_reason"`
		TokenIDs []int32 `json:"token_ids"`
		Logprobs json.RawMessage
	}
	Usage struct {
		Prompt     int `json:"prompt_tokens"`
		Completion int `json:"completion_tokens"`
	}
	KV json.RawMessage `json:"kv_transfer_params"`
}

func post(t testing.TB, url string, header map[string]string, body string) (int, []byte) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	for k, v := range header {
		req.Header.Set(k, v)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, b
}

// viaPair sends a completion to a pair as our router does; prefill's leg must end well.
func viaPair(t testing.TB, p, d *worker.Worker, body string) (int, []byte) {
	t.Helper()
	status, out, leg := attempt(t, p, d, body)
	if !strings.HasPrefix(leg, "200 ") {
		t.Errorf("prefill leg: %s", leg)
	}
	return status, out
}

// attempt is viaPair for a pair that may fail.
func attempt(t testing.TB, p, d *worker.Worker, body string) (status int, out []byte, prefill string) {
	t.Helper()
	link := ticket.NewLink().String()
	leg := make(chan string, 1)
	go func() {
		resp, err := http.Post(p.URL()+"/xpyd/v1/prefill", "application/json", strings.NewReader(`{"link":"`+link+`"}`))
		if err != nil {
			leg <- err.Error()
			return
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		leg <- fmt.Sprintf("%d %s", resp.StatusCode, b)
	}()
	inst := p.Instance()
	status, out = post(t, d.URL()+"/v1/completions", map[string]string{
		"x-xpyd-link": link, "x-xpyd-prefill": inst.ID, "x-xpyd-prefill-epoch": fmt.Sprint(inst.Epoch), "x-xpyd-prefill-kv": inst.KVAddr,
	}, body)
	return status, out, <-leg
}

// oracle is stories260k's recorded greedy continuation of each prompt.
type oracle struct {
	Cases []struct {
		Prompt    string
		PromptIDs []int32 `json:"prompt_ids"`
		Greedy    []int32 `json:"greedy_64_ids"`
		Text      string  `json:"greedy_64_text"`

		Top [][2]float64 `json:"last_prompt_logits_top10"` // id, logit
	}
}

func readOracle(t testing.TB) *oracle {
	t.Helper()
	b, err := os.ReadFile("testdata/stories260K.oracle.json")
	if err != nil {
		t.Fatal(err)
	}
	var o oracle
	if err := json.Unmarshal(b, &o); err != nil {
		t.Fatal(err)
	}
	return &o
}

// TestOraclePair: every recorded case, token for token, computed alone and
// through a pair, at several block sizes on either side.
func TestOraclePair(t *testing.T) {
	o := readOracle(t)
	for _, blocks := range [][2]int{{1, 1}, {4, 4}, {16, 16}, {256, 256}, {4, 16}, {256, 16}, {16, 7}} {
		t.Run(fmt.Sprintf("blocks %d to %d", blocks[0], blocks[1]), func(t *testing.T) {
			p := startWorker(t, fleet.Prefill, func(c *worker.Config) { c.BlockTokens = blocks[0] })
			d := startWorker(t, fleet.Decode, func(c *worker.Config) { c.BlockTokens = blocks[1] })
			for _, c := range o.Cases {
				body := fmt.Sprintf(`{"model":"stories260k","prompt":%q,"max_tokens":64,"temperature":0,"return_token_ids":true}`, c.Prompt)
				check := func(how string, status int, out []byte) {
					t.Helper()
					var a answer
					if err := json.Unmarshal(out, &a); err != nil || status != 200 {
						t.Fatalf("%s: %d %s", how, status, out)
					}
					want := c.Greedy
					if !equal(a.Choices[0].TokenIDs, want) {
						t.Errorf("%s %q:\n got %v\nwant %v", how, c.Prompt, a.Choices[0].TokenIDs, want)
					}
					text := c.Text
					if c.Prompt == "" { // a text's first space is not part of it
						text = strings.TrimPrefix(text, " ")
					}
					if a.Choices[0].Text != text {
						t.Errorf("%s %q: text %q, want %q", how, c.Prompt, a.Choices[0].Text, text)
					}
				}
				status, out := post(t, d.URL()+"/v1/completions", nil, body)
				check("alone", status, out)
				for range 2 { // cold and warm
					status, out = viaPair(t, p, d, body)
					check("pair", status, out)
				}
				check2 := foreign(t, p, d, body)
				check("foreign", 200, check2)
			}
		})
	}
}

// foreign sends a completion as vLLM's NIXL proxy does: prefill, then decode.
func foreign(t testing.TB, p, d *worker.Worker, body string) []byte {
	t.Helper()
	with := func(fields string) string { return strings.TrimSuffix(body, "}") + "," + fields + "}" }
	status, out := post(t, p.URL()+"/v1/completions", nil, with(`"max_tokens":1,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}`))
	var a answer
	if err := json.Unmarshal(out, &a); err != nil || status != 200 || a.KV == nil {
		t.Fatalf("prefill leg: %d %s", status, out)
	}
	status, out = post(t, d.URL()+"/v1/completions", nil, with(`"kv_transfer_params":`+string(a.KV)))
	if status != 200 {
		t.Fatalf("decode leg: %d %s", status, out)
	}
	return out
}

func equal(a, b []int32) bool {
	x, _ := json.Marshal(a)
	y, _ := json.Marshal(b)
	return bytes.Equal(x, y)
}
