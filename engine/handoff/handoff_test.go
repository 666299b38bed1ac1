package handoff_test

import (
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/handoff"
	"github.com/xpyd/xpyd/kernels"
)

func order() *handoff.Order {
	return &handoff.Order{Sampling: engine.Sampling{Seed: math.MaxUint64, Temperature: 0.7, TopP: 0.9, TopK: 40, Bias: []kernels.Bias{{ID: 3, Value: -100}}},
		N: 2, MinTokens: 3, StopTokens: []int32{5}, Logprobs: 1, PromptLogprobs: 0, Salt: "tenant", Priority: -20, TTFT: 200 * time.Millisecond, MayShed: true, Of: 1,
		Guide: &handoff.Guide{Kind: "regex", Text: "a|\"b\"", Begin: "<tool_call>", Thinks: handoff.ThinksMay}}
}

func draft() *handoff.Draft {
	lp := kernels.TokenLogprob{ID: 4, Logprob: -0.25, Rank: 1}
	return &handoff.Draft{First: []kernels.Sampled{{Token: 4, Self: lp, Top: []kernels.TokenLogprob{lp}}, {Token: 9}},
		Prompt: []kernels.PromptLogprob{{Self: lp}, {}}, Guided: true, Cached: 1, QueueUS: 2, ComputeUS: 3}
}

func TestRoundTrip(t *testing.T) {
	b, err := order().Encode()
	if err != nil {
		t.Fatal(err)
	}
	o, err := handoff.ParseOrder(b)
	if err != nil || !reflect.DeepEqual(o, order()) {
		t.Errorf("%+v, %v", o, err)
	}
	if b, err = draft().Encode(); err != nil {
		t.Fatal(err)
	}
	d, err := handoff.ParseDraft(b, order(), false, 3, 10)
	if err != nil || !reflect.DeepEqual(d, draft()) {
		t.Errorf("%+v, %v", d, err)
	}
}

// TestPacked: prompt log probabilities come out as they were, and as many as a worker allows
// (worker, maxListed) fit a commit, which holds 16 MiB.
func TestPacked(t *testing.T) {
	for _, top := range []int{20, 0} {
		o := &handoff.Order{N: 1, Logprobs: -1, PromptLogprobs: top}
		want := &handoff.Draft{First: []kernels.Sampled{{Token: 9}}}
		for i := range 1 << 19 / (top + 1) {
			p := kernels.PromptLogprob{Self: kernels.TokenLogprob{ID: int32(100_000 + i%9), Logprob: -12.345678, Rank: 12345}}
			for j := range top {
				p.Top = append(p.Top, kernels.TokenLogprob{ID: int32(100_000 + j), Logprob: float32(math.Inf(-1)), Rank: int32(j + 1)})
			}
			want.Prompt = append(want.Prompt, p)
		}
		b, err := want.Encode()
		if err != nil || len(b) > 16<<20 {
			t.Fatalf("%d alternatives: %d bytes, %v", top, len(b), err)
		}
		got, err := handoff.ParseDraft(b, o, false, len(want.Prompt)+1, 1<<17)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%d alternatives: %v", top, err)
		}
	}
	o := &handoff.Order{N: 1, Logprobs: -1, PromptLogprobs: 1}
	for _, bad := range []string{"AA==", "AQAAAAEAAAAAAAAAAAAAAA==", "/////wEAAAAAAAAAAAAAAA==", "AAAAAAEAAAAAAAAAAAAA"} {
		if d, err := handoff.ParseDraft([]byte(`{"first":[{"token":1}],"prompt":"`+bad+`"}`), o, false, 2, 10); err == nil || !strings.Contains(err.Error(), "cut off") {
			t.Errorf("%s: %+v, %v", bad, d, err)
		}
	}
}

func TestOrderBounds(t *testing.T) {
	for name, spoil := range map[string]func(*handoff.Order){
		"n is":            func(o *handoff.Order) { o.N = 0 },
		"n is 129":        func(o *handoff.Order) { o.N = engine.MaxChoices + 1 },
		"logprobs is -2":  func(o *handoff.Order) { o.Logprobs = -2 },
		"prompt_logprobs": func(o *handoff.Order) { o.PromptLogprobs = 1 << 30 },
		"rows alone":      func(o *handoff.Order) { o.Rows, o.PromptLogprobs = true, 0 },
		"priority is 51":  func(o *handoff.Order) { o.Priority = 51 },
		"ttft is -1ns":    func(o *handoff.Order) { o.TTFT = -1 },
		"ttft is 1h0m0":   func(o *handoff.Order) { o.TTFT = time.Hour + 1 },
		"min_tokens":      func(o *handoff.Order) { o.MinTokens = -1 },
		"ticket 1 of 1":   func(o *handoff.Order) { o.Index = 1 },
		"ticket -1":       func(o *handoff.Order) { o.Index = -1 },
		"ticket 0 of 0":   func(o *handoff.Order) { o.Of = 0 },
		"of 100000":       func(o *handoff.Order) { o.Of = 100000 },
		"list":            func(o *handoff.Order) { o.StopTokens = make([]int32, 1<<17) },
		"temperature -1":  func(o *handoff.Order) { o.Sampling.Temperature = -1 },
		"top_p 1.5":       func(o *handoff.Order) { o.Sampling.TopP = 1.5 },
		"min_p 2":         func(o *handoff.Order) { o.Sampling.MinP = 2 },
		"repetition -1":   func(o *handoff.Order) { o.Sampling.Repetition = -1 },
		"a grammar":       func(o *handoff.Order) { o.Guide.Text = strings.Repeat("x", handoff.MaxGrammar+1) },
		"a mark of 257":   func(o *handoff.Order) { o.Guide.Begin = strings.Repeat("x", 257) },
		"of kind":         func(o *handoff.Order) { o.Guide.Kind = strings.Repeat("x", 257) },
		"thinks is":       func(o *handoff.Order) { o.Guide.Thinks = "often" },
		"bytes":           func(o *handoff.Order) { o.Salt = strings.Repeat("x", 5<<20) },
	} {
		o := order()
		spoil(o)
		b, err := o.Encode()
		if err != nil {
			t.Fatal(err)
		}
		if got, err := handoff.ParseOrder(b); err == nil || !strings.Contains(err.Error(), name) || got != nil {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
	for _, s := range []string{"", "null", "[]", `{"n":"1"}`, `{"n":1,"of":1,"sampling":{"temperature":1e60}}`, `{"n":1`} {
		if got, err := handoff.ParseOrder([]byte(s)); err == nil {
			t.Errorf("%q: %+v", s, got)
		}
	}
}

// TestDraftGuided: first tokens that an older prefill drew without the guide count for nothing; one that
// cannot follow it sends none. The largest grammar fits an order, whatever its characters.
func TestDraftGuided(t *testing.T) {
	f := func(change func(*handoff.Draft), first int) {
		t.Helper()
		d := draft()
		change(d)
		b, err := d.Encode()
		if err != nil {
			t.Fatal(err)
		}
		got, err := handoff.ParseDraft(b, order(), false, 3, 10)
		if err != nil || len(got.First) != first {
			t.Errorf("%+v, %v: want %d first tokens", got, err, first)
		}
	}
	f(func(*handoff.Draft) {}, 2)
	f(func(d *handoff.Draft) { d.Guided = false }, 0)
	f(func(d *handoff.Draft) { d.First, d.Guided = nil, false }, 0)
	o := order()
	o.Guide.Text = strings.Repeat("\x01", handoff.MaxGrammar)
	b, err := o.Encode()
	if err != nil {
		t.Fatal(err)
	}
	if got, err := handoff.ParseOrder(b); err != nil || got.Guide.Text != o.Guide.Text {
		t.Errorf("%d bytes: %v", len(b), err)
	}
}

func TestDraftBounds(t *testing.T) {
	for name, spoil := range map[string]func(*handoff.Draft){
		"1 first tokens":       func(d *handoff.Draft) { d.First = d.First[:1] },
		"3 first tokens":       func(d *handoff.Draft) { d.First = append(d.First, d.First...)[:3] },
		"1 prompt log":         func(d *handoff.Draft) { d.Prompt = d.Prompt[:1] },
		"4 of 3 tokens":        func(d *handoff.Draft) { d.Cached = 4 },
		"-1 of 3":              func(d *handoff.Draft) { d.Cached = -1 },
		"us queued":            func(d *handoff.Draft) { d.QueueUS = -1 },
		"us computed":          func(d *handoff.Draft) { d.ComputeUS = math.MaxInt64 },
		"choice 0":             func(d *handoff.Draft) { d.First[0].Token = 10 },
		"choice 1":             func(d *handoff.Draft) { d.First[1].Self.ID = -1 },
		"choice 0 has":         func(d *handoff.Draft) { d.First[0].Top[0].ID = 99 },
		"choice 0 has a token": func(d *handoff.Draft) { d.First[0].Top = append(d.First[0].Top, d.First[0].Top...) },
		"prompt position 1":    func(d *handoff.Draft) { d.Prompt[0].Self.ID = 77 },
		"prompt position 2":    func(d *handoff.Draft) { d.Prompt[1].Top = make([]kernels.TokenLogprob, 1) },
		"bytes":                func(d *handoff.Draft) { d.Prompt = make([]kernels.PromptLogprob, 1000) },
	} {
		d := draft()
		spoil(d)
		b, err := d.Encode()
		if err != nil {
			t.Fatal(err)
		}
		if got, err := handoff.ParseDraft(b, order(), false, 3, 10); err == nil || !strings.Contains(err.Error(), name) || got != nil {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
}

// TestRowsDraft: who asks for rows alone needs no first tokens, nobody else does without.
func TestRowsDraft(t *testing.T) {
	b, err := (&handoff.Draft{Cached: 2}).Encode()
	if err != nil {
		t.Fatal(err)
	}
	for _, rows := range []bool{true, false} {
		o := &handoff.Order{N: 2, Logprobs: -1, PromptLogprobs: -1, Rows: rows}
		if d, err := handoff.ParseDraft(b, o, false, 3, 10); (err == nil) != rows || rows && (len(d.First) > 0 || d.Cached != 2) {
			t.Errorf("rows alone %t: %+v, %v", rows, d, err)
		}
	}
}

// TestLeaseDraft: a lease has no first tokens, and prompt log probabilities
// only if prefill was asked for them.
func TestLeaseDraft(t *testing.T) {
	f := func(d *handoff.Draft, promptLogprobs int, want bool) {
		t.Helper()
		o := order()
		o.PromptLogprobs = promptLogprobs
		b, err := d.Encode()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := handoff.ParseDraft(b, o, true, 3, 10); (err == nil) != want {
			t.Errorf("%s: %v", b, err)
		}
	}
	f(&handoff.Draft{Cached: 2}, -1, true)
	f(&handoff.Draft{}, 0, true)
	f(&handoff.Draft{Prompt: draft().Prompt}, 0, true)
	f(&handoff.Draft{Prompt: draft().Prompt}, -1, false)
	f(draft(), 0, false)
}

// TestNotANumber: what a broken model yields is an error, not a panic.
func TestNotANumber(t *testing.T) {
	d := draft()
	d.First[0].Self.Logprob = float32(math.NaN())
	if b, err := d.Encode(); err == nil {
		t.Errorf("%s", b)
	}
}

// FuzzOrder: what parses is in bounds, and encodes to what parses to the same.
func FuzzOrder(f *testing.F) {
	b, _ := order().Encode()
	f.Add(b)
	f.Add([]byte(`{"n":1,"of":1,"logprobs":-1,"prompt_logprobs":-1}`))
	f.Add([]byte(`{"n":1,"of":1,"logprobs":-1,"prompt_logprobs":-1,"peers":[{"id":"d","epoch":1,"kv":"h:1","tokens":64},{"id":"e","epoch":2,"url":"http://h:2","kv":"h:3","tokens":640}]}`))
	f.Add([]byte(`{"cached":true,"salt":"s","logprobs":-1,"prompt_logprobs":-1}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		o, err := handoff.ParseOrder(b)
		if err != nil {
			return
		}
		again, err := o.Encode()
		if err != nil {
			t.Fatal(err)
		}
		o2, err := handoff.ParseOrder(again)
		if err != nil {
			t.Fatalf("%s: %v", again, err)
		}
		if third, _ := o2.Encode(); string(third) != string(again) {
			t.Errorf("%s\n%s", again, third)
		}
		for _, p := range o.Peers {
			if len(o.Peers) > 4 || o.Cached || p.Validate() != nil {
				t.Errorf("%+v", o.Peers)
			}
		}
	})
}

// FuzzDraft: no bytes make it panic, and what parses fits the order.
func FuzzDraft(f *testing.F) {
	b, _ := draft().Encode()
	f.Add(b, 2, 3, true)
	f.Add([]byte(`{"first":[]}`), 0, 1, false)
	f.Add([]byte(`{"first":[],"cached":1}`), 2, 1, true)
	f.Fuzz(func(t *testing.T, b []byte, n, tokens int, guided bool) {
		o := order()
		o.N, o.PromptLogprobs = n&127, -1
		if !guided {
			o.Guide = nil
		}
		tokens = 1 + tokens&1023
		d, err := handoff.ParseDraft(b, o, false, tokens, 10)
		if err != nil {
			return
		}
		drawn := len(d.First) == o.N || guided && len(d.First) == 0 // a guide that prefill cannot follow
		if !drawn || d.Cached > tokens || len(d.Prompt) > 0 {
			t.Errorf("%+v", d)
		}
	})
}
