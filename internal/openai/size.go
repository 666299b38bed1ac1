package openai

import (
	"strconv"
	"unicode/utf8"
)

// Bounds of responses. Routers and workers share them: no worker sends more than a router takes.
const (
	MaxAnswer = 64 << 20 // bytes of a response that does not stream, by default
	MaxEvent  = 4 << 20  // of one event of a stream
)

// TokenSizes are the most JSON bytes that one token of a model takes, by use.
type TokenSizes struct {
	Text  int // added to a choice's text
	Token int // its text as a string, in a log probability
	Bytes int // its bytes as a list
	ID    int // its id
	Float int // a log probability
}

// leastTokens are lower bounds for all models. A float32 takes as much as appendLogprob writes: a
// sign, and 9 significant digits from 1e-6 on, or 5 digits before the point. Text is never zero:
// Fits divides by what a token adds.
var leastTokens = TokenSizes{Text: 1, Token: len(`"token_id:0"`), Bytes: len("null"), ID: 1, Float: 20}

// MeasureTokens measures the tokens 0 to n-1.
func MeasureTokens(v Vocab, n int) TokenSizes {
	s := leastTokens
	s.ID = len(strconv.Itoa(max(n-1, 0)))
	s.Token = len(`"token_id:"`) + s.ID
	for id := range int32(n) {
		text, raw := v.TokenText(id), v.TokenBytes(id)
		s.Token = max(s.Token, StringSize(text))
		list := len("[]") + len(raw)
		for _, c := range raw {
			list += len(strconv.Itoa(int(c)))
		}
		s.Bytes = max(s.Bytes, list)
		s.Text = max(s.Text, textSize(raw))
	}
	return s
}

// textSize returns the most that a token's bytes take in a text. Each byte of an incomplete
// character may become U+FFFD.
func textSize(raw []byte) (n int) {
	if utf8.Valid(raw) {
		return StringSize(raw) - 2
	}
	for _, c := range raw {
		if c >= utf8.RuneSelf {
			n += len("\uFFFD")
		} else {
			n += StringSize(string(rune(c))) - 2
		}
	}
	return n
}

// StringSize returns the size of s as a JSON string: len(AppendString(nil, s)).
func StringSize[T string | []byte](s T) int {
	n := 2
	for i := 0; i < len(s); {
		c := s[i]
		if c >= utf8.RuneSelf {
			r, size := utf8.DecodeRuneInString(string(s[i:min(i+utf8.UTFMax, len(s))]))
			n += utf8.RuneLen(r)
			i += size
			continue
		}
		switch i++; {
		case c == '"' || c == '\\' || c == '\n' || c == '\r' || c == '\t':
			n += 2
		case c < 0x20:
			n += len(`\u0000`)
		default:
			n++
		}
	}
	return n
}

// Shape determines how large a response can be, for each choice.
type Shape struct {
	Chat     bool
	IDs      bool   // return_token_ids
	Tokens   int    // generated at most
	Logprobs int    // alternatives of each; -1 without log probabilities
	Stop     string // the longest stop string

	Reasons bool // text may be reasoning, which is told twice
	Calls   int  // of tools, that text may be, at most
	Held    int  // bytes of text that may be held back until it is clear whether it is one

	Prompt         int    // tokens of the prompt
	Echo           bool   // of the prompt, and its log probabilities if there are any
	Text           string // in front of the answer: the prompt's, with Echo
	PromptLogprobs int    // alternatives of each of the prompt's tokens; -1 without
}

// Entries returns how many log probabilities a choice lists.
func (s *Shape) Entries() int {
	n := s.Tokens * (s.Logprobs + 1)
	if s.Echo {
		n += s.Prompt * (s.Logprobs + 1)
	}
	return n + s.Prompt*(s.PromptLogprobs+1)
}

// Size returns the most bytes that a choice of a whole response takes.
func (s *Shape) Size(t *TokenSizes) int { return s.head(t) + s.Tokens*s.perToken(t) }

// Fits returns how many tokens fit into a choice of size bytes.
func (s *Shape) Fits(t *TokenSizes, size int) int {
	return max(size-s.head(t), 0) / s.perToken(t)
}

// EventSize returns the most bytes of an event with so many new tokens, even a choice's first.
func (s *Shape) EventSize(t *TokenSizes, tokens int) int {
	return MaxHead + s.head(t) + min(tokens, s.Tokens)*s.perToken(t)
}

// MaxHead bounds what a response or event has around its choices: id, model, usage.
const MaxHead = 4 << 10

// head returns the size of a choice without its tokens.
func (s *Shape) head(t *TokenSizes) int {
	const names = 512 // the members' names, the index, the reason
	n := names + 2*t.Text + StringSize(s.Stop)
	// Text held back as a possible stop string, or call, comes out with other tokens.
	n += 6*len(s.Stop) + callTimes*s.Held
	n += s.Calls * len(`{"index":000,"id":"call_123456789012345678901234","type":"function","function":{"name":"","arguments":""}},`)
	if s.IDs {
		n += s.Prompt * (t.ID + 1)
	}
	if s.Text != "" {
		n += StringSize(s.Text)
	}
	if s.Echo && s.Logprobs >= 0 {
		n += s.Prompt * s.textEntry(t)
	}
	if s.PromptLogprobs >= 0 {
		// "id":{"logprob":…,"rank":…,"decoded_token":…}, once more for a token that is not
		// among the alternatives.
		each := t.ID + t.Token + t.Float + len(`"":{"logprob":,"rank":,"decoded_token":},`) + len("null")
		n += s.Prompt * ((s.PromptLogprobs+1)*each + len("{},"))
	}
	return n
}

// callTimes is how many times longer than its text a call's JSON can be, as a string within JSON: a
// parameter as short as Python's "a=1," becomes \"a\": 1, and a quote of a tag's value four bytes.
const callTimes = 4

// perToken returns what each generated token adds.
func (s *Shape) perToken(t *TokenSizes) int {
	n := t.Text
	switch {
	case s.Calls > 0:
		n *= callTimes
	case s.Reasons:
		n *= 2
	}
	if s.IDs {
		n += t.ID + 1
	}
	switch {
	case s.Logprobs < 0:
	case s.Chat:
		each := t.Token + t.Float + t.Bytes + len(`{"token":,"logprob":,"bytes":},`)
		n += (s.Logprobs+1)*each + len(`,"top_logprobs":[]`)
	default:
		n += s.textEntry(t)
	}
	return n
}

// textEntry is one position of completions' four lists.
func (s *Shape) textEntry(t *TokenSizes) int {
	const offset = 11
	each := t.Token + t.Float + len(":,")
	return offset + (t.Float + len("null,")) + (t.Token + 1) + (s.Logprobs+1)*each + len("{},")
}

// Surely returns a lower bound, for any model, of a worker's bound for the response.
// context is how many tokens its prompt and answer have at most; 0: unknown.
func (t *Top) Surely(context int) int {
	tokens := min(t.MaxTokens, 1<<24)
	if context > 0 { // a worker cuts it: a token of the prompt takes a byte at least, and a template is not known
		room := context - len(t.Prompt)
		if t.Messages && tokens >= context {
			room = 0
		}
		tokens = min(tokens, max(room, 0))
	}
	s := Shape{Chat: t.Messages, Tokens: tokens, Logprobs: -1, PromptLogprobs: -1}
	if t.Logprobs {
		s.Logprobs = t.TopLogprobs
	}
	return t.N * min(t.Prompts, 1<<12) * s.Tokens * s.perToken(&leastTokens)
}
