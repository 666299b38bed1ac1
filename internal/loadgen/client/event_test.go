package client

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/jsonscan"
)

func TestEvent(t *testing.T) {
	f := func(in string, want event, answer string) {
		t.Helper()
		var e event
		var text []byte
		if err := e.parse([]byte(in), &text); err != nil {
			t.Errorf("%s: %v", in, err)
			return
		}
		if string(e.err) != string(want.err) {
			t.Errorf("%s: error %s, want %s", in, e.err, want.err)
		}
		e.err, want.err = nil, nil
		if e.tokens != want.tokens || e.finish != want.finish || e.hasUsage != want.hasUsage || e.usage != want.usage || string(text) != answer {
			t.Errorf("%s: %+v and %q, want %+v and %q", in, e, text, want, answer)
		}
	}
	f(`{}`, event{}, "")
	f(` { "choices" : [ ] } `, event{}, "")
	f(`{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}],"usage":null}`, event{}, "")
	f(`{"choices":[{"delta":{"content":"a\"b\\"}}]}`, event{tokens: true}, `a\"b\\`)
	f(`{"choices":[{"delta":{"content":null,"reasoning_content":"hm"}}]}`, event{tokens: true}, "")
	f(`{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}`, event{tokens: true}, "")
	f(`{"choices":[{"text":" x","logprobs":{"a":[1,{"b":[]}]},"finish_reason":"length"}]}`, event{tokens: true, finish: true}, " x")
	f(`{"choices":[{"text":"a"},{"text":"b"}]}`, event{tokens: true}, "ab")
	f(`{"choices":[{"message":{"content":"hi"},"finish_reason":"stop"}],"usage":{"prompt_tokens":7,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4},"x":[]}}`,
		event{tokens: true, finish: true, hasUsage: true, usage: Usage{7, 2, 4}}, "hi")
	f(`{"usage":{"prompt_tokens":-1,"completion_tokens":1.5,"prompt_tokens_details":null}}`, event{hasUsage: true}, "")
	f(`{"usage":{"prompt_tokens":99999999999999999999}}`, event{hasUsage: true}, "")
	f(`{"error":{"message":"no"}}`, event{err: []byte(`{"message":"no"}`)}, "")
	f(`{"error":null,"choices":{"a":1}}`, event{}, "")

	for _, in := range []string{``, `[]`, `{`, `{"a"}`, `{"a":}`, `{"a":1,}`, `{"a":"b}`, `{} {}`, `{"a":[1}`, `{"a":` + strings.Repeat("[", 100) + strings.Repeat("]", 100) + `}`} {
		if err := new(event).parse([]byte(in), nil); err == nil {
			t.Errorf("%q was taken", in)
		}
	}
}

// FuzzEvent: it accepts what encoding/json accepts as an object, with the same numbers, and never
// panics.
func FuzzEvent(f *testing.F) {
	f.Add([]byte(`{"id":"x","choices":[{"index":0,"delta":{"content":"a\"\\"},"finish_reason":"stop"}],"usage":{"prompt_tokens":7,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}`))
	f.Add([]byte(`{"choices":[{"text":"\u00e9","logprobs":[1e-5,true,null,{"":[[]]}]}],"error":{"message":"m"}}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		var e event
		var text []byte
		err := e.parse(in, &text)
		var ref map[string]json.RawMessage
		if json.Unmarshal(in, &ref) != nil || ref == nil {
			return
		}
		if err != nil && !errors.Is(err, jsonscan.ErrDepth) {
			t.Fatalf("%q: %v", in, err)
		}
		if err == nil && json.Valid(e.err) == (e.err == nil) {
			t.Fatalf("%q: error %q", in, e.err)
		}
		if err == nil && !json.Valid(slices.Concat([]byte{'"'}, text, []byte{'"'})) {
			t.Fatalf("%q: answer %q", in, text)
		}
		errorText(e.err)
	})
}

// split feeds an event stream in pieces and returns the events.
func split(t *testing.T, in []byte, piece int) (events []string) {
	t.Helper()
	var s sse
	for chunk := range slices.Chunk(in, piece) {
		for {
			data, rest, named, ok, err := s.next(chunk)
			if err != nil {
				t.Fatal(err)
			}
			if !ok {
				break
			}
			if named {
				data = append([]byte("error:"), data...)
			}
			events = append(events, string(data))
			chunk = rest
		}
	}
	return events
}

func TestSSE(t *testing.T) {
	f := func(in string, want ...string) {
		t.Helper()
		for _, piece := range []int{1, 2, 3, 7, 1000} {
			if got := split(t, []byte(in), piece); !slices.Equal(got, want) {
				t.Errorf("%q by %d: %q, want %q", in, piece, got, want)
			}
		}
	}
	f("data: a\n\ndata: b\n\n", "a", "b")
	f("data: a\r\n\r\ndata:b\r\n\r\n", "a", "b")
	f(": ping\n\ndata: a\n\n:\n\n", "a")
	f("event: error\ndata: {}\n\ndata: a\n\n", "error:{}", "a")
	f("event: error\n\ndata: a\n\n", "a")
	f("id: 1\nretry: 5\ndata: a\ndata: b\n\n", "a\nb")
	f("data:\n\n", "")
	f("\n\n\ndata:  a\n\ndata: never ends\n", " a")

	var s sse
	long := []byte(strings.Repeat("x", 1<<20))
	var err error
	for range 5 {
		if _, _, _, _, err = s.next(long); err != nil {
			break
		}
	}
	if err != errEventTooLong {
		t.Errorf("a line without end: %v", err)
	}
}

// FuzzSSE: the cut of a stream into pieces does not matter.
func FuzzSSE(f *testing.F) {
	f.Add([]byte("data: {\"a\":1}\r\n\r\nevent: error\ndata: x\ndata: y\n\n: c\n\ndata: [DONE]\n\n"), 3)
	f.Fuzz(func(t *testing.T, in []byte, piece int) {
		if len(in) == 0 || piece < 1 {
			return
		}
		whole, cut := split(t, in, len(in)), split(t, in, piece)
		if !slices.Equal(whole, cut) {
			t.Fatalf("%q whole: %q, by %d: %q", in, whole, piece, cut)
		}
	})
}

// TestNoAllocation: an event costs no allocation.
func TestNoAllocation(t *testing.T) {
	in := []byte("data: {\"id\":\"cmpl-1\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" once\"},\"logprobs\":null,\"finish_reason\":null}],\"usage\":null}\n\n")
	var s sse
	res := Result{Gaps: make([]time.Duration, 0, 1<<16)}
	st := streamed{res: &res}
	var e event
	n := testing.AllocsPerRun(1000, func() {
		p := in
		for {
			data, rest, named, ok, err := s.next(p)
			if !ok || err != nil {
				return
			}
			if err := st.event(&e, data, named, 1); err != nil {
				panic(err)
			}
			p = rest
		}
	})
	if n != 0 {
		t.Errorf("%v allocations an event", n)
	}
	if res.Chunks < 1000 {
		t.Errorf("%d chunks", res.Chunks)
	}
}

// TestRecorded: streams recorded from OpenAI's service.
func TestRecorded(t *testing.T) {
	files, err := filepath.Glob("../../openai/testdata/sse/*.sse")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, path := range files {
		in, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var res Result
		st := streamed{res: &res, answer: &res.Answer}
		for _, data := range split(t, in, 100) {
			if err := st.event(new(event), []byte(data), false, time.Duration(1+res.Chunks)); err != nil {
				t.Fatalf("%s: %q: %v", path, data, err)
			}
		}
		if st.over(); !res.OK() || !st.done || !st.finished || res.Chunks == 0 {
			t.Errorf("%s: %+v", path, res)
		}
		if text := slices.Concat([]byte{'"'}, res.Answer, []byte{'"'}); !json.Valid(text) {
			t.Errorf("%s: %q", path, text)
		}
	}
}
