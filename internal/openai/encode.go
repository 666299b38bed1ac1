package openai

import (
	"math"
	"strconv"
	"unicode/utf8"
)

// TopLogprob is one alternative at a position, without its text: a response may hold millions.
type TopLogprob struct {
	ID      int32
	Logprob float32
}

// Vocab gives tokens' texts; *tokenizer.Tokenizer implements it.
type Vocab interface {
	// TokenText returns an id's text, with U+FFFD where its bytes are not whole characters.
	TokenText(id int32) string
	// TokenBytes returns its exact bytes; nil renders as null.
	TokenBytes(id int32) []byte
}

// TokenLogprob is one position: its token and the alternatives, best first. None marks a
// position without a distribution, an echoed prompt's first token.
type TokenLogprob struct {
	TopLogprob
	Top    []TopLogprob
	Offset int32 // characters before it in the choice's text (completions only)
	None   bool
}

// Choice is one choice in a chunk or a full response.
type Choice struct {
	Index int
	Text  string
	// Of a chat's stream: Role opens a choice, before all else, or with its first call; End says nothing
	// but how it ended, if there was something to say before.
	Role, End bool
	// Of a chat: what the model thought, and the tools that it calls.
	Reasoning string
	Calls     []ToolCall
	Logprobs  []TokenLogprob // nil renders as null
	Echo      []TokenLogprob // the prompt's, before Logprobs (completions); only used with those
	NoText    bool           // with Role: the text has not begun, and may never
	Finish    string         // "", "stop", "length", "tool_calls", …
	// StopString or StopToken is what stopped it; both zero render as null.
	StopString string
	StopToken  int32 // id + 1, so that zero is none

	TokenIDs       []int32        // with return_token_ids
	PromptTokenIDs []int32        // with return_token_ids, first chunk of a choice or full response
	PromptLogprobs []TokenLogprob // of full responses; nil renders as null
}

// ToolCall is a call of a tool, or in a stream a piece of one: all pieces but the first have neither
// ID nor Name.
type ToolCall struct {
	Index     int
	ID, Name  string
	Arguments string // the JSON itself
}

// Usage counts tokens of the whole request.
type Usage struct {
	Prompt     int
	Completion int
	Cached     int  // of Prompt, found in a prefix cache
	Reasoning  int  // of Completion
	Reasons    bool // Reasoning is told

	Timing *Timing // beside the usage; nil: it is not told
}

// Encoder writes one response, on one goroutine.
type Encoder struct {
	chat, ids, nullUsage bool
	each                 bool   // each choice has a prompt of its own
	asIDs                bool   // log probabilities name tokens by their ids
	chunk, full          []byte // up to and including `"choices":[`
	vocab                Vocab
	spill                func(dst []byte) []byte // nil: nowhere
	transfer             []byte                  // nil: none; see Transfer
}

// Meta is what all chunks of a response have in common.
type Meta struct {
	ID             string // cmpl-… or chatcmpl-…
	Model          string
	Created        int64 // Unix seconds
	Chat           bool
	Batch          bool // of a chat: its choices are of several conversations
	IncludeUsage   bool // every chunk carries "usage":null until the last (AppendUsage)
	ReturnTokenIDs bool
	TokensAsIDs    bool
	Vocab          Vocab // for log probabilities
}

// NewEncoder renders the fields that repeat.
func NewEncoder(m Meta) *Encoder {
	e := &Encoder{chat: m.Chat, each: !m.Chat || m.Batch, nullUsage: m.IncludeUsage, ids: m.ReturnTokenIDs, asIDs: m.TokensAsIDs, vocab: m.Vocab}
	head := func(object string) []byte {
		b := appendStr(nil, `{"id":`, m.ID)
		b = appendStr(b, `,"object":`, object)
		b = appendInt(b, `,"created":`, m.Created)
		b = appendStr(b, `,"model":`, m.Model)
		return append(b, `,"system_fingerprint":null,"choices":[`...)
	}
	if m.Chat {
		e.chunk, e.full = head("chat.completion.chunk"), head("chat.completion")
	} else {
		e.chunk, e.full = head("text_completion"), head("text_completion")
	}
	return e
}

// AppendChunk appends a server-sent event with one choice and, unless nil, the running usage
// (stream_options.continuous_usage_stats). It allocates nothing if dst has room.
func (e *Encoder) AppendChunk(dst []byte, c *Choice, usage *Usage) []byte {
	dst = append(dst, "data: "...)
	dst = append(dst, e.chunk...)
	if e.chat {
		dst = e.appendDelta(dst, c)
	} else {
		dst = e.appendText(dst, c, false)
	}
	dst = append(dst, ']')
	if e.chat && e.ids && c.PromptTokenIDs != nil {
		dst = appendInts(append(dst, `,"prompt_token_ids":`...), c.PromptTokenIDs)
	}
	switch {
	case usage != nil:
		dst = usage.append(append(dst, `,"usage":`...))
	case e.nullUsage:
		dst = append(dst, `,"usage":null`...)
	}
	if c.Finish != "" {
		dst = e.appendTransfer(dst)
	}
	return append(dst, "}\n\n"...)
}

// AppendUsage appends the last event of a stream with include_usage: the usage, no choices.
func (e *Encoder) AppendUsage(dst []byte, u Usage) []byte {
	dst = append(dst, "data: "...)
	dst = append(dst, e.chunk...)
	dst = u.append(append(dst, `],"usage":`...))
	return append(u.appendTiming(dst), "}\n\n"...)
}

// AppendFull appends the response of a request that does not stream.
func (e *Encoder) AppendFull(dst []byte, choices []Choice, u Usage) []byte {
	dst = append(dst, e.full...)
	for i := range choices {
		dst = comma(dst, i)
		if e.chat {
			dst = e.appendMessage(dst, &choices[i])
		} else {
			dst = e.appendText(dst, &choices[i], true)
		}
		dst = e.put(dst)
	}
	dst = u.append(append(dst, `],"usage":`...))
	if !e.each { // one prompt: its part stands beside the choices
		dst = e.appendPrompt(append(dst, ','), &choices[0])
	}
	return append(e.appendTransfer(u.appendTiming(dst)), '}')
}

// Transfer adds kv_transfer_params, which is JSON, to the chunk that ends a choice, or to a whole answer.
func (e *Encoder) Transfer(params []byte) { e.transfer = params }

func (e *Encoder) appendTransfer(dst []byte) []byte {
	if e.transfer == nil {
		return dst
	}
	return append(append(dst, `,"kv_transfer_params":`...), e.transfer...)
}

// appendPrompt writes what a whole response says of the prompt.
func (e *Encoder) appendPrompt(dst []byte, c *Choice) []byte {
	dst = append(dst, `"prompt_logprobs":`...)
	if c.PromptLogprobs != nil {
		dst = e.appendPromptLogprobs(dst, c.PromptLogprobs)
	} else {
		dst = append(dst, "null"...)
	}
	return e.appendIDs(append(dst, `,"prompt_token_ids":`...), c.PromptTokenIDs)
}

// appendIDs writes ids if they were asked for, else null.
func (e *Encoder) appendIDs(dst []byte, ids []int32) []byte {
	if !e.ids {
		return append(dst, "null"...)
	}
	return e.put(appendInts(dst, ids))
}

// WriteFull is AppendFull in pieces of some 64 KiB, which write may not keep.
func (e *Encoder) WriteFull(write func([]byte) error, choices []Choice, u Usage) error {
	var failed error
	e.spill = func(dst []byte) []byte {
		if len(dst) < spillBytes {
			return dst
		}
		if failed == nil {
			failed = write(dst)
		}
		return dst[:0]
	}
	dst := e.AppendFull(make([]byte, 0, spillBytes+spillBytes/4), choices, u)
	e.spill = nil
	if failed == nil {
		failed = write(dst)
	}
	return failed
}

const spillBytes = 64 << 10

// put writes dst out, in WriteFull.
func (e *Encoder) put(dst []byte) []byte {
	if e.spill == nil {
		return dst
	}
	return e.spill(dst)
}

// AppendDone appends the event that ends every successful stream.
func AppendDone(dst []byte) []byte { return append(dst, "data: [DONE]\n\n"...) }

// AppendErrorEvent appends err as the last event of a stream, without [DONE].
func AppendErrorEvent(dst []byte, err *Error) []byte {
	dst = append(dst, "data: "...)
	dst = err.Append(dst)
	return append(dst, "\n\n"...)
}

func (u *Usage) append(dst []byte) []byte {
	dst = appendInt(dst, `{"prompt_tokens":`, u.Prompt)
	dst = appendInt(dst, `,"completion_tokens":`, u.Completion)
	dst = appendInt(dst, `,"total_tokens":`, u.Prompt+u.Completion)
	dst = appendInt(dst, `,"prompt_tokens_details":{"cached_tokens":`, u.Cached)
	if u.Reasons {
		dst = appendInt(dst, `},"completion_tokens_details":{"reasoning_tokens":`, u.Reasoning)
	}
	return append(dst, `}}`...)
}

// appendText writes a completions choice.
func (e *Encoder) appendText(dst []byte, c *Choice, full bool) []byte {
	dst = appendInt(dst, `{"index":`, c.Index)
	dst = append(dst, `,"text":`...)
	dst = e.appendLong(dst, c.Text)
	dst = append(dst, `,"logprobs":`...)
	return e.appendEnd(e.appendTextLogprobs(dst, c.Echo, c.Logprobs), c, full)
}

// appendDelta writes a chat stream's choice.
func (e *Encoder) appendDelta(dst []byte, c *Choice) []byte {
	dst = appendInt(dst, `{"index":`, c.Index)
	dst = append(dst, `,"delta":{`...)
	from := len(dst)
	other := c.Reasoning != "" || len(c.Calls) > 0
	switch {
	case c.Role && (len(c.Calls) > 0 || c.NoText) && c.Text == "":
		dst = append(dst, `"role":"assistant","content":null`...)
	case c.Role:
		dst = append(appendStr(dst, `"role":"assistant","content":`, c.Text), `,"refusal":null`...)
	case c.Text != "" || !other && !c.End && (len(c.Logprobs) > 0 || len(c.TokenIDs) > 0):
		dst = appendStr(dst, `"content":`, c.Text)
	}
	if c.Reasoning != "" {
		dst = e.appendReasoning(comma(dst, len(dst)-from), c.Reasoning)
	}
	if len(c.Calls) > 0 {
		dst = e.appendCalls(comma(dst, len(dst)-from), c.Calls, true)
	}
	dst = append(dst, `},"logprobs":`...)
	return e.appendEnd(e.appendChatLogprobs(dst, c.Logprobs), c, false)
}

// appendMessage writes a full chat response's choice.
func (e *Encoder) appendMessage(dst []byte, c *Choice) []byte {
	dst = appendInt(dst, `{"index":`, c.Index)
	dst = append(dst, `,"message":{"role":"assistant","content":`...)
	if c.Text == "" && len(c.Calls) > 0 {
		dst = append(dst, "null"...)
	} else {
		dst = e.appendLong(dst, c.Text)
	}
	if c.Reasoning != "" {
		dst = e.appendReasoning(append(dst, ','), c.Reasoning)
	}
	if len(c.Calls) > 0 {
		dst = e.appendCalls(append(dst, ','), c.Calls, false)
	}
	dst = append(dst, `,"refusal":null},"logprobs":`...)
	return e.appendEnd(e.appendChatLogprobs(dst, c.Logprobs), c, true)
}

// appendReasoning writes reasoning under both names that clients read: DeepSeek's, and vLLM's own.
func (e *Encoder) appendReasoning(dst []byte, text string) []byte {
	dst = e.appendLong(append(dst, `"reasoning_content":`...), text)
	return e.appendLong(append(dst, `,"reasoning":`...), text)
}

// appendCalls writes calls, or pieces of them.
func (e *Encoder) appendCalls(dst []byte, calls []ToolCall, pieces bool) []byte {
	dst = append(dst, `"tool_calls":[`...)
	for i := range calls {
		c := &calls[i]
		dst = append(comma(dst, i), '{')
		if pieces {
			dst = append(appendInt(dst, `"index":`, c.Index), ',')
		}
		if c.ID != "" {
			dst = appendStr(dst, `"id":`, c.ID)
			dst = appendStr(append(dst, `,"type":"function",`...), `"function":{"name":`, c.Name)
			dst = append(dst, ',')
		} else {
			dst = append(dst, `"function":{`...)
		}
		dst = append(e.appendLong(append(dst, `"arguments":`...), c.Arguments), "}}"...)
	}
	return append(dst, ']')
}

// appendEnd writes what follows a choice's log probabilities.
func (e *Encoder) appendEnd(dst []byte, c *Choice, full bool) []byte {
	dst = appendStringOrNull(append(dst, `,"finish_reason":`...), c.Finish)
	if c.StopToken > 0 {
		dst = appendInt(dst, `,"stop_reason":`, c.StopToken-1)
	} else {
		dst = appendStringOrNull(append(dst, `,"stop_reason":`...), c.StopString)
	}
	switch {
	case full:
		dst = e.appendIDs(append(dst, `,"token_ids":`...), c.TokenIDs)
		if e.each {
			dst = e.appendPrompt(append(dst, ','), c)
		}
	case e.ids:
		dst = appendInts(append(dst, `,"token_ids":`...), c.TokenIDs)
		if !e.chat && c.PromptTokenIDs != nil {
			dst = appendInts(append(dst, `,"prompt_token_ids":`...), c.PromptTokenIDs)
		}
	}
	return append(dst, '}')
}

// appendInt appends a piece of JSON and a number.
func appendInt[T int | int32 | int64](dst []byte, before string, n T) []byte {
	return strconv.AppendInt(append(dst, before...), int64(n), 10)
}

// appendStr appends a piece of JSON and a string.
func appendStr(dst []byte, before, s string) []byte {
	return AppendString(append(dst, before...), s)
}

// comma separates item i of a list from the one before.
func comma(dst []byte, i int) []byte {
	if i > 0 {
		return append(dst, ',')
	}
	return dst
}

func appendInts[T byte | int32](dst []byte, ids []T) []byte {
	dst = append(dst, '[')
	for i, id := range ids {
		dst = strconv.AppendInt(comma(dst, i), int64(id), 10)
	}
	return append(dst, ']')
}

func appendStringOrNull(dst []byte, s string) []byte {
	if s == "" {
		return append(dst, "null"...)
	}
	return AppendString(dst, s)
}

const hexDigits = "0123456789abcdef"

// appendLong is AppendString for a text that may be long.
func (e *Encoder) appendLong(dst []byte, s string) []byte {
	dst = append(dst, '"')
	for e.spill != nil && len(s) > spillBytes/8 {
		n := spillBytes / 8
		for n > spillBytes/8-utf8.UTFMax && !utf8.RuneStart(s[n]) {
			n--
		}
		dst, s = e.put(appendEscaped(dst, s[:n])), s[n:]
	}
	return append(appendEscaped(dst, s), '"')
}

// AppendString appends s as a JSON string. Characters beyond ASCII stay as they are;
// invalid UTF-8 becomes U+FFFD.
func AppendString(dst []byte, s string) []byte {
	return append(appendEscaped(append(dst, '"'), s), '"')
}

// appendEscaped appends s as it stands within a JSON string.
func appendEscaped(dst []byte, s string) []byte {
	start := 0
	for i := 0; i < len(s); {
		c := s[i]
		if c < utf8.RuneSelf {
			if c >= 0x20 && c != '"' && c != '\\' {
				i++
				continue
			}
			dst = append(dst, s[start:i]...)
			switch c {
			case '"', '\\':
				dst = append(dst, '\\', c)
			case '\n':
				dst = append(dst, `\n`...)
			case '\r':
				dst = append(dst, `\r`...)
			case '\t':
				dst = append(dst, `\t`...)
			default:
				dst = append(dst, '\\', 'u', '0', '0', hexDigits[c>>4], hexDigits[c&15])
			}
			i++
			start = i
			continue
		}
		v, size := utf8.DecodeRuneInString(s[i:])
		if v == utf8.RuneError && size == 1 {
			dst = append(dst, s[start:i]...)
			dst = append(dst, "\uFFFD"...)
			start = i + 1
		}
		i += size
	}
	return append(dst, s[start:]...)
}

// appendLogprob appends v, with -9999 for minus infinity, which JSON lacks, as in vLLM.
func appendLogprob(dst []byte, v float32) []byte {
	if f := float64(v); math.IsNaN(f) || f < -9999 {
		v = -9999
	}
	format := byte('f')
	if abs := math.Abs(float64(v)); abs != 0 && abs < 1e-6 {
		format = 'e'
	}
	return strconv.AppendFloat(dst, float64(v), format, -1, 32)
}
