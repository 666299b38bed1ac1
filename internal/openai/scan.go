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

	Priority    int64 // vLLM's: the lower goes first; 0 when absent
	HasPriority bool
	Tier        string // service_tier
	// URLs are what an engine would fetch for the client: of the images and the
	// like in messages, and of tools' servers.
	URLs []string

	// What decides whether a request can be split between two engines.
	Prompts        int  // 1, or more for a batch
	Echo           bool // echo
	Logprobs       bool // logprobs or top_logprobs ask for some,
	TopLogprobs    int  // and for so many alternatives
	PromptLogprobs bool // prompt_logprobs is there

	// Where the fields that an Edit can change are, and where the closing
	// brace is. Twice names a known field that came more than once.
	at    [fields]span
	close int
	Twice string
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
	t := Top{N: 1, Prompts: 1}
	r, err := newReader(body, lim.MaxDepth)
	if err != nil {
		return Top{}, err
	}
	if r.peek() != '{' {
		return Top{}, r.notObject()
	}
	err = r.object(func(key []byte) *Error { return t.spanned(&r, key, lim) })
	if err == nil {
		t.close = r.i - 1
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

// spanned reads a field and remembers where it is if it is a known one.
func (t *Top) spanned(r *reader, key []byte, lim Limits) *Error {
	f, known := fieldOf(key)
	if !known {
		return t.field(r, key, lim)
	}
	if t.at[f].end != 0 {
		t.Twice = f.String()
	}
	s := span{key: r.keyAt}
	r.peek()
	s.val = r.i
	err := t.field(r, key, lim)
	s.end = r.i
	t.at[f] = s
	return err
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
		if r.peek() == '[' {
			t.Prompt, t.Prompts, err = r.rawList()
		} else {
			t.Prompt, err = r.raw()
			t.Prompts = 1
		}
		if err == nil && len(t.Prompt) > 0 {
			t.Messages = false
		}
	case "echo":
		t.Echo, err = r.truth()
	case "logprobs", "top_logprobs":
		var raw []byte
		raw, err = r.raw()
		t.Logprobs = t.Logprobs || raw != nil && raw[0] != 'f'
		if n, ok := atoi(raw); ok {
			t.TopLogprobs = max(t.TopLogprobs, min(n, lim.MaxLogprobs))
		}
	case "prompt_logprobs":
		var raw []byte
		raw, err = r.raw()
		t.PromptLogprobs = raw != nil
	case "messages":
		if t.Prompt, err = t.fetched(r, isMediaURL); err == nil && len(t.Prompt) > 0 {
			t.Messages = true
		}
	case "input": // of embeddings and responses
		_, err = t.fetched(r, isMediaURL)
	case "tools":
		t.Tools, err = t.fetched(r, isServerURL)
	case "priority":
		t.Priority, t.HasPriority, err = r.readInt("priority", math.MinInt64, math.MaxInt64)
	case "service_tier":
		t.Tier, _, err = r.readString("service_tier")
	case "cache_salt":
		t.Salt, err = r.raw()
	default:
		link := LinkField(key)
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

// rawList is raw for an array, and counts its prompts: strings or lists of
// token ids count each, token ids together are one.
func (r *reader) rawList() (raw []byte, prompts int, err *Error) {
	start, n, ids := r.i, 0, false
	err = r.array(func(int) *Error {
		c := r.peek()
		if n++; c == '-' || c >= '0' && c <= '9' {
			ids = true
		}
		return r.skip()
	})
	if err != nil {
		return nil, 0, err
	}
	if ids {
		n = 1
	}
	return r.b[start:r.i:r.i], n, nil
}

// truth steps over a value of any kind and says whether it asks for
// something: it is neither false nor null, and of a number that counts, not
// what a worker's parser will refuse.
func (r *reader) truth() (bool, *Error) {
	c := r.peek()
	err := r.skip()
	return c != 'f' && c != 'n', err
}

// LinkField names the field if it is one that engines link legs with, "" if not.
func LinkField(key []byte) string {
	switch string(key) {
	case "kv_transfer_params", "disaggregated_params", "bootstrap_host", "bootstrap_port", "bootstrap_room":
		return string(key)
	}
	if bytes.HasPrefix(key, []byte("bootstrap_")) {
		return "bootstrap_*"
	}
	return ""
}
