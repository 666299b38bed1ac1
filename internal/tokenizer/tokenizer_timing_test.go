package tokenizer_test

import (
	"strings"
	"testing"
)

// prose is text of several scripts, with code and digits.
var prose = strings.Repeat(`The quick brown fox jumps over the lazy dog, and it doesn't stop there: 1234 times, at 3.14 per second.
func main() {
	for i := range 10 { fmt.Println("hello, world", i) }
}
Der Fuß des Berges liegt in 2.962 Metern Höhe. Это предложение написано по-русски. 你好，世界。これは日本語の文です。 😀🦙
`, 200)

func BenchmarkEncode(b *testing.B) {
	for _, vocab := range []string{"gpt2", "smollm2", "qwen3", "llama3", "stories260k"} {
		b.Run(vocab, func(b *testing.B) {
			tok := load(b, vocab)
			b.SetBytes(int64(len(prose)))
			b.ReportAllocs()
			for b.Loop() {
				tok.Encode(prose, true)
			}
		})
	}
}

// BenchmarkEncodeWord encodes one word of 64 kB.
func BenchmarkEncodeWord(b *testing.B) {
	tok := load(b, "gpt2")
	word := strings.Repeat("abcdefghij", 6400)
	b.SetBytes(int64(len(word)))
	for b.Loop() {
		tok.Encode(word, false)
	}
}

func BenchmarkDetokenizer(b *testing.B) {
	for _, vocab := range []string{"qwen3", "stories260k"} {
		b.Run(vocab, func(b *testing.B) {
			tok := load(b, vocab)
			ids := tok.Encode("The quick brown fox jumps over the lazy dog, and it doesn't stop there.", false)
			d := tok.NewDetokenizer(true, nil)
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				d.Push(ids[i%len(ids)])
			}
		})
	}
}

func BenchmarkDecode(b *testing.B) {
	tok := load(b, "qwen3")
	ids := tok.Encode(prose, false)
	b.SetBytes(int64(len(prose)))
	for b.Loop() {
		tok.Decode(ids, true)
	}
}

func BenchmarkLoad(b *testing.B) {
	raw := read(b, "qwen3.json")
	b.SetBytes(int64(len(raw)))
	for b.Loop() {
		if _, err := build(b, "qwen3"); err != nil {
			b.Fatal(err)
		}
	}
}

// TestDetokenizerAllocations: a token that is whole characters costs nothing.
func TestDetokenizerAllocations(t *testing.T) {
	tok := load(t, "qwen3")
	ids := tok.Encode("The quick brown fox, 日本語", false)
	d := tok.NewDetokenizer(true, nil)
	if n := testing.AllocsPerRun(100, func() {
		for _, id := range ids {
			d.Push(id)
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
