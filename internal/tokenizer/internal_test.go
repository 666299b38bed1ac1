package tokenizer

import (
	"encoding/json"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"golang.org/x/text/unicode/norm"
)

var atoms = []string{" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\u0085", "'s", "'S", "'ll", "'LL", "'ſ", "'", "'r", "'re", "a", "Z", "é", "e\u0301",
	"你", "ſ", "1", "123", "½", "٣", "!", "?!", "…", "<|", "_", "\u200d", "😀", "\x00", "\U0010ffff", "\uFFFD", "Ⅷ", "ǅ",
	"@", "A", "[", "`", "z", "{", "/", "0", "9", ":", "\b", "\v", "\x0e", "\x1f", "\x7f"} // beside each range of ASCII

func randomText(r *rand.Rand, n int) string {
	var b strings.Builder
	for range r.IntN(n) {
		b.WriteString(atoms[r.IntN(len(atoms))])
	}
	return b.String()
}

// TestCuttersByHand compares the hand-written cutters with their patterns.
func TestCuttersByHand(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for _, pattern := range []string{gpt2Pattern, llama3Pattern, qwen2Pattern} {
		hand, err := patternCutter(pattern)
		if err != nil {
			t.Fatal(err)
		}
		slow, err := regexpCutter(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for range 20_000 {
			for s := randomText(r, 12); s != ""; {
				n, ok := hand(s)
				m, match := slow(s)
				if n != m || ok != match || n < 1 {
					t.Fatalf("%s\ncuts %q by hand at %d (%v), by pattern at %d (%v)", pattern, s, n, ok, m, match)
				}
				s = s[n:]
			}
		}
	}
}

func TestPatterns(t *testing.T) {
	f := func(pattern, text string, want ...string) {
		t.Helper()
		cut, err := regexpCutter(pattern)
		if err != nil {
			t.Error(err)
			return
		}
		var got []string
		for s := text; s != ""; {
			n, _ := cut(s)
			got, s = append(got, s[:n]), s[n:]
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s cuts %q into %q", pattern, text, got)
		}
	}
	f(`\d+`, "a12b", "a", "12", "b")
	f(`[\s\d]+|\S`, "1 2ab", "1 2", "a", "b")
	f(`a(?:b|c)+\+`, "xabc+y", "x", "abc+", "y")
	f(`(a)|\s+(?!\S)|\s+`, "a   b", "a", "  ", " ", "b")
	f(`x*`, "aaa", "aaa")
	f(`[[:digit:]]+|[a-c]`, "12b", "12", "b")
	bad := func(pattern string) {
		t.Helper()
		if _, err := regexpCutter(pattern); err == nil {
			t.Errorf("%s compiles", pattern)
		}
	}
	for _, pattern := range []string{`a(?=b)`, `a(?!b)`, `(?<!a)b`} {
		if _, err := regexpCutter(pattern); err == nil || !strings.Contains(err.Error(), "look-around") {
			t.Errorf("%s: %v", pattern, err)
		}
	}
	bad(`\s+(?!\S)|\s+(?!\S)`)
	bad(`a++`)
	bad(`[a-z&&[^b]]`)
	bad(`\bword`)
	bad(`[\S]`)
	bad(`(`)
}

// TestPatternDialect: what a pattern of the other dialect matches here, and what is refused with a reason.
func TestPatternDialect(t *testing.T) {
	for _, c := range []struct {
		pattern, text string
		n             int
		ok            bool // the first piece is a match
		refused       string
	}{
		{`\S+`, "ab\u00a0c", 2, true, ""}, {`\s`, "\u2003a", 3, true, ""}, {`[\s]+`, " \u3000a", 4, true, ""}, {`[^\s]+`, "ab c", 2, true, ""},
		{`\d+`, "٣4a", 3, true, ""}, {`[\d]+`, "٣4a", 3, true, ""}, {`[^\d]+`, "ab٣", 2, true, ""},
		{`b`, "aab", 2, false, ""}, {`b`, "aa", 2, false, ""}, {`b*`, "aab", 3, false, ""},
		{`a\++`, "a++b", 3, true, ""}, {`a+`, "aab", 2, true, ""}, {`[+]+`, "++a", 2, true, ""}, {`[[:alpha:]]+`, "ab1", 2, true, ""}, {`(?:ab)+`, "ababa", 4, true, ""}, {`(a)(b)`, "abc", 2, true, ""}, {`[(]`, "(", 1, true, ""},
		{`(a)|\s+(?!\S)|\s+`, "   a", 2, true, ""}, {`(a)|\s+(?!\S)|\s+`, " a", 1, true, ""}, {`(a)|\s+(?!\S)|\s+`, "  ", 2, true, ""}, {`(a)|\s+(?!\S)|\s+`, "a  ", 1, true, ""},
		{pattern: `a\`, refused: "trailing backslash"}, {pattern: `[a\`, refused: "error parsing"}, {pattern: `\w`, refused: `\w is not supported here`}, {pattern: `[\w]`, refused: `\w is not supported here`}, {pattern: `(a)\1`, refused: `\1 is not supported here`},
		{pattern: `[\S]`, refused: `\S is not supported here`}, {pattern: `[a[b]]`, refused: "nested classes"}, {pattern: `[a&&b]`, refused: "nested classes"}, {pattern: `a++`, refused: "possessive"}, {pattern: `a?+`, refused: "possessive"}, {pattern: `a*+`, refused: "possessive"},
		{pattern: `\s+(?!\S)b|\s+(?!\S)`, refused: "two look-aheads"}, {pattern: `[a`, refused: "error parsing"},
	} {
		cut, err := regexpCutter(c.pattern)
		if (err == nil) != (c.refused == "") || err != nil && !strings.Contains(err.Error(), c.refused) {
			t.Errorf("%s: %v", c.pattern, err)
		}
		if err != nil || c.refused != "" {
			continue
		}
		if n, ok := cut(c.text); n != c.n || ok != c.ok {
			t.Errorf("%s in %q: %d bytes, %t; want %d, %t", c.pattern, c.text, n, ok, c.n, c.ok)
		}
	}
}

// TestReadDecoder: how the text of tokens is made, as the file has it, and what is refused.
func TestReadDecoder(t *testing.T) {
	seq := func(parts ...string) string {
		return `{"type":"Sequence","decoders":[` + strings.Join(parts, ",") + `]}`
	}
	metaspace := func(more string) string { return `{"type":"Metaspace","replacement":"▁"` + more + `}` }
	replace := func(from, to string) string {
		return `{"type":"Replace","pattern":{"String":"` + from + `"},"content":"` + to + `"}`
	}
	strip := func(fields string) string { return `{"type":"Strip","content":" ",` + fields + `}` }
	const fallback, fuse, bytes = `{"type":"ByteFallback"}`, `{"type":"Fuse"}`, `{"type":"ByteLevel"}`
	for _, c := range []struct {
		raw       string
		of        [2]string // a piece, and its text
		isByte    bool
		dropFirst bool
		perByte   bool
		strip     int
		refused   string
	}{
		{raw: bytes, of: [2]string{"Ġa", " a"}}, {raw: bytes, of: [2]string{"日", "日"}}, {raw: bytes, of: [2]string{"Ń", "\xad"}}, {raw: seq(bytes), of: [2]string{"ł", "\xa0"}},
		{raw: metaspace(""), of: [2]string{"▁a▁", " a "}, dropFirst: true}, {raw: metaspace(`,"add_prefix_space":true`), of: [2]string{"a", "a"}, dropFirst: true}, {raw: metaspace(`,"add_prefix_space":false`), of: [2]string{"a", "a"}},
		{raw: metaspace(`,"prepend_scheme":"always"`), of: [2]string{"a", "a"}, dropFirst: true}, {raw: metaspace(`,"prepend_scheme":"first"`), of: [2]string{"a", "a"}, dropFirst: true},
		{raw: metaspace(`,"prepend_scheme":"never"`), of: [2]string{"▁a", " a"}}, {raw: metaspace(`,"prepend_scheme":"never","add_prefix_space":true`), of: [2]string{"a", "a"}}, {raw: metaspace(`,"prepend_scheme":"first","add_prefix_space":false`), of: [2]string{"a", "a"}},
		{raw: replace("▁", " "), of: [2]string{"▁a▁", " a "}}, {raw: seq(replace("a", "b"), replace("b", "c")), of: [2]string{"ab", "cc"}}, {raw: seq(metaspace(""), replace(" a", "b")), of: [2]string{"▁a", "b"}, dropFirst: true},
		{raw: seq(replace("▁", " "), fallback, fuse), of: [2]string{"<0x0A>", "\n"}, isByte: true, perByte: true}, {raw: fallback, of: [2]string{"<0xfF>", "\xff"}, isByte: true, perByte: true}, {raw: fallback, of: [2]string{"<0x0G>", "<0x0G>"}, perByte: true},
		{raw: fallback, of: [2]string{"<0x0A", "<0x0A"}, perByte: true}, {raw: fallback, of: [2]string{"<0x00A>", "<0x00A>"}, perByte: true}, {raw: fallback, of: [2]string{"x0x0A>", "x0x0A>"}, perByte: true}, {raw: fuse, of: [2]string{"<0x0A>", "<0x0A>"}},
		{raw: seq(fuse, strip(`"start":1,"stop":0`)), of: [2]string{" a", " a"}, strip: 1}, {raw: seq(fuse, strip(`"start":0,"stop":0`)), of: [2]string{"a", "a"}},
		{raw: "null", refused: "cannot tell how tokens join"}, {raw: "", refused: "cannot tell how tokens join"}, {raw: seq(), refused: "cannot tell how tokens join"}, {raw: "[]", refused: "json"}, {raw: seq("7"), refused: "json"},
		{raw: `{"type":"WordPiece"}`, refused: "WordPiece is not supported here"}, {raw: seq(bytes, fuse), refused: "ByteLevel is not supported here"}, {raw: seq(fuse, metaspace("")), refused: "Metaspace is not supported here"},
		{raw: seq(fuse, replace("a", "b")), refused: "Replace is not supported here"}, {raw: seq(fallback, replace("a", "b")), refused: "Replace is not supported here"}, {raw: replace("", "b"), refused: "Replace is not supported here"}, {raw: `{"type":"Replace","pattern":{"Regex":"a"},"content":"b"}`, refused: "Replace is not supported here"},
		{raw: seq(fuse, fallback), refused: "ByteFallback is not supported here"}, {raw: strip(`"start":1,"stop":0`), refused: "Strip is not supported here"}, {raw: seq(fuse, strip(`"start":1,"stop":1`)), refused: "Strip is not supported here"},
		{raw: seq(fuse, strip(`"start":-1,"stop":0`)), refused: "Strip is not supported here"}, {raw: seq(fuse, strip(`"start":1,"stop":0`), fuse), refused: "Strip is not supported here"}, {raw: seq(fuse, `{"type":"Strip","content":"_","start":1,"stop":0}`), refused: "Strip is not supported here"},
	} {
		d, err := readDecoder(json.RawMessage(c.raw))
		if (err == nil) != (c.refused == "") || err != nil && !strings.Contains(err.Error(), c.refused) {
			t.Errorf("%s: %v", c.raw, err)
		}
		if c.refused != "" {
			continue
		}
		if text, isByte := d.text(c.of[0]); text != c.of[1] || isByte != c.isByte || d.dropFirst != c.dropFirst || d.perByte != c.perByte || d.strip != c.strip {
			t.Errorf("%s: %q is %q, a byte %t; %+v", c.raw, c.of[0], text, isByte, d)
		}
	}
}

// TestMergeLong compares the two ways to merge.
func TestMergeLong(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 2000 {
		letters := int32(2 + r.IntN(4))
		table := newPairTable(64)
		next := letters
		for rank := range uint32(40) {
			table.put(r.Int32N(next), r.Int32N(next), next, rank/uint32(1+r.IntN(2)))
			next++
		}
		syms := make([]int32, r.IntN(120))
		for i := range syms {
			syms[i] = r.Int32N(letters)
		}
		a, b := scratch{syms: slices.Clone(syms)}, scratch{syms: slices.Clone(syms)}
		a.mergeShort(&table)
		b.mergeLong(&table)
		if !slices.Equal(a.syms, b.syms) {
			t.Fatalf("%v: %v and %v", syms, a.syms, b.syms)
		}
	}
}

func TestByteChars(t *testing.T) {
	seen := map[rune]bool{}
	for i, r := range byteChars {
		if got, ok := fromByteLevel(string(r)); !ok || got != string([]byte{byte(i)}) || seen[r] {
			t.Errorf("byte %#x is %q is %q", i, r, got)
		}
		seen[r] = true
	}
	for r := rune(0); r < 0x400; r++ {
		if _, ok := fromByteLevel(string(r)); ok != seen[r] {
			t.Errorf("%q: %v", r, ok)
		}
	}
}

func TestSplitBehaviors(t *testing.T) {
	f := func(mode behavior, invert bool, text string, want ...string) {
		t.Helper()
		var got []string
		words := map[string]int32{}
		m := &bpe{ignoreMerges: true, words: words, vocabSize: 100}
		for i := range len(text) {
			for j := i + 1; j <= len(text); j++ {
				if _, ok := words[text[i:j]]; !ok {
					words[text[i:j]] = int32(len(words))
				}
			}
		}
		e := encoder{t: &Tokenizer{model: m}}
		e.split(text, []splitStep{{cut: stringCutter("-"), mode: mode, invert: invert}}, true)
		for _, id := range e.out {
			for w, n := range words {
				if n == id {
					got = append(got, w)
				}
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("mode %d, invert %v: %q is cut into %q", mode, invert, text, got)
		}
	}
	// The example of Hugging Face's documentation of SplitDelimiterBehavior.
	const text = "the-final--countdown"
	f(removed, false, text, "the", "final", "countdown")
	f(isolated, false, text, "the", "-", "final", "-", "-", "countdown")
	f(mergedWithPrevious, false, text, "the-", "final-", "-", "countdown")
	f(mergedWithNext, false, text, "the", "-final", "-", "-countdown")
	f(contiguous, false, text, "the", "-", "final", "--", "countdown")
	f(removed, true, text, "-", "-", "-")
	f(mergedWithNext, false, "-a-", "-a", "-")
	f(mergedWithPrevious, false, "-a-", "-", "a-")
}

func TestGGUFPre(t *testing.T) {
	for _, name := range []string{"gpt-2", "llama-bpe", "smaug-bpe", "qwen2", "stablelm2", "smollm", "gpt-4o", "deepseek-v3", "default", ""} {
		family, err := ggufPre(name)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		for _, p := range family.patterns {
			if _, err := patternCutter(p); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
	if _, err := ggufPre("nosuch"); err == nil {
		t.Error("an unknown name is taken")
	}
}

// TestNormalMarks: Unicode's forms, however many marks follow each other.
func TestNormalMarks(t *testing.T) {
	f := func(form norm.Form, in, want string) {
		t.Helper()
		if got := normal(form, in); got != want {
			t.Errorf("%+q: %+q, want %+q", in, got, want)
		}
	}
	below, acute := strings.Repeat("\u0316", 40), strings.Repeat("\u0301", 40)
	f(norm.NFC, "a"+below, "a"+below)
	f(norm.NFC, "a"+acute+below+"e\u0301", "á"+below+acute[2:]+"é")
	f(norm.NFD, "é"+below+"\u1100\u1161", "e"+below+"\u0301\u1100\u1161")
	f(norm.NFC, "\u1100\u1161\u11a8\u034f"+acute, "\uac01\u034f"+acute)
	f(norm.NFKC, "\ufb01"+acute, "fí"+acute[2:])
	f(norm.NFC, "o"+acute+"\xff", norm.NFC.String("o"+acute+"\xff"))

	// Where no run is long, x/text is right.
	r := rand.New(rand.NewPCG(1, 2))
	pool := []rune("aeoAßﬁ½Å\u0344\u0958\u09c7\u09be\u0316\u0301\u0302\u0308\u0323\u0345\u05b0\u05bc\u1100\u1161\u11a8\uac00각ệǭ\u0f73\u3099かΩ\u212b\U0001d15e漢")
	for range 20_000 {
		in := make([]rune, r.IntN(8))
		for i := range in {
			if in[i] = pool[r.IntN(len(pool))]; r.IntN(4) == 0 {
				in[i] = rune(r.IntN(0x3100))
			}
		}
		for _, form := range []norm.Form{norm.NFC, norm.NFD, norm.NFKC, norm.NFKD} {
			if got, want := byDefinition(form, string(in)), form.String(string(in)); got != want {
				t.Fatalf("%+q, form %d: %+q, want %+q", string(in), form, got, want)
			}
		}
	}
}

// TestLongPiece: the length of a sentencepiece token is bounded, as every cut of it is tried.
func TestLongPiece(t *testing.T) {
	f := func(n int, ok bool) {
		t.Helper()
		_, err := FromGGUF(map[string]any{ggml + "model": "llama", ggml + "tokens": []string{"<unk>", strings.Repeat("a", n)}, ggml + "scores": []float32{0, 0}})
		if (err == nil) != ok || err != nil && !strings.Contains(err.Error(), "token 1 has") {
			t.Errorf("%d bytes: %v", n, err)
		}
	}
	f(4096, true)
	f(4097, false)
}

// TestBrokenTemplate: using a checkpoint's template that does not parse is an error, and
// not an empty prompt.
func TestBrokenTemplate(t *testing.T) {
	tok := &Tokenizer{chat: newChat(map[string]string{defaultTemplate: "{% if %}"}, nil)}
	got, err := tok.RenderChat(t.Context(), ChatInput{Messages: []json.RawMessage{json.RawMessage(`{"role":"user","content":"hi"}`)}})
	if err == nil || !strings.Contains(err.Error(), "chat template") {
		t.Errorf("%q, %v", got, err)
	}
}

// TestToInt: GGUF files have numbers of any width.
func TestToInt(t *testing.T) {
	for _, v := range []any{uint8(7), uint16(7), uint32(7), int32(7), uint64(7), int64(7), int(7)} {
		if n, ok := toInt(v); !ok || n != 7 {
			t.Errorf("%T: %d, %t", v, n, ok)
		}
	}
	for _, v := range []any{nil, "7", 7.0, true} {
		if n, ok := toInt(v); ok {
			t.Errorf("%T: %d", v, n)
		}
	}
}
