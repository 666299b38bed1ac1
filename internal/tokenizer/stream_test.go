package tokenizer_test

import (
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"

	"github.com/xpyd/xpyd/internal/tokenizer"
)

// TestDetokenizer pushes random ids, most of them parts of characters.
func TestDetokenizer(t *testing.T) {
	for _, vocab := range []string{"gpt2", "qwen3", "stories260k", "stories260k.gguf", "metaspace-always"} {
		tok := load(t, vocab)
		var parts []int32
		for id := range int32(tok.VocabSize()) {
			if !utf8.Valid(tok.TokenBytes(id)) || strings.HasPrefix(tok.Piece(id), "▁") {
				parts = append(parts, id)
			}
		}
		r := rand.New(rand.NewPCG(5, 6))
		for range 5000 {
			ids := make([]int32, r.IntN(20))
			for i := range ids {
				if ids[i] = parts[r.IntN(len(parts))]; r.IntN(3) == 0 {
					ids[i] = r.Int32N(int32(tok.VocabSize()+4)) - 2
				}
			}
			skip := r.IntN(2) == 0
			whole := tok.Decode(ids, skip)
			cut := r.IntN(len(ids) + 1)
			// What the prompt's complete characters are, and what follows.
			prompt := tok.NewDetokenizer(skip, nil)
			var b strings.Builder
			for _, id := range ids[:cut] {
				b.WriteString(prompt.Push(id))
			}
			d := tok.NewDetokenizer(skip, ids[:cut])
			for _, id := range ids[cut:] {
				s := d.Push(id)
				if !utf8.ValidString(s) {
					t.Fatalf("%s: %v: %q is not UTF-8", vocab, ids, s)
				}
				b.WriteString(s)
			}
			b.WriteString(d.Flush())
			if b.String() != whole {
				t.Fatalf("%s: %v cut at %d: have %q, whole is %q", vocab, ids, cut, b.String(), whole)
			}
			if d.Flush() != "" {
				t.Fatal("second Flush has text")
			}
		}
	}
}

func TestDetokenizerHolds(t *testing.T) {
	tok := load(t, "qwen3")
	d := tok.NewDetokenizer(true, nil)
	var got []string
	for _, id := range tok.Encode("a𓀀<|im_end|>é", false) {
		got = append(got, d.Push(id))
	}
	if s := strings.Join(got, "|"); s != "a|||𓀀||é" {
		t.Errorf("have %q", s)
	}
	// Byte fallback: one U+FFFD a byte, and a text token ends a run of bytes.
	sp := load(t, "stories260k")
	if s := sp.Decode([]int32{3 + 0xe2, 3 + 0x82, 403, 3 + 0xe2, 3 + 0x82, 3 + 0xac}, true); s != "�� Once€" {
		t.Errorf("have %q", s)
	}
	if s := sp.TokenText(403); s != " Once" {
		t.Errorf("TokenText is %q", s)
	}
}

// TestContinue: choices go on from one prompt, each on its own: what one of them is
// given in the middle of a character is nothing to the others, nor to the prompt's.
func TestContinue(t *testing.T) {
	tok := load(t, "stories260k")
	whole := []int32{3 + 0xe2, 3 + 0x82} // of three bytes
	prompt := tok.NewDetokenizer(true, whole)
	euro, lira, again := prompt.Continue(true), prompt.Continue(true), prompt.Continue(true)
	for _, f := range []struct {
		d    *tokenizer.Detokenizer
		id   int32
		want string
	}{{euro, 3 + 0xac, "€"}, {lira, 3 + 0xa4, "₤"}, {again, 403, "\uFFFD\uFFFD Once"}, {prompt, 3 + 0xa3, "₣"}} {
		if got := f.d.Push(f.id) + f.d.Flush(); got != f.want {
			t.Errorf("token %d: %q, want %q", f.id, got, f.want)
		}
	}
	// Bytes that are held back side by side.
	split := tok.NewDetokenizer(true, []int32{3 + 0xf0})
	a, b := split.Continue(true), split.Continue(true)
	got := ""
	for i, text := range []byte("\x9f\x90\xb6") {
		got += a.Push(3 + int32(text))
		got += b.Push(3 + int32("\x93\x80\x80"[i]))
	}
	if got != "🐶𓀀" {
		t.Errorf("side by side: %q", got)
	}
}

func TestStopper(t *testing.T) {
	f := func(stops []string, include bool, chunks []string, want, hit string) {
		t.Helper()
		s := tokenizer.NewStops(stops, include).Stopper()
		got, gotHit := "", ""
		for _, c := range chunks {
			emit, h, stopped := s.Push(c)
			got += emit
			if stopped {
				if gotHit == "" {
					gotHit = h
				}
			}
		}
		if got += s.Flush(); got != want || gotHit != hit {
			t.Errorf("%q over %q: have %q, %q, want %q, %q", stops, chunks, got, gotHit, want, hit)
		}
		if emit, h, stopped := s.Push("x" + hit); emit+h+s.Skip("x")+s.Flush() != "" || !stopped {
			t.Errorf("%q over %q: it goes on with %q, %q", stops, chunks, emit, h)
		}
	}
	f(nil, false, []string{"a", "b"}, "ab", "")
	f([]string{""}, false, []string{"ab"}, "ab", "")
	f([]string{"END"}, false, []string{"xE", "N", "Dy"}, "x", "END")
	f([]string{"END"}, true, []string{"xE", "N", "Dy"}, "xEND", "END")
	f([]string{"END"}, false, []string{"xE", "N", "Ey"}, "xENEy", "")
	f([]string{"END"}, false, []string{"xEN"}, "xEN", "")
	f([]string{"aab"}, false, []string{"aaa", "ab"}, "aa", "aab")
	f([]string{"b", "abc"}, false, []string{"ab"}, "a", "b")
	f([]string{"c", "abc"}, false, []string{"xabc"}, "x", "abc")
	f([]string{"é"}, false, []string{"ê", "é"}, "ê", "é")
	f([]string{"\n\n"}, false, []string{"a\n", "b\n", "\nc"}, "a\nb", "\n\n")
}

// TestStopperGoesOn: without a stop string nothing stops, and what cannot begin one is shown at once.
func TestStopperGoesOn(t *testing.T) {
	for _, stops := range [][]string{nil, {""}, {"END"}, {"", "cE"}} {
		s := tokenizer.NewStops(stops, false).Stopper()
		for range 2 {
			if emit, hit, stopped := s.Push("abE"); stopped || hit != "" || emit+s.Flush() != "abE" {
				t.Errorf("%q: %q, %q, %t", stops, emit, hit, stopped)
			}
			s = tokenizer.NewStops(stops, false).Stopper()
			if emit := s.Skip("ab"); emit != "ab" {
				t.Errorf("%q: skipped %q", stops, emit)
			}
		}
	}
}

// TestStopperSkip: no stop string ends in skipped text, but one may begin there.
func TestStopperSkip(t *testing.T) {
	f := func(stops []string, skipped, rest []string, want, hit string) {
		t.Helper()
		s := tokenizer.NewStops(stops, false).Stopper()
		got, gotHit := "", ""
		for _, c := range skipped {
			got += s.Skip(c)
		}
		for _, c := range rest {
			emit, h, stopped := s.Push(c)
			if got += emit; stopped {
				gotHit = h
				break
			}
		}
		if got += s.Flush(); got != want || gotHit != hit {
			t.Errorf("%q over %q, %q: have %q, %q, want %q, %q", stops, skipped, rest, got, gotHit, want, hit)
		}
	}
	f([]string{"END"}, []string{"xENDy"}, []string{"z"}, "xENDyz", "")
	f([]string{"END"}, []string{"xEND"}, []string{"END"}, "xEND", "END")
	f([]string{"END"}, []string{"xE", "N"}, []string{"D"}, "x", "END")
	f([]string{"aa"}, []string{"aaa"}, []string{"a"}, "aa", "aa")
	f([]string{"b", "abc"}, []string{"ab"}, []string{"c"}, "", "abc")
	f(nil, []string{"a"}, []string{"b"}, "ab", "")
}

// TestStopperChunks cuts texts at random: the result must not change, and no
// part of a stop string may leak before it is known not to be one.
func TestStopperChunks(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	word := func(n int) string {
		var b strings.Builder
		for range 1 + r.IntN(n) {
			b.WriteString([]string{"a", "b", "é"}[r.IntN(3)])
		}
		return b.String()
	}
	for range 20_000 {
		text := word(20)
		stops := []string{word(4), word(4)}
		include := r.IntN(2) == 0
		run := func(chunks []string) (out, hit string) {
			s := tokenizer.NewStops(stops, include).Stopper()
			for _, c := range chunks {
				emit, h, stopped := s.Push(c)
				if !utf8.ValidString(emit) {
					t.Fatalf("%q over %q: %q is not UTF-8", stops, chunks, emit)
				}
				if out += emit; stopped {
					return out, h
				}
			}
			return out + s.Flush(), ""
		}
		wholeOut, wholeHit := run([]string{text})
		var chunks []string
		for rest := []rune(text); len(rest) > 0; {
			n := 1 + r.IntN(len(rest))
			chunks, rest = append(chunks, string(rest[:n])), rest[n:]
		}
		if out, hit := run(chunks); out != wholeOut || hit != wholeHit {
			t.Fatalf("%q over %q: have %q, %q, whole %q, %q", stops, chunks, out, hit, wholeOut, wholeHit)
		}
		// By definition: the stop that ends first, the longest of those.
		end, want := len(text)+1, ""
		for _, s := range stops {
			if i := strings.Index(text, s); i >= 0 && (i+len(s) < end || i+len(s) == end && len(s) > len(want)) {
				end, want = i+len(s), s
			}
		}
		cut := text
		if want != "" {
			if cut = text[:end]; !include {
				cut = text[:end-len(want)]
			}
		}
		if wholeHit != want || wholeOut != cut {
			t.Fatalf("%q over %q: have %q, %q, want %q, %q", stops, text, wholeOut, wholeHit, cut, want)
		}
	}
}

// TestConcurrent is for the race detector.
func TestConcurrent(t *testing.T) {
	tok := load(t, "gpt2")
	want := tok.Encode(prose, false)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 3 {
				if got := tok.Encode(prose, false); !slices.Equal(got, want) {
					t.Error("ids differ")
				}
			}
		})
	}
	wg.Wait()
}
