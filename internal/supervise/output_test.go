package supervise

import (
	"bytes"
	"strings"
	"testing"
)

func TestLines(t *testing.T) {
	f := func(want, last string, writes ...string) {
		t.Helper()
		var out bytes.Buffer
		l := (&output{w: &out, max: 5}).lines("a")
		for _, w := range writes {
			if n, err := l.Write([]byte(w)); n != len(w) || err != nil {
				t.Fatal(n, err)
			}
		}
		l.flush()
		if got := strings.ReplaceAll(out.String(), "[a] ", ">"); got != want || l.last != last {
			t.Errorf("%q: got %q, last %q", writes, got, l.last)
		}
	}
	f("", "")
	f(">ab\n>c\n", "c", "ab\nc\n")
	f(">ab\n", "ab", "a", "b")
	f(">ab\n", "ab", "a", "b", "\r\n")
	f(">\n>x\n>\n", "x", "\nx\n", "\n")
	f(">12345\n", "12345", "12345\n")
	f(">12345\n", "12345", "12345", "\n")
	f(">12345\n>6\n", "6", "123456\n")
	f(">12345\n>67890\n>1\n", "1", "12345", "678901")
}

// FuzzLines: however a stream is cut into writes, the lines are the same, and
// nothing is lost.
func FuzzLines(f *testing.F) {
	f.Add([]byte("ab\ncdefghij\n\nk"), uint8(3))
	f.Fuzz(func(t *testing.T, text []byte, step uint8) {
		run := func(step int) string {
			var out bytes.Buffer
			l := (&output{w: &out, max: 4}).lines("")
			for rest := text; len(rest) > 0; {
				n := min(step, len(rest))
				if _, err := l.Write(rest[:n]); err != nil {
					t.Fatal(err)
				}
				rest = rest[n:]
			}
			l.flush()
			return out.String()
		}
		whole := run(len(text) + 1)
		if cut := run(int(step)%7 + 1); cut != whole {
			t.Fatalf("%q or %q", whole, cut)
		}
		clean := func(s string) string { return strings.NewReplacer("\n", "", "\r", "").Replace(s) }
		if got := clean(strings.ReplaceAll(whole, "[] ", "")); got != clean(strings.ReplaceAll(string(text), "[] ", "")) {
			t.Fatalf("%q", whole)
		}
	})
}
