package jsonscan_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/xpyd/xpyd/internal/jsonscan"
)

// tokens reads a text in pieces of a size and lists its tokens; whole if 0.
func tokens(text []byte, size int, lenient bool) (list []string, err error) {
	s := jsonscan.Scanner{Lenient: lenient}
	read := func() {
		for k := s.Next(); k != jsonscan.None; k = s.Next() {
			t := s.Text()
			if len(t) > jsonscan.MaxToken {
				t = t[:jsonscan.MaxToken]
			}
			if k == jsonscan.Object || k == jsonscan.ObjectEnd || k == jsonscan.Array || k == jsonscan.ArrayEnd {
				t = nil
			}
			list = append(list, fmt.Sprintf("%c%s@%d-%d/%d", k, t, s.Start(), s.Pos(), s.Depth()))
		}
	}
	if size == 0 {
		s.Reset(text)
	} else {
		for piece := range slices.Chunk(text, size) {
			piece = bytes.Clone(piece)
			s.Feed(piece)
			read()
			clear(piece) // nothing of it is kept
		}
		s.Close()
	}
	read()
	return list, s.End()
}

// TestTokens: what the tokens of a text are, and where.
func TestTokens(t *testing.T) {
	const text = ` {"a" : [1, -2.5e+3, true,"x\"y"], "b":{}, "a":null } `
	want := []string{
		"{@1-2/1", ":a@2-5/1", "[@8-9/2", "01@9-10/2", "0-2.5e+3@12-19/2", "ttrue@21-25/2", `"x\"y@26-32/2`, "]@32-33/1",
		":b@35-38/1", "{@39-40/2", "}@40-41/1", ":a@43-46/1", "nnull@47-51/1", "}@52-53/0",
	}
	for size := range len(text) + 1 {
		if got, err := tokens([]byte(text), size, false); err != nil || !slices.Equal(got, want) {
			t.Errorf("in pieces of %d: %q, %v", size, got, err)
		}
	}
}

// TestErrors: what is refused, where, and that pieces change nothing about it.
func TestErrors(t *testing.T) {
	f := func(text, want string) {
		t.Helper()
		for size := range 9 {
			if _, err := tokens([]byte(text), size, false); err == nil || err.Error() != want {
				t.Errorf("%q in pieces of %d: %v, want %s", text, size, err, want)
			}
		}
	}
	f(``, "unexpected end at byte 0")
	f(`{`, "expected a string at byte 1")
	f(`{"a"}`, "expected ':' at byte 4")
	f(`{"a":1,}`, "expected a string at byte 7")
	f(`{"a":1 "b"`, "expected ',' or '}' at byte 7")
	f(`[1,]`, "unexpected character at byte 3")
	f(`[1 2]`, "expected ',' or ']' at byte 3")
	f(`[1}`, "expected ',' or ']' at byte 2")
	f(`1 2`, "trailing data at byte 2")
	f("1\x00", "trailing data at byte 1")
	f(`nul`, "invalid literal at byte 0")
	f(`[nonsense]`, "invalid literal at byte 1")
	f(`NaN`, "unexpected character at byte 0")
	for _, n := range []string{"-", "1.", "1e", "1e+", "-a"} {
		f(n, fmt.Sprintf("invalid number at byte %d", len(strings.TrimRight(n, "a"))))
	}
	f(`01`, "trailing data at byte 1")
	f(`"a`, "unterminated string at byte 2")
	f("\"a\n\"", "control character in a string at byte 2")
	f(`"\x"`, "invalid escape at byte 1")
	f(`"\u12x4"`, "invalid \\u escape at byte 5")
	f(`"\ud800"`, "lone surrogate at byte 7")
	f(`"\udc00\ud800"`, "lone surrogate at byte 6")
	f(`"\ud800\ud800"`, "lone surrogate at byte 12")
	f(`"\ud800\n"`, "lone surrogate at byte 8")
	f("[\"\xff\"]", jsonscan.ErrUTF8.Error())
	f("[\"\xc3\"]", jsonscan.ErrUTF8.Error())
	f("[\"\xe2\x82\"]", jsonscan.ErrUTF8.Error())
	f(strings.Repeat("[", 65), jsonscan.ErrDepth.Error())
	if _, err := tokens([]byte(strings.Repeat(`[{"":`, 32)+"1"+strings.Repeat(`}]`, 32)), 0, false); err != nil {
		t.Errorf("64 levels: %v", err)
	}
}

// TestDecoded: what a string stands for.
func TestDecoded(t *testing.T) {
	f := func(raw, want string) {
		t.Helper()
		if got := string(jsonscan.AppendDecoded(nil, []byte(raw))); got != want {
			t.Errorf("%s: %q, want %q", raw, got, want)
		}
	}
	f(`a\"\\\/\b\f\n\r\t`, "a\"\\/\b\f\n\r\t")
	f(`\u00e9\ud83d\uDE00`, "é😀")
	f(`\ud83dx\ude00`, "\ufffdx\ufffd")
	f(`a\`, "a")
	f(`a\u12`, "a")
	f(`a\ud83d\ude`, "a\ufffd")
	f(`a\ud83d\`, "a\ufffd")
}

// TestSkip: values are stepped over and returned as they were written.
func TestSkip(t *testing.T) {
	var s jsonscan.Scanner
	s.Reset([]byte(`{"a": [1,{"b":"]"}] ,"c" : "d\n"}`))
	var got []string
	for s.Next(); s.Next() == jsonscan.Key; {
		got = append(got, string(s.Decoded()), string(s.Raw()))
	}
	if want := []string{"a", `[1,{"b":"]"}]`, "c", `"d\n"`}; !slices.Equal(got, want) || s.End() != nil {
		t.Errorf("%q, %v", got, s.End())
	}
	s.Reset([]byte(`[1,[2`))
	s.Skip()
	var syntax *jsonscan.SyntaxError
	if s.Raw() != nil || !errors.As(s.Err(), &syntax) || syntax.At != 5 {
		t.Errorf("%v", s.Err())
	}
}

// TestItems: lists of integers, of which the plain ones are read at once.
func TestItems(t *testing.T) {
	f := func(text string, want ...string) {
		t.Helper()
		var s jsonscan.Scanner
		s.Reset([]byte(text))
		s.Next()
		var got []string
		for s.Item() {
			for _, v := range s.Ints(nil, 1000) {
				got = append(got, fmt.Sprint(v))
			}
			if k := s.Peek(); k == jsonscan.None {
				break
			} else if k != jsonscan.ArrayEnd {
				got = append(got, "raw "+string(s.Raw()))
			}
		}
		if err := s.End(); err != nil {
			got = append(got, err.Error())
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", text, got, want)
		}
	}
	f(`[]`)
	f(`[1,22 , 0,1000]`, "1", "raw 22", "0", "1000")
	f(`[1001,-1,1e2,0.5,"a",[2],7]`, "raw 1001", "raw -1", "raw 1e2", "raw 0.5", `raw "a"`, "raw [2]", "7")
	f(`[1,01]`, "1", "raw 0", "expected ',' or ']' at byte 4")
	f(`[1,2,]`, "1", "2", "unexpected character at byte 5")
	f(`[1`, "raw 1", "expected ',' or ']' at byte 2")
}

// TestBounded: of a token in pieces no more than MaxToken bytes are kept.
func TestBounded(t *testing.T) {
	var s jsonscan.Scanner
	piece := bytes.Repeat([]byte("x"), 1<<16)
	s.Feed([]byte(`{"`))
	s.Next()
	if n := testing.AllocsPerRun(100, func() {
		if s.Next() != jsonscan.None || s.Err() != nil {
			t.Fatal(s.Err())
		}
		s.Feed(piece)
	}); n > 0 || s.Cut() != jsonscan.Key || len(s.Text()) != jsonscan.MaxToken {
		t.Errorf("%v allocations a piece, %q of %d bytes", n, s.Cut(), len(s.Text()))
	}
	whole := []byte(`{"a":[1,"b",{"c":true}],"d":"` + strings.Repeat("x", 1<<16) + `"}`)
	if n := testing.AllocsPerRun(100, func() {
		s.Reset(whole)
		if s.Skip(); s.End() != nil {
			t.Fatal(s.End())
		}
	}); n > 0 {
		t.Errorf("%v allocations a text", n)
	}
}

// FuzzScanner: it takes what encoding/json takes, but for what it says it refuses,
// and reads the same in pieces.
func FuzzScanner(f *testing.F) {
	for _, text := range []string{
		` {"a" : [1, -2.5e3,true,false,null ,"x\u00e9\ud83d\ude00\n\/"], "b":{}, "a":[]}`, `[1,]`, `{"a"}`, `{1:2}`, `"a`, "\"\n\"", `"\x"`,
		`01`, `[nul]`, `1 2`, "\"a\xff\"", "", `-`, `-0.0E-1`, `"\ud800"`, "[\"\u20ac\"]", `"\ud800\udc00\udc00"`, strings.Repeat("[", 70),
	} {
		f.Add([]byte(text), uint8(3))
	}
	f.Fuzz(func(t *testing.T, text []byte, size uint8) {
		for _, lenient := range []bool{false, true} {
			whole, err := tokens(text, 0, lenient)
			var syntax *jsonscan.SyntaxError
			switch valid := json.Valid(text); {
			case err == nil && (!valid || !lenient && !utf8.Valid(text)):
				t.Fatalf("%q is taken", text)
			case err == nil || !valid || err == jsonscan.ErrDepth:
			case lenient:
				t.Fatalf("%q is refused: %v", text, err)
			case err == jsonscan.ErrUTF8:
				if utf8.Valid(text) {
					t.Fatalf("%q: %v", text, err)
				}
			case !errors.As(err, &syntax) || syntax.What != "lone surrogate":
				t.Fatalf("%q is refused: %v", text, err)
			}
			pieces, cut := tokens(text, int(size)+1, lenient)
			if (err == nil) != (cut == nil) || err == nil && !slices.Equal(whole, pieces) {
				t.Fatalf("%q: %q, %v; in pieces of %d: %q, %v", text, whole, err, size+1, pieces, cut)
			}
			if err == nil && !lenient {
				checkStrings(t, text)
			}
		}
	})
}

// checkStrings holds each string against encoding/json's.
func checkStrings(t *testing.T, text []byte) {
	var s jsonscan.Scanner
	s.Reset(text)
	for k := s.Next(); k != jsonscan.None; k = s.Next() {
		if k != jsonscan.Key && k != jsonscan.String {
			continue
		}
		raw := text[s.Start():s.Pos()]
		var want string
		if err := json.Unmarshal(raw, &want); err != nil || string(s.Decoded()) != want {
			t.Fatalf("%s: %q, want %q, %v", raw, s.Decoded(), want, err)
		}
	}
}
