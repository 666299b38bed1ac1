package bind_test

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/handoff"
	"github.com/xpyd/xpyd/internal/answer"
	"github.com/xpyd/xpyd/internal/bind"
	"github.com/xpyd/xpyd/kernels"
)

// toy is a tokenizer of a few texts, the longest of which is taken; special ones are in angle or other
// brackets that no text has but whole.
type toy struct {
	texts   []string
	special map[string]bool
}

const end = "<end>"

func newToy(special []string, texts ...string) *toy {
	t := &toy{special: map[string]bool{end: true}}
	t.texts = append([]string{end}, special...)
	for _, s := range special {
		t.special[s] = true
	}
	t.texts = append(t.texts, texts...)
	for c := byte(' '); c < 127; c++ {
		t.texts = append(t.texts, string(c))
	}
	t.texts = append(t.texts, "\n")
	return t
}

func (t *toy) VocabSize() int             { return len(t.texts) }
func (t *toy) TokenBytes(id int32) []byte { return []byte(t.texts[id]) }
func (t *toy) IsSpecial(id int32) bool    { return t.special[t.texts[id]] }

func (t *toy) Encode(text string, _ bool) (ids []int32) {
	for text != "" {
		best := -1
		for id, s := range t.texts {
			if strings.HasPrefix(text, s) && (best < 0 || len(s) > len(t.texts[best])) {
				best = id
			}
		}
		if best < 0 {
			panic("no token for " + text)
		}
		ids = append(ids, int32(best))
		text = text[len(t.texts[best]):]
	}
	return ids
}

func (t *toy) id(text string) int32 { return int32(slices.Index(t.texts, text)) }

func (t *toy) binder(think string) *bind.Binder {
	return bind.New(bind.Config{Tokenizer: t, Vocab: len(t.texts) + 5, Ends: []int32{0}, Think: answer.ThinkFormat(think), Bytes: 1 << 20})
}

// allowed lists the texts that may come next.
func (t *toy) allowed(g engine.Guide) (list []string) {
	mask := make([]uint32, kernels.MaskWords(len(t.texts)+5))
	for i := range mask {
		mask[i] = 0xdeadbeef
	}
	g.Mask(mask)
	for id := range len(mask) * 32 {
		if mask[id/32]>>(id%32)&1 == 0 {
			continue
		}
		if id >= len(t.texts) {
			list = append(list, "beyond the tokenizer")
			continue
		}
		list = append(list, t.texts[id])
	}
	return list
}

// says accepts texts, each of which is a token.
func (t *toy) says(tt *testing.T, g engine.Guide, texts ...string) {
	tt.Helper()
	for i, s := range texts {
		if id := t.id(s); id < 0 || !g.Accept(id) {
			tt.Fatalf("%q of %q is not accepted; %q is allowed", s, texts[:i+1], t.allowed(g))
		}
	}
}

// agrees checks that a guide accepts what its mask allows and nothing else, and stays where it does not.
func (t *toy) agrees(tt *testing.T, g engine.Guide) {
	tt.Helper()
	may := t.allowed(g)
	if only, ok := g.(engine.Forcer).Forced(); ok && !slices.Equal(may, []string{t.texts[only]}) {
		tt.Errorf("%q is forced where %q may come", t.texts[only], may)
	}
	for id, text := range t.texts {
		f := g.Fork()
		if f.Accept(int32(id)) != slices.Contains(may, text) {
			tt.Errorf("%q: allowed %t, accepted %t", text, slices.Contains(may, text), !slices.Contains(may, text))
		}
	}
	if again := t.allowed(g); !slices.Equal(may, again) {
		tt.Errorf("%q became %q", may, again)
	}
}

func guideOf(t *testing.T, b *bind.Binder, spec *handoff.Guide) engine.Guide {
	t.Helper()
	g, err := b.Bind(context.Background(), spec)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// TestText: a grammar alone binds the answer from its first token to its end.
func TestText(t *testing.T) {
	k := newToy(nil, "yes", "no", "ye", "not")
	g := guideOf(t, k.binder(""), &handoff.Guide{Kind: "choice", Text: `["yes","no"]`})
	if got := k.allowed(g); !slices.Equal(got, []string{"yes", "no", "ye", "n", "y"}) {
		t.Errorf("%q", got)
	}
	k.agrees(t, g)
	other := g.Fork()
	k.says(t, g, "ye", "s")
	if got := k.allowed(g); !slices.Equal(got, []string{end}) {
		t.Errorf("at the end: %q", got)
	}
	k.says(t, g, end)
	if got := k.allowed(g); got != nil {
		t.Errorf("behind the end: %q", got)
	}
	k.says(t, other, "no", end)
}

// TestBegin: a mark comes first, as the tokenizer's tokens.
func TestBegin(t *testing.T) {
	k := newToy([]string{"<|channel|>"}, "final")
	g := guideOf(t, k.binder(""), &handoff.Guide{Kind: "regex", Text: "a+", Begin: "<|channel|>final!"})
	for _, s := range []string{"<|channel|>", "final", "!"} {
		if got := k.allowed(g); !slices.Equal(got, []string{s}) {
			t.Errorf("%q, want %q", got, s)
		}
		k.agrees(t, g)
		k.says(t, g, s)
	}
	k.says(t, g, "a", "a", end)
}

// TestThinks: what is bound begins behind the mark that ends the reasoning, wherever tokens cut it; an
// answer cannot end in its reasoning.
func TestThinks(t *testing.T) {
	k := newToy([]string{"</think>"}, "</thi", "nk>", "nk>\n", "nk>y", "</think", ">x", "> ", "yes", "<<", "</")
	b := k.binder("qwen3")
	spec := &handoff.Guide{Kind: "choice", Text: `["yes"]`, Thinks: handoff.ThinksNow}
	for _, way := range [][]string{
		{"</think>"},
		{"yes", "</thi", "nk>"},
		{"</thi", "nk>\n"},
		{"</thi", "</thi", "nk>"},
		{"<<", "/", "t", "h", "i", "n", "k", "> "},
		{"</", "t", "</think", ">"},
		{"</think", "</think>"},
	} {
		g := guideOf(t, b, spec)
		for _, s := range way {
			if may := k.allowed(g); slices.Contains(may, end) || slices.Contains(may, "beyond the tokenizer") {
				t.Errorf("%q before %q", may, s)
			}
			k.agrees(t, g)
			k.says(t, g, s)
		}
		if got := k.allowed(g); !slices.Equal(got, []string{"yes", "y"}) {
			t.Errorf("%q: %q", way, got)
		}
		k.says(t, g, "yes", end)
	}
	g := guideOf(t, b, spec)
	if k.says(t, g, "</thi"); slices.Contains(k.allowed(g), "nk>y") {
		t.Error("the beginning of the answer passed the grammar by")
	}
	k.agrees(t, g)
}

// TestMayThink: a model that may think or answer does either; while it is not clear which, both go on.
func TestMayThink(t *testing.T) {
	k := newToy([]string{"</think>"}, "<think>", "<thi", "<think>\n", "<think></think>", "<think></think>x", "nk>", "<t", "<x", "ab")
	b := k.binder("qwen3")
	spec := &handoff.Guide{Kind: "regex", Text: "<t(ab|hink)*", Thinks: handoff.ThinksMay}
	first := guideOf(t, b, spec)
	if got := k.allowed(first); !slices.Equal(got, []string{"<think>", "<thi", "<think>\n", "<think></think>", "<t", "<"}) {
		t.Errorf("%q", got)
	}
	k.agrees(t, first)
	for _, way := range [][]string{
		{"<think>", "ab", "</think>", "<t", "ab", end},
		{"<think>\n", "</think>", "<t", end},
		{"<think></think>", "<", "t", end},
		{"<", "t", "h", "i", "n", "k", ">", "z", "</think>", "<t", "ab", end},
		{"<t", "ab", "h", "i", "n", "k", end},
		{"<t", "h", "i", "n", "k", "ab", end},
		{"<t", end},
		{"<thi", "nk>", "</think>", "<", "t", end},
	} {
		g := first.Fork()
		for i := range way {
			k.agrees(t, g)
			k.says(t, g, way[i])
		}
	}
	g := first.Fork()
	if k.says(t, g, "<t", "ab", "h", "i", "n", "k"); slices.Contains(k.allowed(g), ">") {
		t.Error("an answer that has begun became reasoning")
	}
	spec.Thinks = handoff.ThinksNot
	if got := k.allowed(guideOf(t, b, spec)); !slices.Equal(got, []string{"<thi", "<t", "<"}) {
		t.Errorf("without reasoning: %q", got)
	}
}

// TestHarmony: gpt-oss thinks in a channel of its own, and answers in another.
func TestHarmony(t *testing.T) {
	marks := []string{"<|channel|>", "<|message|>", "<|start|>", "<|end|>"}
	k := newToy(marks, "analysis", "assistant", "final")
	spec := &handoff.Guide{Kind: "choice", Text: `["yes"]`, Begin: answer.ThinkFormat("openai_gptoss").Before(), Thinks: handoff.ThinksMay}
	first := guideOf(t, k.binder("openai_gptoss"), spec)
	thinks, at := first.Fork(), first.Fork()
	k.says(t, thinks, "<|channel|>")
	if got := k.allowed(thinks); !slices.Equal(got, []string{"analysis", "final", "a"}) {
		t.Errorf("%q", got)
	}
	k.says(t, thinks, "analysis", "<|message|>", "h", "m", "<|end|>", "<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "y", "e", "s", end)
	k.says(t, at, "<|channel|>", "final", "<|message|>", "y", "e", "s", end)
}

// TestSpecs: what cannot be followed is refused with a reason.
func TestSpecs(t *testing.T) {
	k := newToy(nil)
	none := bind.New(bind.Config{Tokenizer: k, Vocab: len(k.texts), Bytes: 1 << 20})
	for name, c := range map[string]struct {
		b    *bind.Binder
		spec handoff.Guide
		want string
	}{
		"regex":     {k.binder(""), handoff.Guide{Kind: "regex", Text: "a("}, "at offset"},
		"kind":      {k.binder(""), handoff.Guide{Kind: "abc"}, `kind "abc" are not known`},
		"no ends":   {none, handoff.Guide{Kind: "regex", Text: "a"}, "no token that ends"},
		"no token":  {k.binder(""), handoff.Guide{Kind: "regex", Text: "ä"}, "no token of this model can begin it"},
		"format":    {k.binder(""), handoff.Guide{Kind: bind.KindCalls, Text: `{"format":"glm4","tools":[{"name":"f"}]}`}, "not known"},
		"Python":    {k.binder(""), handoff.Guide{Kind: bind.KindCalls, Text: `{"format":"pythonic","tools":[{"name":"f-g"}]}`}, `"f-g"`},
		"schema":    {k.binder(""), handoff.Guide{Kind: bind.KindMayCall, Text: `{"format":"glm45","tools":[{"name":"f","parameters":{"not":{}}}]}`}, "parameters of f"},
		"all free":  {k.binder(""), handoff.Guide{Kind: bind.KindMayCall, Text: `{"format":"json","tools":[{"name":"f","free":true}]}`}, "nothing begins"},
		"no format": {k.binder(""), handoff.Guide{Kind: bind.KindCalls, Text: `{"tools":[{"name":"f"}]}`}, "not known"},
		"no tools":  {k.binder(""), handoff.Guide{Kind: bind.KindCalls, Text: `{"format":"hermes"}`}, "0 tools"},
		"twice":     {k.binder(""), handoff.Guide{Kind: bind.KindCalls, Text: `{"format":"hermes","tools":[{"name":"f"},{"name":"f"}]}`}, "two tools"},
		"name":      {k.binder(""), handoff.Guide{Kind: bind.KindCalls, Text: `{"format":"hermes","tools":[{"name":"f g"}]}`}, `"f g"`},
	} {
		_, err := c.b.Bind(context.Background(), &c.spec)
		var bad *bind.Error
		if !errors.As(err, &bad) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
	if _, err := k.binder("").Guide(context.Background(), &handoff.Guide{Kind: bind.KindCalls, Text: `{`}); err == nil {
		t.Error("broken calls are accepted")
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(errors.New("gone"))
	b := k.binder("")
	for range 50 { // turns are taken at random
		if _, err := b.Bind(ctx, &handoff.Guide{Kind: "regex", Text: "a"}); err != nil && err.Error() != "gone" {
			t.Error(err)
		}
	}
}

// random draws an answer: tokens that may come, special ones and those of often more often, now and then an end.
func (t *toy) random(tt *testing.T, r *rand.Rand, g engine.Guide, most int, often ...string) string {
	tt.Helper()
	ends := 3 // of an end that may come: one chance of 3 that it does not, or of more that it does
	if often != nil {
		ends = 8
	}
	var text strings.Builder
	for range most {
		may := t.allowed(g)
		mayEnd := slices.Contains(may, end)
		if len(may) == 0 {
			tt.Fatalf("a dead end behind %q", text.String())
		}
		rare := slices.DeleteFunc(slices.Clone(may), func(s string) bool {
			return s == end || !slices.Contains(often, s) && (often != nil || !t.special[s])
		})
		if len(rare) > 0 && r.IntN(3) == 0 {
			may = rare
		}
		s := may[r.IntN(len(may))]
		if n := r.IntN(ends); mayEnd && (often == nil) == (n > 0) {
			s = end
		}
		if t.says(tt, g, s); s == end {
			return text.String()
		}
		text.WriteString(s)
	}
	return ""
}

// TestMostCalls: an answer has no more calls than are read of it.
func TestMostCalls(t *testing.T) {
	k := newToy([]string{"[TOOL_CALLS]"})
	for _, format := range []string{"mistral", "llama3_json", "hermes"} {
		text, err := (&bind.Calls{Format: format, Tools: []bind.Tool{{Name: "f"}}, Several: true}).Encode()
		if err != nil {
			t.Fatal(err)
		}
		g := guideOf(t, k.binder(""), &handoff.Guide{Kind: bind.KindCalls, Text: text})
		var out strings.Builder
		for {
			may := k.allowed(g)
			more := slices.DeleteFunc(slices.Clone(may), func(s string) bool { return s == end })
			solid := slices.DeleteFunc(slices.Clone(more), func(s string) bool { return strings.TrimSpace(s) == "" })
			s := end
			switch { // rather another call than an end, and no white space within
			case slices.Contains(may, ","):
				s = ","
			case len(solid) > 0:
				s = solid[0]
			case len(more) > 0:
				s = more[0]
			}
			if k.says(t, g, s); s == end {
				break
			}
			if out.WriteString(s); out.Len() > 1<<16 {
				t.Fatalf("%s: it goes on", format)
			}
		}
		if n := strings.Count(out.String(), `"f"`); n != answer.MaxCalls {
			t.Errorf("%s: %d calls", format, n)
		}
	}
}

var (
	callMarks = []string{"<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|tool_call|>", "<|action_start|>", "<|plugin|>", "<|action_end|>",
		"<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
		"<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>",
		"<|START_ACTION|>", "<|END_ACTION|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|start|>", "｜DSML｜", "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>",
		"<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>", "<seed:tool_call>", "</seed:tool_call>"}
	callTexts = []string{`{"`, `"}`, `}}`, ` {"`, `": `, `true`, `false`, "weather", "get_", `"]`, "</parameter>", "\n</parameter>", "</arg_value>", "</steptml:parameter>", "parameter>", "</", "<parameter=",
		`<parameter name="`, "Oslo", "Rome", "True", "False", "\",", "é"}
	callTools = []bind.Tool{
		{Name: "get", Parameters: json.RawMessage(`{"type":"object","properties":{"on":{"type":"boolean"}},"required":["on"],"additionalProperties":false}`)},
		{Name: "get_weather", Parameters: json.RawMessage(`{"$defs":{"c":{"enum":["Oslo","Rome"]}},"type":"object","properties":{"city":{"$ref":"#/$defs/c"}},"required":["city"],"additionalProperties":false}`)},
		{Name: "stop"},
		{Name: "note", Parameters: json.RawMessage(`{"type":"object","properties":{"text":{"type":"string"},"n":{"type":["integer","null","string"],"pattern":"^[a-z]*$"}},"required":["text"],"additionalProperties":false}`)},
	}
)

// asked reports whether a call of callTools is as their schemas want it.
func asked(name, args string) bool {
	var got map[string]any
	if json.Unmarshal([]byte(args), &got) != nil {
		return false
	}
	switch name {
	case "get":
		_, ok := got["on"].(bool)
		return ok && len(got) == 1
	case "get_weather":
		return (got["city"] == "Oslo" || got["city"] == "Rome") && len(got) == 1
	case "stop":
		return len(got) == 0
	case "note":
		_, ok := got["text"].(string)
		n, has := got["n"]
		switch n := n.(type) {
		case string:
			ok = ok && strings.Trim(n, "abcdefghijklmnopqrstuvwxyz") == ""
		case float64:
			ok = ok && n == math.Trunc(n)
		default:
			ok = ok && n == nil
		}
		if has {
			delete(got, "n")
		}
		return ok && len(got) == 1
	}
	return false
}

// readCalls is what is read of an answer in a format.
func readCalls(format, out string, tools []bind.Tool, whole bool) (names, args []string, text string) {
	var list []json.RawMessage
	for _, tool := range tools {
		raw, _ := json.Marshal(map[string]any{"type": "function", "function": tool})
		list = append(list, raw)
	}
	p := answer.New(answer.ToolFormat(format), nil, answer.Options{Tools: answer.ReadTools(list), Whole: whole})
	for _, e := range slices.Concat(slices.Clone(p.Feed(out)), p.Flush()) {
		switch e.Kind {
		case answer.Begin:
			names, args = append(names, e.Text), append(args, "")
		case answer.Arguments:
			args[len(args)-1] += e.Text
		default:
			text += e.Text
		}
	}
	return names, args, text
}

// TestCalls: whatever is drawn along the masks of a bound call reads as calls of the tools, whole and
// streamed, with arguments that their schemas allow; of several where there may be.
func TestCalls(t *testing.T) {
	k := newToy(callMarks, callTexts...)
	b := k.binder("")
	for _, format := range answer.ToolNames() {
		t.Run(format, func(t *testing.T) {
			r := rand.New(rand.NewPCG(1, 2))
			several := 0
			can, _ := answer.ToolFormat(format).Calling(true)
			for round := range 40 {
				calls := bind.Calls{Format: format, Tools: callTools, Several: round%2 == 0, First: round}
				if round%5 == 0 {
					calls.Tools = callTools[1:2]
				}
				text, err := calls.Encode()
				if err != nil {
					t.Fatal(err)
				}
				g := guideOf(t, b, &handoff.Guide{Kind: bind.KindCalls, Text: text})
				out := k.random(t, r, g, 8000)
				for _, wholly := range []bool{true, false} {
					names, args, text := readCalls(format, out, calls.Tools, wholly)
					if strings.TrimSpace(text) != "" {
						t.Fatalf("%q is text of %q", text, out)
					}
					if len(names) == 0 || len(names) > 1 && !(calls.Several && can.Several) {
						t.Fatalf("%d calls in %q", len(names), out)
					}
					if len(names) > 1 {
						several++
					}
					for i, name := range names {
						if !asked(name, args[i]) || calls.Tools[0].Name == "get_weather" && name != "get_weather" {
							t.Errorf("%s(%s) in %q", name, args[i], out)
						}
					}
				}
			}
			if can.Several && several == 0 {
				t.Error("there never was a second call")
			}
		})
	}
}

// TestMayCall: an answer is free but for its calls, which are as the schemas of strict tools want them wherever one begins.
func TestMayCall(t *testing.T) {
	tools := slices.Clone(callTools)
	tools[2].Free = true
	for _, format := range answer.ToolNames() {
		t.Run(format, func(t *testing.T) {
			f := answer.ToolFormat(format)
			how, _ := f.Calling(true)
			texts := slices.Clone(callTexts)
			texts = append(texts, how.Mark+"x", "[get(on", "[get(", `{"name": "get", "arguments":`, `{"name":"get", "parameters":`, `{"name": "note","arguments":`, `{"name": "note","parameters":`, `"arguments": {`, `functools[{"name": "get", "arguments":`, `[{"name": "get", "arguments":`)
			often := []string{"<", `functools[{"name": "get", "arguments":`, `[{"name": "get", "arguments":`, "[get(", `{"name": "get", "arguments":`, `{"name":"get", "parameters":`, `{"name": "note","arguments":`, `{"name": "note","parameters":`, "</", "｜DSML｜", "true", "True",
				"\n</parameter>", "</parameter>", "</arg_value>", "</steptml:parameter>", "Oslo", `"}`, `}}`}
			for _, tr := range f.Triggers() {
				texts, often = append(texts, tr.Text, tr.Text+"!"), append(often, tr.Text)
			}
			k := newToy(callMarks, texts...)
			text, err := (&bind.Calls{Format: format, Tools: tools, Several: true}).Encode()
			if err != nil {
				t.Fatal(err)
			}
			first := guideOf(t, k.binder(""), &handoff.Guide{Kind: bind.KindMayCall, Text: text})
			r := rand.New(rand.NewPCG(3, 4))
			called, unbound := 0, 0
			for round := range 60 {
				g := first.Fork()
				if round%10 == 0 {
					k.agrees(t, g)
				}
				out := k.random(t, r, g, 8000, often...)
				for _, whole := range []bool{true, false} {
					names, args, _ := readCalls(format, out, tools, whole)
					for i, name := range names {
						if called++; name != "stop" && !asked(name, args[i]) {
							t.Errorf("%s(%s) in %q", name, args[i], out)
						} else if name == "stop" && !json.Valid([]byte(args[i])) {
							unbound++
						}
					}
				}
			}
			if called < 5 {
				t.Errorf("%d calls", called)
			}
			g := first.Fork()
			k.says(t, g, "O", "<", "/", "é", "[", "g", "e", "t", " ", "{", end)
		})
	}
}

// TestThinksAndMayCall: reasoning is free, marks of calls in it too, and may end the answer.
func TestThinksAndMayCall(t *testing.T) {
	k := newToy([]string{"</think>"}, "<think>", "<tool_call>", "</tool_call>", "<tool_call>x")
	text, err := (&bind.Calls{Format: "hermes", Tools: callTools[:1]}).Encode()
	if err != nil {
		t.Fatal(err)
	}
	spec := &handoff.Guide{Kind: bind.KindMayCall, Text: text, Thinks: handoff.ThinksMay}
	b := k.binder("qwen3")
	first := guideOf(t, b, spec)
	for _, way := range [][]string{
		{"\n", "<think>", "<tool_call>x", "<tool_call>", "y", "</think>", "<tool_call>", "\n", "{", "\"", "n"},
		{"<think>", "a", end},
		{"a", "<think>", "<tool_call>", "\n"},
		{"<tool_call>", "\n"},
		{end},
	} {
		g := first.Fork()
		for i := range way {
			if i%3 == 0 {
				k.agrees(t, g)
			}
			k.says(t, g, way[i])
		}
	}
	g := first.Fork()
	k.says(t, g, "<tool_call>")
	if got := k.allowed(g); !slices.Equal(got, []string{"\n"}) {
		t.Errorf("%q behind the mark", got)
	}
	if got := k.allowed(first); slices.Contains(got, "<tool_call>x") || !slices.Contains(got, end) {
		t.Errorf("%q at first", got)
	}
}
