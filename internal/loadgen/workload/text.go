package workload

import (
	_ "embed"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
)

// words.txt has 2,048 English words of one token each, with and without a leading space, in the
// vocabularies of GPT-2, Qwen3 and SmolLM2: there n words are n tokens.
//
//go:embed words.txt
var wordList string

const wordBits = 11 // log2 of the number of words

// Text makes prompts of a length in tokens.
type Text struct {
	seed  uint64
	words []string

	// IDs makes prompts of token ids from LowID to HighID instead of words: their length is exact.
	IDs           bool
	LowID, HighID int

	// PerWord is tokens per word. Overhead is the tokens that the server adds to each prompt
	// (beginning of text, chat template). Calibrate measures both.
	PerWord  float64
	Overhead int
}

// NewText makes words of one token.
func NewText(seed uint64) *Text {
	return &Text{seed: seed, words: strings.Fields(wordList), PerWord: 1}
}

// Streams of random numbers: a prompt's number and a block's id never name the same text.
const (
	streamPrompt uint64 = iota << 60
	streamPrefix
	streamBlock
	streamTalk
	streamTurn
	streamProbe
)

// rng is the random numbers of one prompt, prefix, block, conversation, turn or probe.
func (t *Text) rng(stream, number uint64) *rand.Rand {
	return rand.New(rand.NewPCG(t.seed, stream^number))
}

// count is the number of words or ids that make up tokens.
func (t *Text) count(tokens int) int {
	if t.IDs {
		return tokens
	}
	return max(1, int(math.Round(float64(tokens)/t.PerWord)))
}

// append adds n words or ids from rng, with separators.
func (t *Text) append(dst []byte, rng *rand.Rand, n int) []byte {
	if t.IDs {
		for range n {
			if len(dst) > 0 {
				dst = append(dst, ',')
			}
			dst = strconv.AppendInt(dst, int64(t.LowID+rng.IntN(t.HighID-t.LowID+1)), 10)
		}
		return dst
	}
	var bits uint64
	left := 0
	for range n {
		if left == 0 {
			bits, left = rng.Uint64(), 64/wordBits
		}
		if len(dst) > 0 {
			dst = append(dst, ' ')
		}
		dst = append(dst, t.words[bits&(1<<wordBits-1)]...)
		bits >>= wordBits
		left--
	}
	return dst
}

// bytes estimates the size of tokens.
func (t *Text) bytes(tokens int) int { return 7*tokens + 16 }

// Probe is a prompt of n words, or ids, for Calibrate.
func (t *Text) Probe(number uint64, n int) []byte {
	return t.append(make([]byte, 0, t.bytes(n)), t.rng(streamProbe, number), n)
}

// Calibrate sets PerWord and Overhead from the prompt tokens that a server reports for prompts
// of few and of many words. It returns false and changes nothing if they are implausible.
func (t *Text) Calibrate(few, fewTokens, many, manyTokens int) bool {
	slope := float64(manyTokens-fewTokens) / float64(many-few)
	overhead := float64(fewTokens) - slope*float64(few)
	if t.IDs || slope < 0.25 || slope > 16 || overhead < -8 {
		return false
	}
	t.PerWord, t.Overhead = slope, max(0, int(math.Round(overhead)))
	return true
}

// Other makes different texts of the same kind, for a warm-up.
func (t *Text) Other() *Text {
	o := *t
	o.seed = ^o.seed
	return &o
}
