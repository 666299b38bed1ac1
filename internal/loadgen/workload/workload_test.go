package workload_test

import (
	"bytes"
	"context"
	"encoding/json"
	"math"
	"math/rand/v2"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/internal/loadgen/client"
	"github.com/xpyd/xpyd/internal/loadgen/workload"
)

func lengths(t *testing.T, s string) workload.Dist {
	t.Helper()
	d, err := workload.ParseLengths(s, 0)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestDist(t *testing.T) {
	f := func(s string, mean, min, max float64) {
		t.Helper()
		d, rng := lengths(t, s), rand.New(rand.NewPCG(1, 2))
		const n = 100_000
		sum := 0.0
		for range n {
			x := float64(d.Tokens(rng, 0))
			if x < min || x > max {
				t.Fatalf("%s drew %v", s, x)
			}
			sum += x
		}
		if got := sum / n; math.Abs(got-mean) > 0.02*mean {
			t.Errorf("%s: mean %v, want %v", s, got, mean)
		}
	}
	inf := math.Inf(1)
	f("512", 512, 512, 512)
	f("100-200", 150, 100, 200)
	f("7-7", 7, 7, 7)
	f("normal:500,50", 500, 0, 1000)
	f("lognormal:100,0.5", 100*math.Exp(0.125), 1, inf)
	f("exp:300", 300, 0, inf)
	for _, s := range []string{"", "x", "-1", "5-", "5-3", "normal:5", "exp:1,2", "zipf:1", "lognormal:5,-1", "lognormal:5,NaN", "lognormal:5,x", "1e9", "99999999"} {
		if _, err := workload.ParseLengths(s, 0); err == nil || strings.Contains(err.Error(), "strconv") {
			t.Errorf("%q: %v", s, err)
		}
	}
	if d, err := workload.ParseTimes("1s-3s"); err != nil || d.Time(rand.New(rand.NewPCG(1, 2))) < time.Second {
		t.Error(d, err)
	}
	for _, s := range []string{"5", "-1s", "exp:x", "48h"} {
		if _, err := workload.ParseTimes(s); err == nil || strings.Contains(err.Error(), "time: ") {
			t.Errorf("time %q: %v", s, err)
		}
	}
}

// words of an item's only message.
func words(it *workload.Item) []string {
	return strings.Fields(string(it.Messages[len(it.Messages)-1].Content))
}

func next(t *testing.T, s interface {
	Next(context.Context) (*workload.Item, bool)
}) *workload.Item {
	t.Helper()
	it, ok := s.Next(t.Context())
	if !ok {
		t.Fatal("no item")
	}
	return it
}

func TestSynthetic(t *testing.T) {
	shape := workload.Shape{In: lengths(t, "50-100"), Out: lengths(t, "5-9"), Prefix: 40, Groups: 2, Share: 0.5}
	a, b := workload.NewSynthetic(workload.NewText(7), shape), workload.NewSynthetic(workload.NewText(7), shape)
	other := workload.NewSynthetic(workload.NewText(8), shape)
	prefixes := map[string]int{}
	for range 400 {
		x, y := next(t, a), next(t, b)
		w := words(x)
		if !bytes.Equal(x.Messages[0].Content, y.Messages[0].Content) || x.Out != y.Out {
			t.Fatal("the same seed, another request")
		}
		if bytes.Equal(x.Messages[0].Content, next(t, other).Messages[0].Content) {
			t.Fatal("another seed, the same request")
		}
		if len(w) != x.In || x.In < 90 || x.In > 140 || x.Out < 5 || x.Out > 9 {
			t.Fatalf("%d words, in %d, out %d", len(w), x.In, x.Out)
		}
		prefixes[strings.Join(w[:40], " ")]++
	}
	shared, own := 0, 0
	for _, n := range prefixes {
		if n > 1 {
			shared++
		} else {
			own++
		}
	}
	if shared != 2 || own < 150 || own > 250 {
		t.Errorf("%d shared prefixes, %d own", shared, own)
	}
}

// TestIDs: token ids have exactly the lengths asked for.
func TestIDs(t *testing.T) {
	text := workload.NewText(1)
	text.IDs, text.LowID, text.HighID = true, 100, 110
	s := workload.NewSynthetic(text, workload.Shape{In: lengths(t, "30"), Out: lengths(t, "5"), Prefix: 10, Groups: 1, Share: 1})
	enc, err := workload.NewEncoder("m", "")
	if err != nil {
		t.Fatal(err)
	}
	enc.IDs = true
	var body struct{ Prompt []int }
	if err := json.Unmarshal(enc.Append(nil, next(t, s)), &body); err != nil || len(body.Prompt) != 40 || slices.Min(body.Prompt) < 100 || slices.Max(body.Prompt) > 110 {
		t.Errorf("%v %v", body, err)
	}
}

func TestCalibrate(t *testing.T) {
	text := workload.NewText(1)
	if !text.Calibrate(64, 64*2+30, 1064, 1064*2+30) || text.PerWord != 2 || text.Overhead != 30 {
		t.Errorf("%v %v", text.PerWord, text.Overhead)
	}
	s := workload.NewSynthetic(text, workload.Shape{In: lengths(t, "530"), Out: lengths(t, "5"), Groups: 1})
	if n := len(words(next(t, s))); n != 250 {
		t.Errorf("%d words", n)
	}
	if text.Calibrate(64, 9, 1064, 9) || text.PerWord != 2 {
		t.Error("a server that does not count was believed")
	}
}

func readTrace(t *testing.T, path string) []workload.Entry {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	entries, err := workload.ReadTrace(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	return entries
}

// TestMooncake: two prompts share exactly the blocks of the trace and have its lengths.
func TestMooncake(t *testing.T) {
	entries := readTrace(t, "testdata/mooncake.jsonl")
	trace := workload.NewTrace(workload.NewText(3), entries, 2, workload.BlockTokens)
	var items []*workload.Item
	for i := range entries {
		it := next(t, trace)
		if got := len(words(it)); got != entries[i].In || it.In != got || it.Out != entries[i].Out {
			t.Fatalf("%d words, want %d", got, entries[i].In)
		}
		if it.At != entries[i].At/2 {
			t.Errorf("due %v, in the trace %v", it.At, entries[i].At)
		}
		items = append(items, it)
	}
	if _, ok := trace.Next(t.Context()); ok {
		t.Error("a request after the last")
	}
	some := false
	for i := range items {
		for j := range i {
			a, b := words(items[i]), words(items[j])
			blocks := 0
			for blocks < min(len(entries[i].Blocks), len(entries[j].Blocks)) && entries[i].Blocks[blocks] == entries[j].Blocks[blocks] {
				blocks++
			}
			n := 0
			for n < min(len(a), len(b)) && a[n] == b[n] {
				n++
			}
			some = some || blocks > 0
			if want := min(blocks*workload.BlockTokens, len(a), len(b)); n < want || n > want+3 {
				t.Errorf("%d and %d: %d words in common, want %d", i, j, n, want)
			}
		}
	}
	if !some {
		t.Error("nothing shared in the excerpt")
	}
}

func TestAzure(t *testing.T) {
	entries := readTrace(t, "testdata/azure.csv")
	if len(entries) != 7 || entries[0].At != 0 || entries[1].At != 4314579*time.Microsecond || entries[1].In != 396 || entries[1].Out != 109 {
		t.Errorf("%+v", entries)
	}
	trace := workload.NewTrace(workload.NewText(3), entries, 1, workload.BlockTokens)
	for _, e := range entries {
		if it := next(t, trace); len(words(it)) != e.In {
			t.Errorf("%d words, want %d", len(words(it)), e.In)
		}
	}
	if got := workload.Within(entries, 500); len(got) != 4 {
		t.Errorf("%d entries within 500 tokens", len(got))
	}
	if got := workload.From(entries, 0); !reflect.DeepEqual(got, entries) {
		t.Errorf("from the first: %+v", got)
	}
	got, last := workload.From(entries, 2), entries[6].At
	for i := range got {
		want := entries[(i+2)%7]
		if want.At -= entries[2].At; i >= 5 {
			want.At += last
		}
		if !reflect.DeepEqual(got[i], want) || entries[2].At == 0 {
			t.Errorf("from the third: %+v, want %+v", got[i], want)
		}
	}
}

func TestBadTrace(t *testing.T) {
	f := func(in, message string) {
		t.Helper()
		_, err := workload.ReadTrace(strings.NewReader(in))
		if err == nil || !strings.Contains(err.Error(), message) {
			t.Errorf("%q: %v, want %q", in, err, message)
		}
	}
	f("", "no request")
	f("a,b\n1,2\n", "neither")
	f(`{"timestamp":0}`, "line 1: lengths 0 and 0")
	f("\n"+`{"input_length":5,"output_length":5}`, "line 2: no timestamp")
	f(`{"timestamp":-5,"input_length":5,"output_length":5}`, "timestamp -5: want 0 to ")
	f(`{"timestamp":1e300,"input_length":5,"output_length":5}`, "timestamp 1e+300: want 0 to ")
	f(`{"timestamp":0,"input_length":600.5,"output_length":5}`, "input_length is number 600.5: want whole numbers")
	f(`{"timestamp":"x","input_length":6,"output_length":5}`, "timestamp is string: want a time in ms")
	f(`{"timestamp":0,`, "line 1: no JSON of a request: ")
	f("\x1f\x8b\x08\x00", "line 1: it is compressed by gzip: unpack it first")
	f(`{"timestamp":0,"input_length":1000,"output_length":5,"hash_ids":[1]}`, "1 hash_ids for 1000 tokens, want 2")
	f(`{"timestamp":0,"input_length":99999999,"output_length":5}`, "lengths")
	f("TIMESTAMP,ContextTokens,GeneratedTokens\nx,1,1\n", `line 2: "x" is no time such as`)
	f("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,NaN\n", `line 2: "NaN" tokens: want a whole number`)
	f("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1\n", "2 columns: want TIMESTAMP,")
}

// FuzzTrace: whatever is read has sane entries in order of time.
func FuzzTrace(f *testing.F) {
	for _, path := range []string{"testdata/mooncake.jsonl", "testdata/azure.csv"} {
		b, err := os.ReadFile(path)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b[:min(len(b), 400)])
	}
	f.Add([]byte(`{"timestamp":3,"input_length":513,"output_length":1,"hash_ids":[1,2]}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		entries, err := workload.ReadTrace(bytes.NewReader(in))
		if err != nil {
			return
		}
		last := time.Duration(0)
		for _, e := range entries {
			if e.At < last || e.In < 1 || e.Out < 1 || e.In > 1<<24 {
				t.Fatalf("%+v after %v", e, last)
			}
			last = e.At
		}
	})
}

func TestPrompts(t *testing.T) {
	const file = `{"prompt":"say \"hi\" <é>","max_tokens":7}

{"turns":["one","two"]}
{"messages":[{"role":"system","content":"s"},{"role":"user","content":"u"}]}
`
	p, err := workload.ReadPrompts(strings.NewReader(file), workload.NewText(1), lengths(t, "20"))
	if err != nil {
		t.Fatal(err)
	}
	enc, err := workload.NewEncoder("m", `{"temperature":0}`)
	if err != nil {
		t.Fatal(err)
	}
	enc.Chat = true
	f := func(out int, contents ...string) {
		t.Helper()
		var body struct {
			Model       string
			Messages    []struct{ Role, Content string }
			MaxTokens   int  `json:"max_tokens"`
			Temperature *int `json:"temperature"`
		}
		if err := json.Unmarshal(enc.Append(nil, next(t, p)), &body); err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, m := range body.Messages {
			got = append(got, m.Content)
		}
		if !slices.Equal(got, contents) || body.MaxTokens != out || body.Model != "m" || body.Temperature == nil {
			t.Errorf("%+v", body)
		}
	}
	f(7, `say "hi" <é>`)
	f(20, "one")
	f(20, "s", "u")
	f(7, `say "hi" <é>`)
	for _, s := range []string{"", "{}", "x", `{"prompt":"a","max_tokens":-1}`, `{"messages":[{"role":"a\"b","content":"x"}]}`} {
		if _, err := workload.ReadPrompts(strings.NewReader(s), workload.NewText(1), lengths(t, "20")); err == nil {
			t.Errorf("%q was taken", s)
		}
	}
	for _, extra := range []string{"x", "[]", "null", `{"stream":true}`} {
		if _, err := workload.NewEncoder("m", extra); err == nil {
			t.Errorf("extra fields %q were taken", extra)
		}
	}
}

func talkShape(t *testing.T, turns string) workload.TalkShape {
	return workload.TalkShape{Shape: workload.Shape{In: lengths(t, "10"), Out: lengths(t, "5"), Prefix: 20, Groups: 1, Share: 1}, Turns: lengths(t, turns), Chat: true}
}

// TestTalks: a turn contains all earlier turns and real answers, and the longest waiting is next.
func TestTalks(t *testing.T) {
	shape := talkShape(t, "3")
	shape.Open, shape.Total = 2, 3
	talks := workload.NewTalks(workload.NewText(1), shape)
	var firsts []string
	for i := range 4 { // two conversations, by turns
		it := next(t, talks)
		if it.Turn != i/2+1 || len(it.Messages) != 2*it.Turn {
			t.Fatalf("%d: turn %d with %d messages", i, it.Turn, len(it.Messages))
		}
		user := string(it.Messages[1].Content)
		if i < 2 {
			firsts = append(firsts, user)
		} else if user != firsts[i%2] || string(it.Messages[2].Content) != `an \"answer\"` || it.Messages[2].Role != "assistant" {
			t.Errorf("%d: %q", i, it.Messages)
		}
		if want := 20 + 10*it.Turn + 4*(it.Turn-1); it.In != want {
			t.Errorf("%d: %d tokens, want %d", i, it.In, want)
		}
		talks.Done(it, &client.Result{Answer: []byte(`an \"answer\"`), HasUsage: true, Usage: client.Usage{Completion: 4}})
	}
	// A failure ends its conversation, and the third starts.
	talks.Done(next(t, talks), &client.Result{Kind: client.Timeout})
	talks.Done(next(t, talks), &client.Result{})
	var turns []int
	for {
		it, ok := talks.Next(t.Context())
		if !ok {
			break
		}
		turns = append(turns, it.Turn)
		talks.Done(it, &client.Result{})
	}
	if !slices.Equal(turns, []int{1, 2, 3}) {
		t.Errorf("the rest: turns %v", turns)
	}
}

// TestThink: a turn waits for its user; the end of the run ends the wait.
func TestThink(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shape := talkShape(t, "9")
		shape.Open = 1
		shape.Think, _ = workload.ParseTimes("3s")
		talks := workload.NewTalks(workload.NewText(1), shape)
		begin := time.Now()
		talks.Done(next(t, talks), &client.Result{})
		next(t, talks)
		if took := time.Since(begin); took != 3*time.Second {
			t.Errorf("thought for %v", took)
		}
		// The only conversation is out: a second client waits until the end.
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, ok := talks.Next(ctx); ok || time.Since(begin) != 4*time.Second {
			t.Errorf("after %v", time.Since(begin))
		}
	})
}
