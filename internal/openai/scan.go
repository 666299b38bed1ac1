package openai

import (
	"bytes"
	"encoding/json"
	"math"

	"github.com/xpyd/xpyd/internal/jsonscan"
)

// Top is what a router reads of a request body. Raw fields alias the body.
type Top struct {
	Model     string
	Stream    bool
	HasSeed   bool
	N         int // choices; 1 when absent
	MaxTokens int // 0 when absent

	maxCompletion int // in a chat it wins over max_tokens, else it means nothing

	Prompt   []byte // raw JSON of prompt or messages; nil when absent
	Messages bool   // Prompt is messages
	Tools    []byte // raw JSON of tools; they are rendered before the messages
	Salt     []byte // raw JSON of cache_salt

	Link string // the first field present that links legs, "" if none

	Priority    int64 // vLLM's: the lower goes first; 0 when absent
	HasPriority bool
	Tier        string // service_tier
	// URLs are addresses that an engine would fetch for the client: images and other media
	// in messages, and tools' servers.
	URLs []string

	// What decides whether a request can be split between two engines.
	Prompts        int  // 1, or more for a batch
	Echo           bool // echo
	Logprobs       bool // logprobs or top_logprobs ask for some
	TopLogprobs    int  // alternatives asked for
	PromptLogprobs bool // prompt_logprobs is there

	Bound bool // a field says what the answer must be: see Constraint; or it must be a call

	// Places of the fields that an Edit can change, and of the closing brace. Twice names a
	// known field that came more than once.
	at    [fields]span
	close int
	Twice string
}

// PromptTokens estimates the prompt's length in tokens: exact for token ids, a quarter of the
// bytes for text.
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

// Scan validates the whole of body as JSON and reads its top level. It refuses wrong types of
// the fields it reads, naming them, and leaves the rest to the worker's parser.
func Scan(body []byte) (Top, *Error) {
	t := Top{N: 1, Prompts: 1}
	var r reader
	r.begin(body)
	for r.Next() == jsonscan.Key {
		key := r.Decoded()
		f, known := fieldsByName[string(key)]
		if !known {
			t.field(&r, key)
			continue
		}
		if t.Has(f) {
			t.Twice = f.String()
		}
		at := span{key: r.Start()}
		r.Peek()
		at.val = r.Pos()
		t.field(&r, key)
		at.end = r.Pos()
		t.at[f] = at
	}
	if t.Messages {
		t.Prompts = 1
		if t.maxCompletion > 0 {
			t.MaxTokens = t.maxCompletion
		}
	}
	t.close = r.Pos() - 1
	if err := r.end(); err != nil {
		return Top{}, err
	}
	return t, nil
}

// field reads the value of a field. The key is only valid until then.
func (t *Top) field(r *reader, key []byte) {
	switch string(key) {
	case "model":
		t.Model = r.string("model")
	case "stream":
		t.Stream = r.bool("stream", false)
	case "seed":
		_, t.HasSeed = r.int("seed", math.MinInt64, math.MaxInt64)
	case "n":
		t.N = r.intOr("n", 1, 1, maxN)
	case "max_tokens":
		t.MaxTokens = r.intOr("max_tokens", 0, 0, math.MaxInt32)
	case "max_completion_tokens":
		t.maxCompletion = r.intOr("max_completion_tokens", 0, 0, math.MaxInt32)
	case "prompt":
		if t.Prompt, t.Prompts = t.prompts(r); len(t.Prompt) > 0 {
			t.Messages = false
		}
	case "echo":
		t.Echo = truth(r.raw())
	case "logprobs", "top_logprobs":
		raw := r.raw()
		t.Logprobs = t.Logprobs || truth(raw)
		if n, ok := atoi(raw); ok {
			t.TopLogprobs = max(t.TopLogprobs, min(n, MaxLogprobs))
		}
	case "prompt_logprobs":
		t.PromptLogprobs = r.raw() != nil
	case "messages":
		if t.Prompt = t.fetched(r, isMediaURL); len(t.Prompt) > 0 {
			t.Messages = true
		}
	case "input": // of embeddings and responses
		t.fetched(r, isMediaURL)
	case "tools":
		t.Tools = t.fetched(r, isServerURL)
	case "priority":
		t.Priority, t.HasPriority = r.int("priority", math.MinInt64, math.MaxInt64)
	case "service_tier":
		t.Tier = r.string("service_tier")
	case "cache_salt":
		t.Salt = r.raw()
	case "response_format":
		t.Bound = binds(r.raw()) || t.Bound
	case "tool_choice":
		switch string(r.raw()) {
		case "", `"auto"`, `"none"`:
		default:
			t.Bound = true
		}
	case "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object",
		"regex", "ebnf", "grammar", "json_schema":
		t.Bound = truth(r.raw()) || t.Bound
	default:
		if link := LinkField(key); r.raw() != nil && t.Link == "" {
			t.Link = link
		}
	}
}

// binds reports whether a response_format is of anything but text.
func binds(raw []byte) bool {
	var f struct{ Type string }
	return raw != nil && (json.Unmarshal(raw, &f) != nil || f.Type != "text")
}

// truth reports whether a value is neither false nor null. A worker checks its type.
func truth(raw []byte) bool { return raw != nil && raw[0] != 'f' }

// prompts reads prompt as raw does, and counts its prompts: each string or list of token ids
// is one, and token ids outside a list are one together.
func (t *Top) prompts(r *reader) (raw []byte, n int) {
	if r.Peek() != jsonscan.Array {
		return r.raw(), 1
	}
	from, ids := r.Pos(), false
	r.Next()
	for inside := r.Depth(); r.Depth() >= inside; {
		switch k := r.Next(); k {
		case jsonscan.None:
			return nil, 1
		case jsonscan.ObjectEnd, jsonscan.ArrayEnd, jsonscan.Key:
		case jsonscan.Object, jsonscan.Array:
			if r.Depth() == inside+1 {
				n++
			}
		default:
			if r.Depth() == inside {
				ids = ids || k == jsonscan.Number
				n++
			}
		}
	}
	if ids {
		n = 1
	}
	return r.Since(from), n
}

// LinkField returns the field's name if engines link legs with it, else "".
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
