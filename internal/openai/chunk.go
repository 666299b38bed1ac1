package openai

import (
	"math"
	"slices"
	"strconv"

	"github.com/xpyd/xpyd/internal/jsonscan"
)

// Chunk is what an event of an engine's stream with one choice says, of a completion or a chat. Its
// fields are raw JSON that aliases the event; nil for what is absent or null.
type Chunk struct {
	ID, Object, Created, Model []byte
	Usage                      []byte
	Choices                    int
	Index                      []byte
	Text                       []byte // of a completion, or a delta's content
	Finish, Stop               []byte // finish_reason and stop_reason
	More                       bool   // there is other output than text, such as reasoning
	Prompt, IDs                []byte // prompt_token_ids and token_ids

	told []span // where ids are
}

// ReadChunk reads an event's data; false if it is none of JSON.
func ReadChunk(data []byte) (c Chunk, ok bool) {
	var r reader
	r.begin(data)
	for r.Next() == jsonscan.Key {
		switch key := string(r.Decoded()); key {
		case "choices":
			c.choices(&r)
		default:
			c.member(key, &r)
		}
	}
	return c, r.End() == nil
}

// member reads what may be of interest at any level.
func (c *Chunk) member(key string, r *reader) {
	raw := r.raw()
	if raw == nil {
		return
	}
	to := &c.ID
	switch key {
	case "id":
	case "object":
		to = &c.Object
	case "created":
		to = &c.Created
	case "model":
		to = &c.Model
	case "usage":
		to = &c.Usage
	case "index":
		to = &c.Index
	case "finish_reason":
		to = &c.Finish
	case "stop_reason":
		to = &c.Stop
	case "text":
		to = &c.Text
	case "prompt_token_ids":
		to = &c.Prompt
	case "token_ids":
		to = &c.IDs
	case "logprobs", "prompt_logprobs":
		c.More = true
		return
	default:
		return
	}
	if to == &c.Prompt || to == &c.IDs {
		c.told = append(c.told, span{val: r.Pos() - len(raw), end: r.Pos()})
	}
	*to = raw
}

func (c *Chunk) choices(r *reader) {
	if !r.Enter(jsonscan.Array) {
		return
	}
	for r.Item() {
		c.Choices++
		if !r.Enter(jsonscan.Object) {
			continue
		}
		for r.Next() == jsonscan.Key {
			if key := string(r.Decoded()); key != "delta" {
				c.member(key, r)
			} else if r.Enter(jsonscan.Object) {
				c.delta(r)
			}
		}
	}
}

// delta reads a chat's part. Anything but a role and text is more than a completion could go on with.
func (c *Chunk) delta(r *reader) {
	for r.Next() == jsonscan.Key {
		key := string(r.Decoded())
		raw := r.raw()
		switch {
		case key == "content":
			c.Text = raw
		case key != "role" && raw != nil && !isOff(raw):
			c.More = true
		}
	}
}

// AppendText appends the text that a client gets by it.
func (c *Chunk) AppendText(dst []byte) []byte {
	if len(c.Text) < len(`""`) || c.Text[0] != '"' {
		return dst
	}
	return jsonscan.AppendDecoded(dst, c.Text[1:len(c.Text)-1])
}

// AppendUntold appends the event's data without ids, as if nobody had asked for them.
func (c *Chunk) AppendUntold(dst, data []byte) []byte {
	at := 0
	for _, s := range c.told {
		dst = append(append(dst, data[at:s.val]...), "null"...)
		at = s.end
	}
	return append(dst, data[at:]...)
}

// AppendList appends the ids of a JSON list as AppendIDs does; false if it is none of ids.
func AppendList(dst, list []byte) ([]byte, bool) {
	var s jsonscan.Scanner
	s.Reset(list)
	if !s.Enter(jsonscan.Array) {
		return dst, false
	}
	var space [16]int32
	ids := s.Ints(space[:0], MaxSentID)
	if s.Item() || s.End() != nil {
		return dst, false
	}
	return AppendIDs(slices.Grow(dst, IDBytes*len(ids)), ids), true
}

// Head is what all chunks of a stream have in common, as raw JSON: of the first engine, for those
// of the next.
type Head struct{ ID, Object, Created, Model []byte }

// NewHead keeps a chunk's.
func NewHead(c *Chunk) Head {
	return Head{slices.Clone(c.ID), slices.Clone(c.Object), slices.Clone(c.Created), slices.Clone(c.Model)}
}

// Size is how many bytes it holds.
func (h *Head) Size() int { return len(h.ID) + len(h.Object) + len(h.Created) + len(h.Model) }

func (h *Head) append(dst []byte) []byte {
	dst = append(dst, '{')
	for _, m := range [...]struct {
		key string
		raw []byte
	}{{`"id":`, h.ID}, {`"object":`, h.Object}, {`"created":`, h.Created}, {`"model":`, h.Model}} {
		if m.raw != nil {
			dst = append(append(append(dst, m.key...), m.raw...), ',')
		}
	}
	return append(dst, `"choices":[`...)
}

// AppendGoingOn appends the data of a completion's chunk as the stream's next, with this text and of a
// chat or a completion: prompt is the tokens of the first prompt, and before those of the answer that came
// from other engines.
func (h *Head) AppendGoingOn(dst []byte, c *Chunk, text []byte, chat bool, prompt, before int) []byte {
	dst = h.append(dst)
	if c.Choices > 0 {
		dst = append(dst, `{"index":0,`...)
		if chat {
			dst = append(appendStr(dst, `"delta":{"content":`, string(text)), '}')
		} else {
			dst = appendStr(dst, `"text":`, string(text))
		}
		dst = append(dst, `,"logprobs":null,"finish_reason":`...)
		dst = append(orNull(dst, c.Finish), `,"stop_reason":`...)
		dst = append(orNull(dst, c.Stop), '}')
	}
	dst = append(dst, ']')
	if c.Usage != nil {
		dst = append(append(dst, `,"usage":`...), goingOnUsage(c.Usage, prompt, before)...)
	}
	return append(dst, '}')
}

// AppendLastUsage appends the event with the usage of a stream whose engine died in front of it.
func (h *Head) AppendLastUsage(dst []byte, prompt, completion int) []byte {
	dst = h.append(append(dst, "data: "...))
	dst = appendInt(append(dst, `],"usage":`...), `{"prompt_tokens":`, prompt)
	dst = appendInt(dst, `,"completion_tokens":`, completion)
	dst = appendInt(dst, `,"total_tokens":`, prompt+completion)
	return append(dst, "}}\n\n"...)
}

func orNull(dst, raw []byte) []byte {
	if raw == nil {
		return append(dst, "null"...)
	}
	return append(dst, raw...)
}

// goingOnUsage counts for the whole stream what an engine counted for its part.
func goingOnUsage(usage []byte, prompt, before int) []byte {
	completion, _ := atoi(Member(usage, "completion_tokens"))
	completion = min(completion, math.MaxInt32) + before
	set := [][2]string{{"prompt_tokens", strconv.Itoa(prompt)}, {"completion_tokens", strconv.Itoa(completion)}, {"total_tokens", strconv.Itoa(prompt + completion)}}
	details := Member(usage, "prompt_tokens_details")
	if n, ok := atoi(Member(details, "cached_tokens")); ok && n > prompt {
		set = append(set, [2]string{"prompt_tokens_details", string(With(details, [2]string{"cached_tokens", strconv.Itoa(prompt)}))})
	}
	return With(usage, set...)
}
