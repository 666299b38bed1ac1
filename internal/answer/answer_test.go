package answer_test

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/answer"
)

// got is an answer put together from events.
type got struct {
	Content, Reasoning string
	Calls              []called
}

type called struct{ Name, Args, ID string }

// collect puts events together, and checks what every stream keeps to.
func collect(t testing.TB, g *got, events []answer.Event) {
	t.Helper()
	for _, e := range events {
		switch e.Kind {
		case answer.Content:
			g.Content += e.Text
		case answer.Reasoning:
			g.Reasoning += e.Text
		case answer.Begin:
			if e.Index != len(g.Calls) {
				t.Fatalf("call %d begins as the %d-th", e.Index, len(g.Calls))
			}
			g.Calls = append(g.Calls, called{Name: e.Text, ID: e.ID})
		case answer.Arguments:
			if e.Index != len(g.Calls)-1 {
				t.Fatalf("arguments of call %d after %d calls", e.Index, len(g.Calls))
			}
			g.Calls[e.Index].Args += e.Text
		}
	}
}

// parse feeds pieces.
func parse(t testing.TB, v *vector, whole bool, pieces []string) got {
	t.Helper()
	o := answer.Options{Whole: whole, Thinking: v.thinking, Thought: v.thought, Single: v.single}
	if v.tools != "" {
		var list []json.RawMessage
		if err := json.Unmarshal([]byte(v.tools), &list); err != nil {
			t.Fatal(err)
		}
		o.Tools = answer.ReadTools(list)
	}
	p := answer.New(answer.ToolFormat(v.format), answer.ThinkFormat(v.think), o)
	var g got
	for _, piece := range pieces {
		collect(t, &g, p.Feed(piece))
		if n := p.Held(); !whole && n > answer.MaxHeld {
			t.Fatalf("%d bytes are held back", n)
		}
	}
	collect(t, &g, p.Flush())
	if p.Held() != 0 {
		t.Fatalf("%d bytes are held back at the end", p.Held())
	}
	return g
}

// cuts are ways to cut a text: whole, every byte, and every two pieces.
func cuts(text string) [][]string {
	list := [][]string{{text}, strings.Split(text, "")}
	var each []string
	for i := range len(text) {
		each = append(each, text[i:i+1])
		list = append(list, []string{text[:i], text[i:]})
	}
	return append(list, each)
}

// equal compares with JSON of the same meaning taken for the same.
func equal(a, b got) bool {
	same := func(x, y string) bool {
		var u, v any
		if x == y {
			return true
		}
		return json.Unmarshal([]byte(x), &u) == nil && json.Unmarshal([]byte(y), &v) == nil && reflect.DeepEqual(u, v)
	}
	if a.Content != b.Content || a.Reasoning != b.Reasoning || len(a.Calls) != len(b.Calls) {
		return false
	}
	for i := range a.Calls {
		if a.Calls[i].Name != b.Calls[i].Name || !same(a.Calls[i].Args, b.Calls[i].Args) || b.Calls[i].ID != "" && a.Calls[i].ID != b.Calls[i].ID {
			return false
		}
	}
	return true
}

// TestVectors: what each format's texts mean, whole and streamed, however they are cut.
func TestVectors(t *testing.T) {
	seen, thought := map[*answer.Format]bool{}, map[*answer.Think]bool{}
	for i := range vectors {
		v := &vectors[i]
		seen[answer.ToolFormat(v.format)], thought[answer.ThinkFormat(v.think)] = true, true
		t.Run(fmt.Sprintf("%s%s/%s", v.format, v.think, v.name), func(t *testing.T) {
			for _, mode := range []struct {
				name  string
				whole bool
				want  *got
			}{{"stream", false, v.stream}, {"whole", true, nil}} {
				want := got{Content: v.content, Reasoning: v.reasoning, Calls: v.calls}
				if mode.want != nil {
					want = *mode.want
				}
				var first got
				for i, pieces := range cuts(v.text) {
					g := parse(t, v, mode.whole, pieces)
					if i == 0 {
						first = g
					}
					if !equal(g, want) || !reflect.DeepEqual(g, first) {
						t.Fatalf("%s, cut into %d %.80q:\nhave %+q\nwant %+q\ntext %q", mode.name, len(pieces), pieces, g, want, v.text)
					}
				}
			}
		})
	}
	for _, name := range answer.ToolNames() {
		if f := answer.ToolFormat(name); f == nil || !seen[f] {
			t.Errorf("no vector has the format %s", name)
		}
	}
	for _, name := range answer.ThinkNames() {
		if f := answer.ThinkFormat(name); f == nil || !thought[f] {
			t.Errorf("no vector has the reasoning format %s", name)
		}
	}
}
