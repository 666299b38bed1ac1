package openai

import (
	"bytes"
	"math"
)

// Top is what a router reads of a request body. Raw fields alias the body.
type Top struct {
	Model     string
	Stream    bool
	HasSeed   bool
	N         int // choices; 1 when absent
	MaxTokens int // 0 when absent

	Prompt   []byte // raw JSON of prompt or messages; nil when absent
	Messages bool   // Prompt is messages
	Tools    []byte // raw JSON of tools; they are rendered before the messages
	Salt     []byte // raw JSON of cache_salt

	Link string // the first field present that links legs, "" when none
}

// PromptTokens is a cheap estimate of the prompt's length in tokens: exact
// for token ids, a quarter of the bytes for text.
func (t *Top) PromptTokens() int {
	p := t.Prompt
	if !t.Messages && len(p) > 1 && p[0] == '[' {
		inner := bytes.TrimLeft(p[1:], " \t\r\n[")
		if len(inner) > 0 && inner[0] >= '0' && inner[0] <= '9' {
			return bytes.Count(p, []byte{','}) + 1
		}
	}
	return (len(p)+len(t.Tools))/4 + 1
}

// Scan validates the whole of body as JSON and reads its top level. It
// refuses wrong types of the fields it reads, naming them, and decides
// nothing else: a worker's parser has the last word.
func Scan(body []byte, lim Limits) (Top, *Error) {
	lim = lim.withDefaults()
	t := Top{N: 1}
	r, err := newReader(body, lim.MaxDepth)
	if err != nil {
		return Top{}, err
	}
	if r.peek() != '{' {
		return Top{}, r.notObject()
	}
	err = r.object(func(key []byte) *Error { return t.field(&r, key, lim) })
	if err == nil {
		err = r.end()
	}
	if err != nil {
		return Top{}, err
	}
	return t, nil
}

func (r *reader) notObject() *Error {
	if err := r.skip(); err != nil {
		return err
	}
	if err := r.end(); err != nil {
		return err
	}
	return BadRequest("", "the body must be a JSON object")
}

func (t *Top) field(r *reader, key []byte, lim Limits) (err *Error) {
	switch string(key) {
	case "model":
		t.Model, _, err = r.readString("model")
	case "stream":
		t.Stream, _, err = r.readBool("stream")
	case "seed":
		_, t.HasSeed, err = r.readInt("seed", math.MinInt64, math.MaxInt64)
	case "n":
		var n int64
		var given bool
		if n, given, err = r.readInt("n", 1, int64(lim.MaxN)); !given {
			n = 1
		}
		t.N = int(n)
	case "max_tokens", "max_completion_tokens":
		var n int64
		n, _, err = r.readInt(string(key), 0, math.MaxInt32)
		t.MaxTokens = int(n)
	case "prompt":
		if t.Prompt, err = r.raw(); err == nil && len(t.Prompt) > 0 {
			t.Messages = false
		}
	case "messages":
		if t.Prompt, err = r.raw(); err == nil && len(t.Prompt) > 0 {
			t.Messages = true
		}
	case "tools":
		t.Tools, err = r.raw()
	case "cache_salt":
		t.Salt, err = r.raw()
	default:
		link := linkField(key)
		var raw []byte
		if raw, err = r.raw(); link != "" && raw != nil && t.Link == "" {
			t.Link = link
		}
	}
	return err
}

// raw steps over a value and returns its text, nil for null.
func (r *reader) raw() ([]byte, *Error) {
	if null, err := r.null(); null || err != nil {
		return nil, err
	}
	start := r.i
	if err := r.skip(); err != nil {
		return nil, err
	}
	return r.b[start:r.i:r.i], nil
}

// linkField names the field if it is one that engines link legs with.
func linkField(key []byte) string {
	switch string(key) {
	case "kv_transfer_params", "disaggregated_params", "bootstrap_host", "bootstrap_port", "bootstrap_room":
		return string(key)
	}
	if bytes.HasPrefix(key, []byte("bootstrap_")) {
		return "bootstrap_*"
	}
	return ""
}
