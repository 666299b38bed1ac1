//go:build smollm2

package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/worker"
)

// golden is what Hugging Face transformers generates greedily from the same
// dequantised weights (testdata/smollm2_golden.py).
type golden struct {
	Prompt string  `json:"prompt"`
	IDs    []int32 `json:"prompt_ids"`
	Greedy []int32 `json:"greedy_ids"`
	Margin float64 `json:"min_margin"` // smallest top-1 to top-2 logit gap met
}

// TestSmolLM2 runs SmolLM2-135M-Instruct from its GGUF through a pair: greedy
// tokens equal transformers', and chat answers make sense. scripts/smollm2
// fetches the model and runs it.
func TestSmolLM2(t *testing.T) {
	path := os.Getenv("XPYD_SMOLLM2")
	raw, err := os.ReadFile("testdata/smollm2_golden.json")
	if err != nil {
		t.Fatal(err)
	}
	var goldens []golden
	if err := json.Unmarshal(raw, &goldens); err != nil {
		t.Fatal(err)
	}
	model := func(c *worker.Config) {
		c.Model, c.ServedName, c.Threads, c.KVMemory, c.MaxModelLen = path, "smollm2", 0, 256<<20, 2048
	}
	p, d := startWorker(t, fleet.Prefill, model), startWorker(t, fleet.Decode, model)
	for _, g := range goldens {
		ids, _ := json.Marshal(g.IDs)
		status, out := viaPair(t, p, d, fmt.Sprintf(`{"model":"smollm2","prompt":%s,"max_tokens":%d,"temperature":0,"ignore_eos":true,"return_token_ids":true}`, ids, len(g.Greedy)))
		var a answer
		if err := json.Unmarshal(out, &a); err != nil || status != 200 {
			t.Fatalf("%q: %d %s", g.Prompt, status, out)
		}
		if !equal(a.Choices[0].TokenIDs, g.Greedy) {
			t.Errorf("%q (smallest margin %.4f):\n got %v\nwant %v", g.Prompt, g.Margin, a.Choices[0].TokenIDs, g.Greedy)
		}
		// The same prompt as text must tokenise to the same ids.
		_, out = post(t, d.URL()+"/tokenize", nil, fmt.Sprintf(`{"model":"smollm2","prompt":%q,"add_special_tokens":false}`, g.Prompt))
		var tok struct{ Tokens []int32 }
		if err := json.Unmarshal(out, &tok); err != nil || !equal(tok.Tokens, g.IDs) {
			t.Errorf("%q: tokenised to %v, want %v", g.Prompt, tok.Tokens, g.IDs)
		}
	}
	for question, want := range map[string]string{
		"What is the capital of France? Answer with one word.": "Paris",
		"Say hello.":      "ello",
		"What is 2 + 2?":  "4",
		"Name one planet": "",
	} {
		status, out := post(t, d.URL()+"/v1/chat/completions", nil, fmt.Sprintf(`{"model":"smollm2","messages":[{"role":"user","content":%q}],"max_tokens":48,"temperature":0}`, question))
		var a struct {
			Choices []struct{ Message struct{ Content string } }
		}
		if err := json.Unmarshal(out, &a); err != nil || status != 200 {
			t.Fatalf("%q: %d %s", question, status, out)
		}
		t.Logf("%s\n  %s", question, a.Choices[0].Message.Content)
		if !strings.Contains(a.Choices[0].Message.Content, want) {
			t.Errorf("%q: %q does not contain %q", question, a.Choices[0].Message.Content, want)
		}
	}
}
