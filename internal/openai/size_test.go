package openai_test

import (
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/openai"
)

// drawn is a random vocabulary, some of it parts of characters.
func drawn(r *rand.Rand) *vocab {
	v := &vocab{}
	const alphabet = "ab \"\\\n\t\x00\x1f\x7fé界🙂"
	for range 1 + r.IntN(40) {
		var raw []byte
		for range r.IntN(12) {
			if r.IntN(4) == 0 {
				raw = append(raw, byte(r.Uint32()))
			} else {
				all := []rune(alphabet)
				raw = append(raw, string(all[r.IntN(len(all))])...)
			}
		}
		v.add(strings.ToValidUTF8(string(raw), "\uFFFD"), raw)
	}
	v.bytes[0] = nil // an id without a token
	v.text[0] = ""
	return v
}

func (v *vocab) entries(r *rand.Rand, n, top int) []openai.TokenLogprob {
	one := func() openai.TopLogprob {
		lps := []float32{0, -1.23456789e-6, -9.87654321e-7, -1e-30, -0.12345678, -12.345678, -9998.999, float32(math.Inf(-1)), float32(math.NaN())}
		return openai.TopLogprob{ID: int32(r.IntN(len(v.text))), Logprob: lps[r.IntN(len(lps))]}
	}
	out := make([]openai.TokenLogprob, n)
	for i := range out {
		out[i] = openai.TokenLogprob{TopLogprob: one(), None: r.IntN(20) == 0, Offset: math.MaxInt32}
		for range top {
			out[i].Top = append(out[i].Top, one())
		}
	}
	return out
}

// checkSize draws a request, and an answer to it as a worker would make it.
func checkSize(t *testing.T, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 1))
	v := drawn(r)
	sizes := openai.MeasureTokens(v, len(v.text))
	s := openai.Shape{Chat: r.IntN(2) == 0, IDs: r.IntN(2) == 0, Tokens: r.IntN(60), Logprobs: r.IntN(6) - 1, PromptLogprobs: -1, Prompt: r.IntN(40)}
	if r.IntN(3) == 0 {
		s.PromptLogprobs = r.IntN(5)
	}
	if s.Chat {
		s.Reasons = r.IntN(2) == 0
		if r.IntN(2) == 0 {
			s.Calls, s.Held = r.IntN(5), r.IntN(100)
		}
	}
	if r.IntN(2) == 0 {
		s.Stop = strings.Repeat("\x01", r.IntN(30))
	}
	prompt := make([]int32, s.Prompt)
	for i := range prompt {
		prompt[i] = int32(r.IntN(len(v.text)))
	}
	if !s.Chat && r.IntN(2) == 0 {
		s.Echo = true
		for _, id := range prompt {
			s.Text += v.text[id]
		}
	}
	choices := make([]openai.Choice, 1+r.IntN(4))
	total := openai.MaxHead
	for i := range choices {
		c := &choices[i]
		c.Index, c.Finish, c.Role = 4095, "content_filter", true
		raw := ""
		for range s.Tokens {
			id := int32(r.IntN(len(v.text)))
			raw += string(v.bytes[id])
			c.TokenIDs = append(c.TokenIDs, id)
		}
		var text strings.Builder // as a tokenizer that makes each bad byte a U+FFFD
		for _, c := range raw {
			text.WriteRune(c)
		}
		switch c.Text = text.String(); {
		case s.Calls > 0: // all of it is a tag's value, and JSON of that
			once := openai.AppendString(nil, c.Text)
			c.Text = ""
			for i := range s.Calls {
				c.Calls = append(c.Calls, openai.ToolCall{Index: i, ID: "call_123456789012345678901234"})
			}
			c.Calls[0].Arguments = string(once[1 : len(once)-1])
		case s.Reasons:
			c.Text, c.Reasoning = "", c.Text
		}
		if s.Echo {
			c.Text = s.Text + c.Text
		}
		if s.Logprobs >= 0 {
			c.Logprobs = v.entries(r, s.Tokens, s.Logprobs)
			if s.Echo {
				c.Echo = v.entries(r, s.Prompt, s.Logprobs)
			}
		}
		if s.PromptLogprobs >= 0 {
			c.PromptLogprobs = v.entries(r, s.Prompt, s.PromptLogprobs)
		}
		if s.IDs {
			c.PromptTokenIDs = prompt
		}
		c.StopString = s.Stop
		total += s.Size(&sizes)
	}
	usage := openai.Usage{Prompt: math.MaxInt32, Completion: math.MaxInt32, Cached: math.MaxInt32}
	meta := openai.Meta{ID: "cmpl-" + strings.Repeat("\"", 256), Model: strings.Repeat("m", 500), Created: math.MaxInt64, Chat: s.Chat,
		IncludeUsage: true, ReturnTokenIDs: s.IDs, TokensAsIDs: r.IntN(2) == 0, Vocab: v}
	enc := openai.NewEncoder(meta)
	whole := enc.AppendFull(nil, choices, usage)
	if len(whole) > total {
		t.Errorf("seed %d: %d bytes, estimated %d: %+v %+v", seed, len(whole), total, s, sizes)
	}
	var pieces []byte
	if err := enc.WriteFull(func(b []byte) error { pieces = append(pieces, b...); return nil }, choices, usage); err != nil || string(pieces) != string(whole) {
		t.Errorf("seed %d: in pieces it is another answer (%v)", seed, err)
	}
	event := enc.AppendChunk(nil, &choices[0], &usage)
	if most := s.EventSize(&sizes, s.Tokens); len(event) > most {
		t.Errorf("seed %d: an event of %d bytes, estimated %d: %+v", seed, len(event), most, s)
	}
	// A count that fits does, and one more might not.
	size := s.Size(&sizes)
	if n := s.Fits(&sizes, size); n != s.Tokens {
		t.Errorf("seed %d: of %d tokens %d fit into their size", seed, s.Tokens, n)
	}
}

// TestSizeIsNeverLess: no answer takes more than was said before it was made.
func TestSizeIsNeverLess(t *testing.T) {
	for seed := range uint64(500) {
		checkSize(t, seed)
	}
}

func FuzzSize(f *testing.F) {
	f.Add(uint64(1))
	f.Add(uint64(1747)) // a vocabulary without any text
	f.Fuzz(checkSize)
}

// TestSizeIsCloseToo: where all tokens are the longest one, the estimate is not
// far off: it must not refuse what fits.
func TestSizeIsCloseToo(t *testing.T) {
	v := &vocab{}
	id := v.add(" token", []byte(" token"))
	sizes := openai.MeasureTokens(v, 1)
	f := func(s openai.Shape) {
		t.Helper()
		lps := make([]openai.TokenLogprob, s.Tokens)
		for i := range lps {
			lps[i] = openai.TokenLogprob{TopLogprob: openai.TopLogprob{ID: id, Logprob: -0.12345678}, Offset: int32(6 * i)}
			for range s.Logprobs {
				lps[i].Top = append(lps[i].Top, lps[i].TopLogprob)
			}
		}
		c := []openai.Choice{{Text: strings.Repeat(" token", s.Tokens), Finish: "length"}}
		if s.Logprobs >= 0 {
			c[0].Logprobs = lps
		}
		got := len(openai.NewEncoder(openai.Meta{Chat: s.Chat, Vocab: v}).AppendFull(nil, c, openai.Usage{}))
		if most := openai.MaxHead + s.Size(&sizes); got > most || float64(got) < 0.6*float64(most) {
			t.Errorf("%d bytes, estimated %d: %+v", got, most, s)
		}
	}
	f(openai.Shape{Tokens: 10_000, Logprobs: -1, PromptLogprobs: -1})
	f(openai.Shape{Tokens: 10_000, Logprobs: 0, PromptLogprobs: -1, Chat: true})
	f(openai.Shape{Tokens: 2_000, Logprobs: 20, PromptLogprobs: -1, Chat: true})
	f(openai.Shape{Tokens: 10_000, Logprobs: 0, PromptLogprobs: -1})
}

// TestSurely: a router's guess is below every model's bound.
func TestSurely(t *testing.T) {
	f := func(body string, want int) {
		t.Helper()
		top, err := openai.Scan([]byte(body))
		if err != nil {
			t.Fatal(err)
		}
		if n := top.Surely(0); n < want/2 || n > 2*want {
			t.Errorf("%s: %d, want about %d", body, n, want)
		}
	}
	f(`{"prompt":"x"}`, 0)
	f(`{"prompt":"x","max_tokens":1000}`, 1000)
	f(`{"prompt":["x","y"],"n":128,"max_tokens":100,"logprobs":20}`, 4*64*100*570)
	f(`{"messages":[],"max_tokens":100,"logprobs":true,"top_logprobs":20}`, 100*900)
	f(`{"messages":[],"max_completion_tokens":2147483647,"n":128,"logprobs":true,"top_logprobs":20}`, 1<<24*128*860)
	f(`{"messages":[],"max_tokens":100,"logprobs":false}`, 100)
	for body, want := range map[string]int{`{"prompt":"x","max_tokens":1000}`: 997, `{"messages":[],"max_tokens":1000}`: 0, `{"messages":[],"max_tokens":900}`: 900} {
		if top, _ := openai.Scan([]byte(body)); top.Surely(2000) != top.Surely(0) || top.Surely(1000)*top.MaxTokens != top.Surely(0)*want {
			t.Errorf("%s: %d where 1000 tokens are", body, top.Surely(1000))
		}
	}
	least := &vocab{}
	least.add("a", nil)
	sizes := openai.MeasureTokens(least, 1)
	for body, s := range map[string]openai.Shape{
		`{"prompt":"x","max_tokens":7}`:                                                  {Logprobs: -1},
		`{"prompt":["x","y"],"n":3,"max_tokens":7,"logprobs":2}`:                         {Logprobs: 2},
		`{"messages":[],"max_tokens":7,"logprobs":true,"top_logprobs":4}`:                {Logprobs: 4, Chat: true},
		`{"messages":[],"n":2,"max_completion_tokens":7,"logprobs":true}`:                {Logprobs: 0, Chat: true},
		`{"messages":[],"max_completion_tokens":7,"logprobs":false,"top_logprobs":null}`: {Logprobs: -1, Chat: true},
	} {
		top, err := openai.Scan([]byte(body))
		if err != nil {
			t.Fatal(err)
		}
		s.PromptLogprobs = -1
		none := s.Size(&sizes)
		s.Tokens = 7
		if n, want := top.Surely(0), top.N*top.Prompts*(s.Size(&sizes)-none); n != want {
			t.Errorf("%s: %d, of the smallest model %d", body, n, want)
		}
	}
}

// TestMeasuredText: what a token's bytes take in a text at most, each as U+FFFD where they are no
// character by themselves.
func TestMeasuredText(t *testing.T) {
	for raw, want := range map[string]int{"": 1, "ab": 2, "é": 2, "\n": 2, "\xff": 3, "\xff\xfe": 6, "\xe7\x95": 6, "a\xff": 4, "\"\xff": 5} {
		v := &vocab{}
		v.add("x", []byte(raw))
		if got := openai.MeasureTokens(v, 1).Text; got != want {
			t.Errorf("%q: %d bytes, want %d", raw, got, want)
		}
	}
}
