package engine_test

import (
	"errors"
	"slices"
	"testing"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/enginetest"
)

// TestAllowed: nothing else is drawn, before and after min_tokens; EOS neither, unless it is allowed.
func TestAllowed(t *testing.T) {
	r := newRig(t, config(), enginetest.Config{}, nil)
	p := prompt(rng(), 20)
	eos := config().EOS[0]
	for name, f := range map[string]func(*engine.Request){
		"alone":      func(*engine.Request) {},
		"choices":    func(r *engine.Request) { r.N = 4 },
		"penalties":  func(r *engine.Request) { r.Frequency = 2 },
		"min tokens": func(r *engine.Request) { r.MinTokens = 10; r.Allowed = append(r.Allowed, eos) },
		"one":        func(r *engine.Request) { r.Allowed = []int32{7} },
		"and no 7":   func(r *engine.Request) { r.BadWords = [][]int32{{7}} },
		"not twice":  func(r *engine.Request) { r.BadWords = [][]int32{{5, 5}, {7, 7}} },
		"against":    func(r *engine.Request) { r.Allowed, r.BadWords = []int32{7}, [][]int32{{7, 7}} },
	} {
		req := request(p, 30)
		req.Temperature, req.Allowed = 1, []int32{5, 7, 9, 7}
		f(req)
		for _, o := range r.generate(req) {
			for i, id := range o.tokens {
				if !slices.Contains(req.Allowed, id) || id == eos && i < req.MinTokens-1 {
					t.Errorf("%s: token %d of %v", name, i, o.tokens)
				}
				if name == "and no 7" && id == 7 || name == "not twice" && i > 0 && id == o.tokens[i-1] && id != 9 {
					t.Errorf("%s: %v", name, o.tokens)
				}
			}
		}
	}
}

// TestBadWords: with a word of the answer forbidden, the answer has it no more, and is the same up to
// there.
func TestBadWords(t *testing.T) {
	r := newRig(t, config(), enginetest.Config{}, nil)
	req := request(prompt(rng(), 20), 40)
	req.IgnoreEOS = true
	first := r.generate(req)[0].tokens
	for n := 1; n <= 4; n++ {
		word := first[10 : 10+n]
		again := *req
		again.BadWords = [][]int32{word}
		got := r.generate(&again)[0].tokens
		for i := range len(got) - n + 1 {
			if slices.Equal(got[i:i+n], word) {
				t.Errorf("%v is in %v", word, got)
			}
		}
		at := 0
		for i := range first {
			if slices.Equal(first[i:min(i+n, len(first))], word) {
				at = i
				break
			}
		}
		if !slices.Equal(got[:at+n-1], first[:at+n-1]) {
			t.Errorf("without %v: %v, before %v", word, got, first)
		}
	}
}

// TestLogprobIDs: these are listed, once each, and the token itself.
func TestLogprobIDs(t *testing.T) {
	r := newRig(t, config(), enginetest.Config{}, nil)
	req := request(prompt(rng(), 9), 12)
	req.IgnoreEOS, req.Logprobs = true, 48
	all := r.generate(req)[0]
	some := *req
	some.Logprobs, some.LogprobIDs = 0, []int32{40, 3, 40}
	for i, s := range r.generate(&some)[0].sampled {
		want := []int32{40, 3}
		if s.Token != 40 && s.Token != 3 {
			want = []int32{s.Token, 40, 3}
		}
		if len(s.Top) != len(want) {
			t.Fatalf("token %d, %d: %v", i, s.Token, s.Top)
		}
		for j, top := range s.Top {
			if top.ID != want[j] || top.ID != s.Token && !slices.Contains(all.sampled[i].Top, top) {
				t.Errorf("token %d: %v, all are %v", i, s.Top, all.sampled[i].Top)
			}
		}
	}
}

// TestBadShape: what no draw could satisfy, and tokens that there are none of.
func TestBadShape(t *testing.T) {
	r := newRig(t, config(), enginetest.Config{}, nil)
	eos := config().EOS[0]
	for name, c := range map[string]struct {
		field string
		set   func(*engine.Request)
	}{
		"allowed beyond":    {"allowed_token_ids", func(r *engine.Request) { r.Allowed = []int32{48} }},
		"negative":          {"allowed_token_ids", func(r *engine.Request) { r.Allowed = []int32{-1} }},
		"word beyond":       {"bad_words", func(r *engine.Request) { r.BadWords = [][]int32{{1, 48}} }},
		"empty word":        {"bad_words", func(r *engine.Request) { r.BadWords = [][]int32{{}} }},
		"listed beyond":     {"logprob_token_ids", func(r *engine.Request) { r.LogprobIDs = []int32{48} }},
		"all are bad":       {"allowed_token_ids", func(r *engine.Request) { r.Allowed, r.BadWords = []int32{3, 4}, [][]int32{{4}, {3}} }},
		"only an early end": {"allowed_token_ids", func(r *engine.Request) { r.Allowed, r.MinTokens = []int32{eos}, 2 }},
		"or a stop":         {"allowed_token_ids", func(r *engine.Request) { r.Allowed, r.StopTokens, r.MinTokens = []int32{3, eos}, []int32{3}, 2 }},
	} {
		req := request([]int32{1, 2}, 5)
		c.set(req)
		var bad *engine.RequestError
		if err := r.Check(req); !errors.As(err, &bad) || bad.Field != c.field {
			t.Errorf("%s: %v", name, err)
		}
	}
}
