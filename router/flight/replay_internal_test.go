package flight

import (
	"fmt"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/openai"
)

// told is an event of a completion; ids is raw JSON.
func told(text, ids, finish string) string {
	return fmt.Sprintf("data: {\"id\":\"a\",\"choices\":[{\"index\":0,\"text\":%q,\"finish_reason\":%s,\"token_ids\":%s}]}\n\n", text, finish, ids)
}

func first(text, ids string) string {
	return strings.Replace(told(text, ids, "null"), "}]}", `,"prompt_token_ids":[7,8]}]}`, 1)
}

// rereading is a seam of a foreign engine's stream that has been given these runs.
func rereading(t *testing.T, most, held int, runs ...string) (s *seam, got string) {
	t.Helper()
	s, _ = seamOf(t, 1, most)
	s.replays, s.held = true, held
	s.rereads(false)
	for _, run := range runs {
		got += stripped(s, run)
	}
	return s, got
}

// TestReread: where another engine would go on, and what it would have to repeat.
func TestReread(t *testing.T) {
	f := func(held int, events []string, n int, again string) {
		t.Helper()
		for _, runs := range [][]string{events, {strings.Join(events, "")}} {
			s, got := rereading(t, 0, held, runs...)
			if strings.Contains(got, "_ids\":[") || strings.Count(got, "data: ") != len(events) || s.lost {
				t.Errorf("%q: lost %t, %q", events, s.lost, got)
			}
			s.back()
			if c := &s.choices[0]; c.n != n || len(c.ids) != openai.IDBytes*n || string(s.re.tail) != again {
				t.Errorf("held %d, %q: behind %d tokens, again %q", held, events, c.n, s.re.tail)
			}
		}
	}
	one, two := told("b", "[2]", "null"), told("bc", "[2,3]", "null")
	none := told("", "[4]", "null")
	f(0, []string{first("a", "[1]")}, 1, "")
	f(0, []string{first("a", "[1]"), one}, 2, "")
	f(0, []string{first("a", "[1]"), one, none, none}, 2, "") // held back: drawn again
	f(0, []string{first("a", "[1]"), none, one}, 3, "")
	f(0, []string{first("a", "[1]"), two}, 1, "bc") // the third may end within a character
	f(0, []string{first("a", "[1]"), two, none}, 1, "bc")
	f(0, []string{first("a", "[1]"), two, one}, 4, "")
	f(0, []string{first("ab", "[1,2]"), none}, 0, "ab")
	f(0, []string{first("", "[1]")}, 0, "")
	f(0, []string{first("a", "[1]"), told("日", "[2]", "null"), two}, 2, "bc")
	// Two characters are held back: the text of the first token ended at 3, of the second at 4.
	f(2, []string{first("a", "[1]"), one}, 0, "ab")
	f(2, []string{first("a", "[1]"), one, one, one}, 0, "abbb")
	f(2, []string{first("a", "[1]"), one, one, one, one}, 1, "bb")
	f(2, []string{first("a", "[1]"), one, one, one, one, one, none}, 2, "bb")
}

// TestRereadBad: what makes no sense ends the possibility of a takeover with a reason, not the stream.
func TestRereadBad(t *testing.T) {
	ok := first("a", "[1]")
	for _, c := range []struct{ run, why string }{
		{told("a", "[1]", "null"), "the prompt"},
		{told("a", "null", "null"), "which tokens it sent"},
		{ok + told("b", "null", "null"), "which tokens it sent"},
		{ok + told("b", "[]", "null"), "which tokens it sent"},
		{ok + told("b", `["2"]`, "null"), "token_ids"},
		{ok + told("b", "[-2]", "null"), "token_ids"},
		{ok + told("b", "[16777216]", "null"), "token_ids"},
		{ok + told("b", `{}`, "null"), "token_ids"},
		{ok + told("b", "[1,2,3,4,5]", "null"), "more tokens than it may"},
		{strings.Replace(ok, "[7,8]", "[]", 1), "prompt_token_ids"},
		{strings.Replace(ok, "[7,8]", "[7,8.5]", 1), "prompt_token_ids"},
		{strings.Replace(ok, "[7,8]", "7", 1), "prompt_token_ids"},
		{ok + strings.Replace(told("b", "[2]", "null"), `"index":0`, `"index":1`, 1), "another choice"},
		{ok + strings.Replace(told("b", "[2]", "null"), `[{`, `[{},{`, 1), "another choice"},
		{ok + strings.Replace(told("b", "[2]", "null"), `"text":`, `"logprobs":{},"text":`, 1), "more than text"},
		{ok + "data: {\"choices\":[}\n\n", "not JSON"},
	} {
		s, got := rereading(t, 4, 0, c.run)
		if !s.lost || s.whole() || !strings.Contains(s.why(), c.why) {
			t.Errorf("%q: lost %t, %q", c.run, s.lost, s.why())
		}
		if strings.Count(got, "data: ") != strings.Count(c.run, "data: ") || strings.Contains(got, "_ids\":[1") || s.pot.bytes.Load() != 0 {
			t.Errorf("%q became %q, %d bytes stay", c.run, got, s.pot.bytes.Load())
		}
		if more := stripped(s, told("z", "[9]", "null")); !strings.Contains(more, `"z"`) || strings.Contains(more, "9") || len(s.re.tail) > 1 {
			t.Errorf("%q: then %q", c.run, more)
		}
	}
	long := []string{first("a", "[1]")}
	for range maxTail/100 + 1 {
		long = append(long, told(strings.Repeat("b", 100), "[1,2]", "null"))
	}
	if s, _ := rereading(t, 0, 0, long...); !strings.Contains(s.why(), "for too long") {
		t.Errorf("lost %t, %q", s.lost, s.why())
	}
}

// TestRereadMost: 4 KiB may have to be drawn again, and no byte more.
func TestRereadMost(t *testing.T) {
	for n, lost := range map[int]bool{4096: false, 4097: true} {
		s, _ := rereading(t, 0, 0, first("a", "[1]"), told(strings.Repeat("b", n), "[1,2]", "null"))
		if s.lost != lost || strings.Contains(s.why(), "for too long") != lost {
			t.Errorf("%d bytes: lost %t, %q", n, s.lost, s.why())
		}
	}
}

// TestRereadNext: the rest of a stream from another engine, as the client gets it.
func TestRereadNext(t *testing.T) {
	const usage = "data: {\"id\":\"b\",\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2,\"total_tokens\":5}}\n\n"
	next := func(text, finish string) string {
		return `data: {"id":"a","choices":[{"index":0,"text":` + text + `,"logprobs":null,"finish_reason":` + finish + `,"stop_reason":null}]}` + "\n\n"
	}
	f := func(runs []string, want, fault string) {
		t.Helper()
		s, _ := rereading(t, 0, 0, first("a", "[1]"), told("bc", "[2,3]", "null"))
		s.back()
		got := ""
		for _, run := range runs {
			got += stripped(s, strings.ReplaceAll(run, `"id":"a"`, `"id":"b"`))
		}
		if got != want || !strings.Contains(string(s.fault), fault) || (s.fault == "") != (fault == "") || s.lost != (fault != "" && fault != "core") {
			t.Errorf("%q: fault %q, lost %t\n%s\nwant\n%s", runs, s.fault, s.lost, got, want)
		}
		if s.re.drew != (fault == "other text") { // then the engine is not blamed
			t.Errorf("%q: fault %q, drew other text: %t", runs, s.fault, s.re.drew)
		}
	}
	all := []string{told("b", "[2]", "null"), ": ping\n\n", told("cd", "[3]", "null"), told("e", "[4]", `"stop"`), usage, done}
	want := ": ping\n\n" + next(`"d"`, "null") + next(`"e"`, `"stop"`) +
		"data: {\"id\":\"a\",\"choices\":[],\"usage\":{\"prompt_tokens\":2,\"completion_tokens\":3,\"total_tokens\":5}}\n\n" + done
	f(all, want, "")
	f([]string{strings.Join(all, "")}, want, "")
	f([]string{told("bcd", "[2]", `"length"`)}, next(`"d"`, `"length"`), "")
	f([]string{told("bc", "[2]", `"length"`)}, next(`""`, `"length"`), "")
	f([]string{told("", "[2]", "null"), told("bcd", "[3]", "null")}, next(`""`, "null")+next(`"d"`, "null"), "")
	f([]string{told("x", "[2]", "null")}, "", "other text")
	f([]string{told("b", "[2]", "null"), told("x", "[2]", "null")}, "", "other text")
	f([]string{told("b", "[2]", `"stop"`)}, "", "other text") // it ends before what the client has
	f([]string{told("bcd", "[2]", "null"), "data: {\"choices\":[}\n\n"}, next(`"d"`, "null"), "not JSON")
	f([]string{told("bcd", "[2]", "null"), "data: {\"choices\":[{\"delta\":{\"reasoning\":\"x\"}}]}\n\n"}, next(`"d"`, "null"), "more than text")
	f([]string{told("bcd", "[2]", "null") + `data: {"error":{"message":"core","code":500}}` + "\n\n" + done}, next(`"d"`, "null"), "core")
	f([]string{told("bcd", "[2]", "null") + `data: {"error":{"message":"yours","code":400}}` + "\n\n"}, next(`"d"`, "null")+`data: {"error":{"message":"yours","code":400}}`+"\n\n", "")
}

// TestAgrees: the next engine must have read what it was sent.
func TestAgrees(t *testing.T) {
	s, _ := rereading(t, 0, 0, first("a", "[1]"), told("b", "[2]", "null"))
	s.back()
	for ids, ok := range map[string]bool{"[7,8,1,2]": true, "[7,8,1]": false, "[0,7,8,1,2]": false, "[7,8,2,1]": false, "[7,8,1,2,3]": false, "null": false, "[]": false, "x": false} {
		for _, front := range []string{"", ": ping\n\n"} {
			err := s.agrees([]byte(front + strings.Replace(first("c", "[3]"), "[7,8]", ids, 1)))
			if (err == nil) != ok {
				t.Errorf("%s: %v", ids, err)
			}
		}
	}
}

// TestEngineFault: which errors another engine may not have.
func TestEngineFault(t *testing.T) {
	for data, want := range map[string]bool{
		`{"error":{"message":"m","type":"InternalServerError","param":null,"code":500}}`: true, `{"error":{"message":"m","type":"Internal Server Error"}}`: true,
		`{"error":{"message":"m","type":"server_error","code":"engine_failed"}}`: true, `{"object":"error","message":"m","code":503}`: true,
		`{"error":{"message":"m","type":"BadRequestError","code":400}}`: false, `{"error":{"message":"m","code":"500x"}}`: false, `{"error":"m"}`: false,
		`{"choices":[],"error":{"code":500}}`: false, `{"error":`: false,
	} {
		if why, got := engineFault([]byte(data)); got != want || got && why != "m" {
			t.Errorf("%s: %t, %q", data, got, why)
		}
	}
}

// TestReplayEnd: what is missing behind the last token is known.
func TestReplayEnd(t *testing.T) {
	for body, want := range map[string]string{
		`{}`: done, `{"stream_options":{"include_usage":false}}`: done,
		`{"stream_options":{"include_usage":true}}`: "data: {\"id\":\"a\",\"choices\":[],\"usage\":{\"prompt_tokens\":2,\"completion_tokens\":2,\"total_tokens\":4}}\n\n" + done,
	} {
		s, _ := rereading(t, 0, 0, first("a", "[1]"), told("b", "[2]", `"stop"`))
		s.body = []byte(body)
		if got := string(s.rest()); got != want || s.open != 0 {
			t.Errorf("%s: %s, %d open", body, got, s.open)
		}
	}
}

// TestRereadRoom: prompt and answer count against what is kept for all streams.
func TestRereadRoom(t *testing.T) {
	for _, free := range []int{0, 20} {
		s, p := seamOf(t, 1, 0)
		s.rereads(false)
		rest := maxKept - int(p.bytes.Load()) - free
		if !p.take(rest) {
			t.Fatal("no room")
		}
		stripped(s, first("a", "[1]"))
		if !s.lost || !strings.Contains(s.why(), "other streams") || int(p.bytes.Load()) != rest {
			t.Errorf("%d free: lost %t, %q, %d bytes stay", free, s.lost, s.why(), int(p.bytes.Load())-rest)
		}
	}
}

// FuzzReread: whatever engines send, a seam keeps to its bounds, and what is kept agrees.
func FuzzReread(f *testing.F) {
	f.Add([]byte(first("a", "[1]")+told("bc", "[2,3]", "null")), []byte(told("bcd", "[2]", `"stop"`)+done), uint8(0))
	f.Add([]byte(first("é", "[1]")+told("", "[2]", "null")), []byte("data: {\"error\":{\"code\":500}}\n\n"), uint8(3))
	f.Fuzz(func(t *testing.T, one, two []byte, held uint8) {
		p := &pot{}
		s := newSeam(p, []byte(`{}`), &openai.Top{N: 1, Prompts: 1})
		s.held = int(held)
		s.rereads(true)
		for i, run := range [][]byte{one, one, two, two} {
			s.reread(run)
			if c := s.choices; s.whole() && (len(c[0].ids) != openai.IDBytes*c[0].n || s.re.marks[0].n > c[0].n || len(s.re.marks) > 2*int(held)+2) {
				t.Fatalf("%+v of %+v", s.re, c)
			}
			if s.re.heard > s.re.sent || len(s.re.tail) > maxTail+len(one)+len(two) {
				t.Fatalf("%+v", s.re)
			}
			if i == 1 && s.whole() {
				s.back()
			}
		}
		if s.release(); p.bytes.Load() != 0 {
			t.Fatalf("%d bytes stay", p.bytes.Load())
		}
	})
}

// BenchmarkReread is what a foreign engine's event costs while all is well.
func BenchmarkReread(b *testing.B) {
	enc := openai.NewEncoder(openai.Meta{ID: "chatcmpl-0123456789abcdef", Model: "stories260k", Created: 1732550000, Chat: true, ReturnTokenIDs: true})
	event := enc.AppendChunk(nil, &openai.Choice{Text: " word", TokenIDs: []int32{1234}}, nil)
	s := newSeam(&pot{}, nil, &openai.Top{N: 1, Prompts: 1})
	s.rereads(true)
	s.reread([]byte(first("a", "[1]")))
	b.ReportAllocs()
	for b.Loop() {
		if got := s.reread(event); len(got) == 0 || s.lost {
			b.Fatalf("%q", got)
		}
		if c := &s.choices[0]; c.n > 20000 {
			c.n, c.ids = 0, c.ids[:0]
		}
	}
}
