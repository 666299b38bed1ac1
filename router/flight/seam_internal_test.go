package flight

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/openai"
)

const (
	frame0 = ":t 0 00070008 1732550000 0123456789abcdef\n"
	event0 = "data: {\"choices\":[{\"index\":0,\"text\":\"a\",\"finish_reason\":null}]}\n\n"
	finish = "data: {\"choices\":[{\"index\":0,\"text\":\"\",\"finish_reason\":\"stop\",\"stop_reason\":null}]}\n\n"
	usage0 = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":1}}\n\n"
	done   = "data: [DONE]\n\n"
)

func seamOf(t *testing.T, n, most int) (*seam, *pot) {
	t.Helper()
	p := &pot{}
	s := newSeam(p, []byte(`{}`), &openai.Top{N: n, Prompts: 1, MaxTokens: most})
	if s.lost {
		t.Fatal("no room")
	}
	return s, p
}

// stripped gives a run to s, and counts its events as the relay does.
func stripped(s *seam, run string) string {
	rest, _ := s.strip([]byte(run), countEvents([]byte(run)))
	return string(rest)
}

// TestStrip: frames never reach the client, whatever they say.
func TestStrip(t *testing.T) {
	const second, last = ":t 0 0009\n", ":f 0 0009\n"
	for _, c := range []struct{ run, want, given string }{
		{frame0 + event0, event0, `{"ids":[7,8]}`},
		{frame0 + event0 + second + event0, event0 + event0, `{"ids":[7,8,9]}`},
		{frame0 + event0 + second + event0 + last + finish + usage0 + done, event0 + event0 + finish + usage0 + done, `{"ids":[7,8,9,9],"done":true}`},
		{": ping\n\n" + frame0 + event0 + ": ping\n\n", ": ping\n\n" + event0 + ": ping\n\n", `{"ids":[7,8]}`},
		{frame0 + event0 + ":f 0 \n" + finish, event0 + finish, `{"ids":[7,8],"done":true}`},
		{frame0 + event0 + ":t 0\n" + event0 + done, event0 + event0 + done, `{"ids":[7,8]}`},
		{frame0 + event0 + ":e {\"error\":{\"message\":\"why\"}}\n\n", event0, `{"ids":[7,8]}`},
		{frame0 + event0 + ":e \n\n" + second + event0, event0 + event0, `{"ids":[7,8,9]}`},
		{"\n\n" + frame0 + event0, "\n\n" + event0, `{"ids":[7,8]}`},
		{frame0 + event0 + "data: {\"error\":{}}\n\n", event0 + "data: {\"error\":{}}\n\n", `{"ids":[7,8]}`},
	} {
		s, p := seamOf(t, 1, 0)
		if got := stripped(s, c.run); got != c.want {
			t.Errorf("%q: %q, want %q", c.run, got, c.want)
		}
		want := `{"created":1732550000,"prompt":"0123456789abcdef","choices":[` + c.given + `]}`
		if got := string(s.given()); got != want || !json.Valid(s.given()) {
			t.Errorf("%q: given %s, want %s", c.run, got, want)
		}
		if s.release(); p.bytes.Load() != 0 || s.given() != nil {
			t.Errorf("%d bytes stay", p.bytes.Load())
		}
	}
}

// TestStripBad: what makes no sense ends the possibility of a takeover, not the stream.
func TestStripBad(t *testing.T) {
	for _, c := range []string{
		":t 0 0001\n" + event0,
		":t 1 0001 1 0123456789abcdef\n" + event0,
		":t -1 0001 1 0123456789abcdef\n" + event0,
		":t 0 00010 1 0123456789abcdef\n" + event0,
		":t 0 000/ 1 0123456789abcdef\n" + event0,
		":t 0 000p 1 0123456789abcdef\n" + event0,
		":t 0 0001\xff0001 1 0123456789abcdef\n" + event0,
		":t 0 0001 0002 1 0123456789abcdef\n" + event0,
		":t 0 0001 1 0123456789abcde\n" + event0,
		":t 0 0001 1 0123456789abcdeg\n" + event0,
		":t 0 0001 1 0123456789abcdef \n" + event0,
		":t 0 0001 x 0123456789abcdef\n" + event0,
		":t 0 0001 01 0123456789abcdef\n" + event0,
		":t 99999999999 0001 1 0123456789abcdef\n" + event0,
		":t 0\n" + event0,
		":t \n" + event0,
		":t 0 0001000200030004 1 0123456789abcdef\n" + event0,       // more than may be drawn
		frame0 + event0 + ":t 0 0001 2 0123456789abcdef\n" + event0, // another stream's
		frame0 + event0 + ":t 0 0001 1732550000 0123456789abcdee\n" + event0,
		":f" + frame0[2:] + finish + ":t 0 0001\n" + event0, // after its finish
		event0, // none at all
		frame0 + event0 + usage0,
		":f" + frame0[2:] + finish + usage0 + usage0,
	} {
		s, p := seamOf(t, 1, 3)
		var want strings.Builder
		for _, line := range strings.SplitAfter(c, "\n") {
			if !strings.HasPrefix(line, ":t ") && !strings.HasPrefix(line, ":f ") {
				want.WriteString(line)
			}
		}
		if got := stripped(s, c); got != want.String() {
			t.Errorf("%q became %q", c, got)
		}
		if s.whole() || s.given() != nil || p.bytes.Load() != 0 {
			t.Errorf("%q is accepted: %s, %d bytes", c, s.given(), p.bytes.Load())
		}
		if got := stripped(s, frame0+event0+frame0+finish); got != event0+finish {
			t.Errorf("afterwards: %q", got)
		}
	}
}

// TestStripChoices: each choice has its own tokens, and a place in the list though it has none.
func TestStripChoices(t *testing.T) {
	s, _ := seamOf(t, 3, 0)
	stripped(s, frame0+event0+":f 2 0001\n"+finish+":t 0 0009\n"+event0)
	if got, want := string(s.given()), `{"created":1732550000,"prompt":"0123456789abcdef","choices":[{"ids":[7,8,9]},{"ids":[]},{"ids":[1],"done":true}]}`; got != want {
		t.Errorf("%s", got)
	}
	if s.open != 2 {
		t.Errorf("%d open", s.open)
	}
}

// TestPot: what is kept for all streams together is bounded, and given back.
func TestPot(t *testing.T) {
	p := &pot{}
	top := &openai.Top{N: 1, Prompts: 1}
	body := make([]byte, maxKept-200)
	s := newSeam(p, body, top)
	if s.lost || !newSeam(p, make([]byte, 200), top).lost || p.bytes.Load() > maxKept {
		t.Fatal("the bound does not hold")
	}
	stripped(s, frame0+event0)
	if !s.whole() {
		t.Error("its first tokens have no room")
	}
	many := strings.Repeat("0001", 60)
	if stripped(s, ":t 0 "+many+"\n"+event0); s.whole() || p.bytes.Load() != 0 {
		t.Errorf("%d bytes are kept", p.bytes.Load())
	}
	if s = newSeam(p, body[:10], top); len(s.body) != 10 || cap(s.body) > 32 {
		t.Errorf("a body of 10 bytes keeps %d", cap(s.body))
	}
}

// TestKept: a long stream takes no more than twice its ids.
func TestKept(t *testing.T) {
	s, p := seamOf(t, 1, 0)
	stripped(s, frame0+event0)
	for range 10000 {
		stripped(s, ":t 0 030i\n"+event0)
	}
	if got, ids := p.bytes.Load(), int64(len(s.choices[0].ids)); got > 2*ids+100 || int64(cap(s.choices[0].ids)) > got || s.choices[0].n != 10002 {
		t.Errorf("%d bytes for %d of %d ids", got, ids, s.choices[0].n)
	}
}

func FuzzStrip(f *testing.F) {
	f.Add([]byte(frame0+event0+frame0+finish+usage0+done), 1)
	f.Add([]byte(":t \n\n:t\n\n\n\n:f 0 \n"), 2)
	f.Add([]byte(":t 0 00 0000000000000000\n\n"), 1)
	f.Add([]byte(":t 0 0000o/ 0 0000000000000000\n\n"), 1)
	f.Fuzz(func(t *testing.T, in []byte, n int) {
		if n < 1 || n > 100 {
			return
		}
		s, p := seamOf(t, n, 0)
		e := &events{body: bytesOf{bytes.NewReader(in)}}
		for {
			run, err := e.next()
			if err != nil {
				break
			}
			before := bytes.Clone(run)
			got, _ := s.strip(run, e.n)
			if len(got) > len(before) || len(before) > 0 && bytes.Count(got, []byte("data:")) > bytes.Count(before, []byte("data:")) {
				t.Fatalf("%q became %q", before, got)
			}
			if s.whole() && !json.Valid(s.given()) {
				t.Fatalf("%q: %s", in, s.given())
			}
		}
		if s.release(); p.bytes.Load() != 0 {
			t.Fatalf("%d bytes stay", p.bytes.Load())
		}
	})
}

// BenchmarkStrip is an event's way through the relay, without frames and with them taken out.
func BenchmarkStrip(b *testing.B) {
	enc := openai.NewEncoder(openai.Meta{ID: "chatcmpl-0123456789abcdef", Model: "stories260k", Created: 1732550000, Chat: true})
	event := enc.AppendChunk(nil, &openai.Choice{Text: " word"}, nil)
	for _, c := range []struct {
		name   string
		frame  string
		events int
	}{{"without", "", 1}, {"frame", ":t 0 030i\n", 1}, {"without", "", 8}, {"frame", ":t 0 030i\n", 8}} {
		b.Run(fmt.Sprintf("%s/%d", c.name, c.events), func(b *testing.B) {
			run := bytes.Repeat(append([]byte(c.frame), event...), c.events)
			e := &events{body: &lasting{bytesOf: bytesOf{&again{run}}}}
			s := newSeam(&pot{}, nil, &openai.Top{N: 1, Prompts: 1})
			s.strip([]byte(frame0+event0), 1)
			b.ReportAllocs()
			for range b.N {
				got, err := e.next()
				if err != nil {
					b.Fatal(err)
				}
				if c.frame == "" {
					continue
				}
				if got, _ = s.strip(got, e.n); len(got) != c.events*len(event) || s.lost {
					b.Fatalf("%q", got)
				}
				if c := &s.choices[0]; len(c.ids) > 20000 {
					c.ids = c.ids[:0]
				}
			}
		})
	}
}

// again returns the same bytes with each read.
type again struct{ b []byte }

func (a *again) Read(p []byte) (int, error) { return copy(p, a.b), nil }

// TestStripShort: that blocks are short is noted, and neither the client nor the count of tokens has
// it. It is over when the stream goes on.
func TestStripShort(t *testing.T) {
	for run, c := range map[string]struct {
		want string
		n    int
		word short
	}{
		":s soon\n\n":                             {"", 0, shortSoon},
		":s now\n\n":                              {"", 0, shortNow},
		":s \n\n":                                 {"", 0, ""},
		":s nowhere\n\n":                          {"", 0, ""},
		frame0 + event0 + ":s soon\n\n":           {event0, 1, shortSoon},
		":s now\n\n" + frame0 + event0:            {event0, 1, shortSoon},
		":s now\n\n:s soon\n\n":                   {"", 0, shortSoon},
		":s soon\n\n" + frame0 + event0:           {event0, 1, shortSoon},
		frame0 + event0 + ":s soon\n\n:s now\n\n": {event0, 1, shortNow},
	} {
		s, _ := seamOf(t, 1, 0)
		got, n := s.strip([]byte(run), countEvents([]byte(run)))
		if string(got) != c.want || n != c.n || s.short != c.word || s.lost {
			t.Errorf("%q: %q, %d events, %q, lost %t", run, got, n, s.short, s.lost)
		}
	}
}

// TestFar: a stream is worth a move while some choice has more than a few tokens to come, or may
// have any number.
func TestFar(t *testing.T) {
	for name, c := range map[string]struct {
		most int
		list []sent
		want bool
	}{
		"nothing known":      {64, nil, false},
		"far":                {64, []sent{{n: 64 - moveLeast}}, true},
		"near":               {64, []sent{{n: 65 - moveLeast}}, false},
		"one is far":         {64, []sent{{n: 64}, {n: 3}}, true},
		"that is done":       {64, []sent{{n: 64}, {n: 3, done: true}}, false},
		"no bound":           {0, []sent{{n: 1000}}, true},
		"no bound, all done": {0, []sent{{n: 1000, done: true}}, false},
	} {
		if got := (&seam{most: c.most, choices: c.list}).far(moveLeast); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

// TestRoom: what a choice has sent stays, however often its list grows, and its memory is counted.
func TestRoom(t *testing.T) {
	s, c := &seam{pot: &pot{}}, &sent{}
	for i := range 1000 {
		if !s.room(c, 3) {
			t.Fatal("no room")
		}
		c.ids = fmt.Appendf(c.ids, "%02d,", i%100)
	}
	for i := range 1000 {
		if got := string(c.ids[3*i:][:3]); got != fmt.Sprintf("%02d,", i%100) {
			t.Fatalf("%d is %s", i, got)
		}
	}
	if n := s.pot.bytes.Load(); n < int64(cap(c.ids)) || n != s.taken || n > 4000 {
		t.Errorf("%d bytes are counted of %d", n, cap(c.ids))
	}
	s.pot.bytes.Store(maxKept)
	if kept := string(c.ids); s.room(c, 1000) || string(c.ids) != kept {
		t.Error("there is room, or the list is another")
	}
}
