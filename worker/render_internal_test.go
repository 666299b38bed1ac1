package worker

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/internal/answer"
	"github.com/xpyd/xpyd/internal/model"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/tokenizer"
	"github.com/xpyd/xpyd/kernels"
)

// renderer is as much of a worker as rendering needs.
func renderer(t testing.TB) *Worker { t.Helper(); return rendererOf(t, "") }

// rendererOf has the model at a path.
func rendererOf(t testing.TB, path string) *Worker {
	t.Helper()
	m, err := model.Open(t.Context(), path, model.Options{Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	tok, err := loadTokenizer(m)
	if err != nil {
		t.Fatal(err)
	}
	return &Worker{model: m, tok: tok, eos: ends(m, tok)}
}

// bytesOf are the ids of a text's bytes: the vocabulary has each byte at 3.
func bytesOf(s string) []int32 {
	ids := make([]int32, len(s))
	for i := range len(s) {
		ids[i] = 3 + int32(s[i])
	}
	return ids
}

func newTestJob(change func(*job)) *job {
	j := &job{Sampling: openai.Sampling{N: 1, SkipSpecial: true}, logprobs: -1, items: []item{{tokens: []int32{1}}}}
	if change != nil {
		change(j)
	}
	return j
}

// play pushes ids into a choice and takes what is ready after each, like a stream.
func play(c *choice, ids []int32, last engine.Finish) (chunks []openai.Choice, cancelled bool) {
	for i, id := range ids {
		e := &engine.Event{Index: i, Sampled: kernels.Sampled{Token: id, Self: kernels.TokenLogprob{ID: id, Logprob: -1}}}
		if i == len(ids)-1 {
			e.Finish = last
		}
		cancelled = c.addToken(e) || cancelled
		if c.ready() {
			out := c.takeChunk()
			c.sent = c.done
			out.TokenIDs, out.Logprobs = slices.Clone(out.TokenIDs), slices.Clone(out.Logprobs)
			chunks = append(chunks, out)
		}
	}
	return chunks, cancelled
}

// TestText: what is emitted when, and why a choice ends.
func TestText(t *testing.T) {
	w := renderer(t)
	const eos = 2
	for _, c := range []struct {
		name   string
		change func(*job)
		ids    []int32
		last   engine.Finish
		want   string // the chunks, then the reason
		cancel bool
	}{
		{"plain", nil, bytesOf("ab"), engine.FinishLength, "a|b length", false},
		{"eos", nil, append(bytesOf("ab"), eos), engine.FinishStop, "a|b| stop", false},
		{"eos at once", nil, []int32{eos}, engine.FinishStop, " stop", false},
		{"eos drawn before min_tokens is over", func(j *job) { j.SkipSpecial = false }, append(bytesOf("a"), eos, 3+'b'), engine.FinishLength, "a|</s>|b length", false},
		{"character of 4 tokens", nil, bytesOf("a🙂b"), engine.FinishLength, "a|🙂|b length", false},
		{"half a character", nil, bytesOf("a\xf0\x9f"), engine.FinishLength, "a|\ufffd\ufffd length", false},
		{"stop", func(j *job) { j.Stop = []string{"cd"} }, bytesOf("abcde"), "", "a|b| stop:cd", true},
		{"stop at the last token", func(j *job) { j.Stop = []string{"cd"} }, bytesOf("bcd"), engine.FinishLength, "b| stop:cd", false},
		{"stop held in vain", func(j *job) { j.Stop = []string{"cd"} }, bytesOf("acbc"), engine.FinishLength, "a|cb|c length", false},
		{"stop in the held-back bytes", func(j *job) { j.Stop = []string{"\ufffd"} }, bytesOf("a\xf0"), engine.FinishLength, "a| stop:\ufffd", false},
		{"stop included", func(j *job) { j.Stop, j.IncludeStop = []string{"cd"}, true }, bytesOf("bcde"), "", "b|cd stop:cd", true},
		{"stop before min_tokens", func(j *job) { j.Stop, j.MinTokens = []string{"b"}, 2 }, bytesOf("abab"), "", "a|b|a| stop:b", true},
		{"stop begun before min_tokens", func(j *job) { j.Stop, j.MinTokens = []string{"bc"}, 2 }, bytesOf("abc"), "", "a| stop:bc", true},
		{"stop of several characters", func(j *job) { j.Stop = []string{"é🙂"} }, bytesOf("aé🙂"), "", "a| stop:é🙂", true},
		{"stop token", func(j *job) { j.StopTokenIDs = []int32{3 + 'c'} }, bytesOf("abc"), engine.FinishStop, "a|b| stop:#102", false},
		{"stop token included", func(j *job) { j.StopTokenIDs, j.IncludeStop = []int32{3 + 'c'}, true }, bytesOf("abc"), engine.FinishStop, "a|b|c stop:#102", false},
		{"eos is a stop token", func(j *job) { j.StopTokenIDs = []int32{eos} }, append(bytesOf("a"), eos), engine.FinishStop, "a| stop", false},
		{"and only that", func(j *job) { j.StopTokenIDs, j.IgnoreEOS = []int32{eos}, true }, append(bytesOf("a"), eos), engine.FinishStop, "a| stop:#2", false},
		{"echo", func(j *job) { j.echo, j.items[0].text = true, "P " }, bytesOf("ab"), engine.FinishLength, "P a|b length", false},
		{"echo does not stop", func(j *job) { j.echo, j.items[0].text, j.Stop = true, "P.", []string{"."} }, bytesOf("a."), "", "P.a| stop:.", true},
		{"echo only", func(j *job) { j.echo, j.items[0].text, j.MaxTokens = true, "P", new(int) }, bytesOf("a"), engine.FinishLength, "P length", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			j := newTestJob(c.change)
			chunks, cancelled := play(newChoice(w, j, &j.items[0], 0), c.ids, c.last)
			var texts []string
			for _, k := range chunks {
				texts = append(texts, k.Text)
			}
			end := chunks[len(chunks)-1]
			got := strings.Join(texts, "|") + " " + end.Finish
			if end.StopString != "" {
				got += ":" + end.StopString
			}
			if end.StopToken > 0 {
				got += fmt.Sprintf(":#%d", end.StopToken-1)
			}
			if got != c.want || cancelled != c.cancel {
				t.Errorf("got %q, cancelled %t; want %q, %t", got, cancelled, c.want, c.cancel)
			}
			for _, k := range chunks[:len(chunks)-1] {
				if k.Finish != "" {
					t.Errorf("a chunk before the last has finish %q", k.Finish)
				}
			}
		})
	}
}

// TestLogprobs: each token's entry goes out with or before its text, offsets
// count characters, and the prompt's come first with echo.
func TestLogprobs(t *testing.T) {
	w := renderer(t)
	lp := func(id int32) kernels.PromptLogprob {
		top := kernels.TokenLogprob{ID: id, Logprob: -2}
		return kernels.PromptLogprob{Self: top, Top: []kernels.TokenLogprob{top, top, top}}
	}
	j := newTestJob(func(j *job) {
		j.logprobs, j.echo, j.ReturnTokenIDs = 2, true, true
		j.PromptLogprobs = new(int)
		*j.PromptLogprobs = 3
		j.items[0] = item{tokens: append([]int32{1}, bytesOf("éx")...), text: "éx"}
		j.items[0].info = &engine.PromptInfo{CachedTokens: 2, Logprobs: []kernels.PromptLogprob{lp(198), lp(172), lp(123)}}
	})
	c := newChoice(w, j, &j.items[0], 3)
	chunks, _ := play(c, bytesOf("yéz"), engine.FinishLength)
	if len(chunks) != 3 {
		t.Fatalf("%d chunks", len(chunks))
	}
	var offsets, entries []int
	for _, k := range chunks {
		all := append(slices.Clone(k.Echo), k.Logprobs...)
		entries = append(entries, len(all))
		for _, l := range all {
			offsets = append(offsets, int(l.Offset))
		}
	}
	if want := []int{5, 2, 1}; !slices.Equal(entries, want) {
		t.Errorf("entries %v, want %v", entries, want)
	}
	if !slices.IsSorted(offsets) || offsets[0] != 0 {
		t.Errorf("offsets %v", offsets)
	}
	first := chunks[0]
	if !first.Echo[0].None || first.Echo[1].None || len(first.Echo[1].Top) != 2 || first.Echo[1].Logprob != -2 {
		t.Errorf("prompt %+v", first.Echo)
	}
	if len(first.PromptLogprobs) != 4 || len(first.PromptLogprobs[1].Top) != 3 || chunks[1].PromptLogprobs != nil {
		t.Errorf("prompt_logprobs %+v", first.PromptLogprobs)
	}
	if !slices.Equal(first.PromptTokenIDs, j.items[0].tokens) || chunks[1].PromptTokenIDs != nil || !slices.Equal(chunks[1].TokenIDs, bytesOf("é")) {
		t.Errorf("ids %v %v", first.PromptTokenIDs, chunks[1].TokenIDs)
	}
	if u := c.usage(); u != (openai.Usage{Prompt: 4, Completion: 4, Cached: 2}) {
		t.Errorf("%+v", u)
	}
	if first.Index != 3 || !first.Role || chunks[1].Role {
		t.Errorf("index %d", first.Index)
	}
	j = newTestJob(func(j *job) { j.logprobs = 0 })
	chunks, _ = play(newChoice(w, j, &j.items[0], 0), bytesOf("a"), engine.FinishLength)
	if own := chunks[0].Logprobs; len(own) != 1 || own[0].Logprob != -1 || len(own[0].Top) != 0 {
		t.Errorf("of the token alone: %+v", own)
	}
}

// TestMarksShown: special tokens that are marks of calls are read though special tokens are skipped, and
// without tools they are skipped as ever.
func TestMarksShown(t *testing.T) {
	raw, err := os.ReadFile("../internal/model/stories260k/tokenizer.json")
	if err != nil {
		t.Fatal(err)
	}
	raw = bytes.Replace(raw, []byte(`"added_tokens":`), []byte(`"x":`), 1)
	raw = append(bytes.TrimRight(raw, "} \n"), `},"added_tokens":[{"id":1,"content":"<s>","special":true},{"id":2,"content":"</s>","special":true},
		{"id":512,"content":"[TOOL_CALLS]","special":true},{"id":513,"content":"<|other|>","special":true}]}`...)
	tok, err := tokenizer.FromJSON(raw, nil)
	if err == nil {
		tok, err = tok.WithChatTemplate("which shows nothing")
	}
	if err != nil {
		t.Fatal(err)
	}
	w := &Worker{tok: tok, eos: []int32{2}}
	w.formats = formatsOf(&Compute{ToolParser: parserAuto, ReasoningParser: parserAuto}, tok)
	ids := slices.Concat([]int32{513, 512}, bytesOf(`[{"name":"f","arguments":{}}]`), []int32{513}, bytesOf("!"))
	f := func(tools bool, text, calls string) {
		t.Helper()
		j := newTestJob(func(j *job) { j.chat = true })
		c := &openai.Chat{Sampling: openai.Sampling{Stream: true}}
		var offered *answer.Tools
		if tools {
			offered = answer.ReadTools([]json.RawMessage{json.RawMessage(`{"function":{"name":"f"}}`)})
		}
		w.read(j, c, offered, "")
		chunks, _ := play(newChoice(w, j, &j.items[0], 0), ids, engine.FinishLength)
		haveText, haveCalls := "", ""
		for _, k := range chunks {
			haveText += k.Text
			for _, call := range k.Calls {
				haveCalls += call.Name + call.Arguments
				if call.ID != "" && len(call.ID) != 9 {
					t.Errorf("id %q", call.ID)
				}
			}
		}
		if haveText != text || haveCalls != calls {
			t.Errorf("tools %t: %q, %q", tools, haveText, haveCalls)
		}
	}
	f(true, "!", "f{}")
	f(false, `[{"name":"f","arguments":{}}]!`, "")
}

// TestChoiceMemory: what a request says once is not kept once a choice: stop strings,
// and the prompt's log probabilities with echo.
func TestChoiceMemory(t *testing.T) {
	w := renderer(t)
	j := newTestJob(func(j *job) {
		for i := range 16 {
			j.Stop = append(j.Stop, fmt.Sprint(i, strings.Repeat("z", 1000)))
		}
		j.echo, j.logprobs = true, 20
		info := &engine.PromptInfo{Logprobs: make([]kernels.PromptLogprob, 500)}
		for i := range info.Logprobs {
			info.Logprobs[i].Top = make([]kernels.TokenLogprob, 20)
		}
		j.items[0] = item{tokens: make([]int32, 501), info: info}
	})
	var out []openai.Choice
	made := func() {
		c := newChoice(w, j, &j.items[0], 0)
		c.addToken(&engine.Event{Sampled: kernels.Sampled{Token: 403}, Finish: engine.FinishLength})
		out = append(out, c.takeChunk())
	}
	made()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	const n = 1000
	for range n {
		made()
	}
	runtime.ReadMemStats(&after)
	if each := (after.TotalAlloc - before.TotalAlloc) / n; each > 4096 {
		t.Errorf("%d bytes a choice", each)
	}
	if last := &out[n]; len(last.Echo) != 501 || len(last.Logprobs) != 1 || !last.Echo[0].None || len(last.Echo[500].Top) != 20 {
		t.Errorf("%d and %d entries", len(last.Echo), len(last.Logprobs))
	}
}

// BenchmarkToken is the worker's part of one streamed token: render and encode.
func BenchmarkToken(b *testing.B) {
	w := renderer(b)
	id := w.tok.Encode("once", false)[0]
	for name, change := range map[string]func(*job){
		"text":     nil,
		"stop":     func(j *job) { j.Stop = []string{"zzz", "qqqq"} },
		"ids":      func(j *job) { j.ReturnTokenIDs = true },
		"logprobs": func(j *job) { j.logprobs = 5 },
		"frames":   func(j *job) { j.framed = true },
	} {
		b.Run(name, func(b *testing.B) {
			j := newTestJob(change)
			frames := j.newFrames(512)
			c := newChoice(w, j, &j.items[0], 0)
			enc := openai.NewEncoder(openai.Meta{ID: "cmpl-x", Model: "m", ReturnTokenIDs: j.ReturnTokenIDs, Vocab: w.tok})
			e := &engine.Event{Sampled: kernels.Sampled{Token: id, Self: kernels.TokenLogprob{ID: id, Logprob: -1, Rank: 1}}}
			for range max(j.logprobs, 0) {
				e.Sampled.Top = append(e.Sampled.Top, e.Sampled.Self)
			}
			var buf []byte
			b.ReportAllocs()
			for b.Loop() {
				c.addToken(e)
				buf = frames.append(buf[:0], c.index, c.ids, c.done)
				out := c.takeChunk()
				buf = enc.AppendChunk(buf, &out, nil)
			}
		})
	}
}

// TestTokenAllocations: one token's text is one allocation, its frame none.
func TestTokenAllocations(t *testing.T) {
	w := renderer(t)
	j := newTestJob(func(j *job) { j.framed = true })
	frames := j.newFrames(512)
	c := newChoice(w, j, &j.items[0], 0)
	enc := openai.NewEncoder(openai.Meta{ID: "cmpl-x", Model: "m"})
	e := &engine.Event{Sampled: kernels.Sampled{Token: w.tok.Encode("once", false)[0]}}
	buf := make([]byte, 0, 4096)
	if n := testing.AllocsPerRun(1000, func() {
		c.addToken(e)
		buf = frames.append(buf[:0], c.index, c.ids, c.done)
		out := c.takeChunk()
		buf = enc.AppendChunk(buf, &out, nil)
	}); n > 1 {
		t.Errorf("%v allocations a token", n)
	}
}
