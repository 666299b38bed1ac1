package flight

import (
	"regexp"
	"strings"
	"testing"
)

func FuzzLastEnd(f *testing.F) {
	for _, s := range []string{"", "\n", "\n\n", "a\n\nb", "data: x\n\ndata: y\n", "\n\n\n", "a\nb\n\nc\nd\n", "a\r\n\r\nb\r\n", "a\r\rb\r"} {
		f.Add([]byte(s))
	}
	lines, old := regexp.MustCompile(`(?s)^.*\n\r?\n`), regexp.MustCompile(`(?s)^.*\r\r`)
	f.Fuzz(func(t *testing.T, b []byte) {
		want := len(lines.Find(b))
		if want == 0 {
			want = len(old.Find(b))
		}
		if got := lastEnd(b); got != want {
			t.Errorf("%q: %d, want %d", b, got, want)
		}
	})
}

func TestEvents(t *testing.T) {
	f := func(run string, n int, ended bool) {
		t.Helper()
		e := &events{}
		if e.remember([]byte(run)); e.ended() != ended || countEvents([]byte(run)) != n {
			t.Errorf("%q: %v %d, its last is %q", run, e.ended(), countEvents([]byte(run)), e.last[:e.size])
		}
	}
	f("data: {}\n\ndata: [DONE]\n\n", 2, true)
	f("data: {}\r\n\r\ndata: [DONE]\r\n\r\n", 2, true)
	f("data: {}\r\rdata: [DONE]\r\r", 2, true)
	f("data:[DONE]\n\n", 1, true)
	f("\ndata:[DONE]\r\n\r\n", 1, true)
	f("data: [DONE]\n\n: bye\n\n", 2, true)
	f("id: 1\r\ndata: [DONE]\r\n\r\n", 1, true)
	f("event:error\r\ndata: {}\r\n\r\n", 1, true)
	f("data:{\"error\":{}}\r\n\r\n", 1, true)
	f("data: {}\r\n\r\n", 1, false)
	f(": [DONE]\n\n", 1, false)
	f("", 0, false)
	for run, want := range map[string]int{
		"data: {}\n\n": 1, "data: {}\n\ndata: {}\n\ndata: [DONE]\n\n": 2, "data: [DONE]\n\n": 0, "data: [DONE]": 0,
		"data: [DONE] " + strings.Repeat("x", 32) + "\n\n": 1, // a text
	} {
		e := &events{}
		if e.remember([]byte(run)); e.tokens() != want {
			t.Errorf("%q: %d tokens, want %d", run, e.tokens(), want)
		}
	}
}
