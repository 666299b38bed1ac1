package openai

import (
	"bytes"
	"fmt"
	"math"
	"strconv"

	"github.com/xpyd/xpyd/internal/jsonscan"
)

// ParseCompletion reads and validates a completions body, without aliasing it. Token ids must
// be below vocab; 0 leaves them unchecked.
func ParseCompletion(body []byte, vocab int) (*Completion, *Error) {
	c := &Completion{Sampling: defaults(), AddSpecial: true}
	c.MaxTokens = new(16)
	p := parser{vocab: vocab}
	p.begin(body)
	for p.Next() == jsonscan.Key {
		p.completionField(c, p.Decoded())
	}
	err := p.end()
	switch {
	case err != nil:
		return nil, err
	case p.bestOf:
		return nil, BadRequest("best_of", "best_of is not supported; use n")
	case len(c.Prompts) == 0:
		return nil, BadRequest("prompt", "prompt is required")
	case *c.MaxTokens == 0 && !c.Echo:
		return nil, BadRequest("max_tokens", "max_tokens must be between 1 and %d, not 0 (which goes with echo only)", math.MaxInt32)
	}
	if err := c.check(); err != nil {
		return nil, err
	}
	return c, nil
}

// completionField reads one field of a completion.
func (p *parser) completionField(c *Completion, key []byte) {
	switch string(key) {
	case "prompt":
		c.Prompts = p.prompts()
	case "echo":
		c.Echo = p.bool("echo", false)
	case "logprobs":
		c.Logprobs = p.optInt("logprobs", 0, maxLogprobs)
	case "max_tokens":
		c.MaxTokens = new(p.intOr("max_tokens", 16, 0, math.MaxInt32))
	case "add_special_tokens":
		c.AddSpecial = p.bool("add_special_tokens", true)
	case "best_of":
		p.bestOf = p.intOr("best_of", 1, math.MinInt32, math.MaxInt32) != 1
	case "suffix":
		if p.string("suffix") != "" {
			p.refuse("suffix", "suffix is not supported")
		}
	case "response_format":
		p.responseFormat(&c.Sampling)
	default:
		p.sampling(&c.Sampling, key)
	}
}

func defaults() Sampling {
	return Sampling{N: 1, SkipSpecial: true, Temperature: 1, TopP: 1, Repetition: 1}
}

// parser is one parse, with what only the end of the object can decide.
type parser struct {
	reader
	vocab  int
	bestOf bool

	unknown bool // an unknown field was skipped
	values  int  // JSON values in the field being read, see maxValues

	completionTokens bool   // max_completion_tokens was given
	topLogprobs      bool   // top_logprobs above 0 was given
	generationGiven  bool   // add_generation_prompt was given
	effort           string // reasoning_effort
}

// sampling reads one field that completions and chat share. It skips unknown ones.
func (p *parser) sampling(s *Sampling, key []byte) {
	switch string(key) {
	case "model":
		s.Model = p.string("model")
	case "user":
		s.User = p.string("user")
	case "n":
		s.N = p.intOr("n", 1, 1, maxN)
	case "seed":
		s.Seed = nil
		if v, given := p.int("seed", math.MinInt64, math.MaxInt64); given {
			s.Seed = &v
		}
	case "stream":
		s.Stream = p.bool("stream", false)
	case "stream_options":
		p.streamOptions(s)
	case "min_tokens":
		s.MinTokens = p.intOr("min_tokens", 0, 0, math.MaxInt32)
	case "stop":
		s.Stop = p.stop()
	case "stop_token_ids":
		s.StopTokenIDs = p.tokenIDs("stop_token_ids", maxBias)
	case "include_stop_str_in_output":
		s.IncludeStop = p.bool("include_stop_str_in_output", false)
	case "ignore_eos":
		s.IgnoreEOS = p.bool("ignore_eos", false)
	case "skip_special_tokens":
		s.SkipSpecial = p.bool("skip_special_tokens", true)
	case "temperature":
		s.Temperature = p.floatOr("temperature", s, GivenTemperature, 1, 0, 2)
	case "top_p":
		if s.TopP = p.floatOr("top_p", s, GivenTopP, 1, 0, 1); s.TopP == 0 {
			p.refuse("top_p", "top_p must be above 0 and at most 1")
		}
	case "min_p":
		s.MinP = p.floatOr("min_p", s, GivenMinP, 0, 0, 1)
	case "top_k":
		v, given := p.int("top_k", -1, math.MaxInt32)
		s.TopK = int(max(v, 0)) // -1 and 0 both mean the whole vocabulary
		s.give(GivenTopK, given)
	case "presence_penalty":
		s.Presence = p.floatOr("presence_penalty", s, 0, 0, -2, 2)
	case "frequency_penalty":
		s.Frequency = p.floatOr("frequency_penalty", s, 0, 0, -2, 2)
	case "repetition_penalty":
		if s.Repetition = p.floatOr("repetition_penalty", s, GivenRepetition, 1, 0, 2); s.Repetition == 0 {
			p.refuse("repetition_penalty", "repetition_penalty must be above 0 and at most 2")
		}
	case "logit_bias":
		s.LogitBias = p.logitBias()
	case "prompt_logprobs":
		s.PromptLogprobs = p.optInt("prompt_logprobs", 0, maxLogprobs)
	case "return_token_ids":
		s.ReturnTokenIDs = p.bool("return_token_ids", false)
	case "cache_salt":
		given := p.Peek() != jsonscan.Null
		if s.CacheSalt = p.string("cache_salt"); given && s.CacheSalt == "" {
			p.refuse("cache_salt", "cache_salt must not be empty")
		}
	case "cache_priority":
		s.CachePriority = p.intOr("cache_priority", 50, 0, 100) - 50
	case "kv_transfer_params":
		if k := p.Peek(); k != jsonscan.Object && k != jsonscan.Null {
			p.wrong("kv_transfer_params", "an object")
		}
		s.KVTransferParams = bytes.Clone(p.raw())
	case "use_beam_search":
		if p.bool("use_beam_search", false) {
			p.refuse("use_beam_search", "use_beam_search is not supported")
		}
	case "allowed_token_ids", "bad_words", "logits_processors", "prompt_embeds", "truncate_prompt_tokens":
		// They would change the answer, so they may not be ignored.
		name := string(key)
		if raw := p.raw(); raw != nil && string(raw) != "[]" {
			p.refuse(name, "%s is not supported", name)
		}
	default:
		if !p.constraint(s, key) {
			p.unknown = true
			p.Skip()
		}
	}
}

// check refuses what single fields cannot show.
func (s *Sampling) check() *Error {
	switch {
	case s.MaxTokens != nil && s.MinTokens > *s.MaxTokens:
		return BadRequest("min_tokens", "min_tokens (%d) is above max_tokens (%d)", s.MinTokens, *s.MaxTokens)
	case s.Stream && s.PromptLogprobs != nil:
		return BadRequest("prompt_logprobs", "prompt_logprobs is not available when stream is true")
	case !s.Stream && (s.IncludeUsage || s.ContinuousUsage):
		return BadRequest("stream_options", "stream_options needs stream to be true")
	}
	return nil
}

func (s *Sampling) give(f Fields, given bool) {
	s.Given &^= f
	if given {
		s.Given |= f
	}
}

// floatOr is float, with def for null, and notes in s whether f is given.
func (p *parser) floatOr(field string, s *Sampling, f Fields, def float32, lo, hi float64) float32 {
	v, given := p.float(field, lo, hi)
	if s.give(f, given); !given {
		return def
	}
	return v
}

func (p *parser) streamOptions(s *Sampling) {
	s.IncludeUsage, s.ContinuousUsage = false, false
	if !p.is("stream_options", jsonscan.Object, "an object") {
		return
	}
	for p.Next() == jsonscan.Key {
		switch string(p.Decoded()) {
		case "include_usage":
			s.IncludeUsage = p.bool("stream_options.include_usage", false)
		case "continuous_usage_stats":
			s.ContinuousUsage = p.bool("stream_options.continuous_usage_stats", false)
		default:
			p.Skip()
		}
	}
}

// prompts reads the four forms of prompt.
func (p *parser) prompts() (out []Prompt) {
	if p.Peek() == jsonscan.String {
		return []Prompt{{Text: p.string("prompt")}}
	}
	if !p.is("prompt", jsonscan.Array, "a string, a list of strings, a token list, or a list of token lists") {
		return nil
	}
	if p.Peek() == jsonscan.Number { // one prompt of token ids
		room := make([]int32, 0, p.Left()/4) // for ids of some digits
		return []Prompt{{Tokens: p.idsAfter(room, "prompt", math.MaxInt32), IsTokens: true}}
	}
	first := p.Peek()
	for p.Item() {
		name := fmt.Sprintf("prompt[%d]", len(out))
		switch k := p.Peek(); {
		case len(out) == maxPrompts:
			p.refuse("prompt", "prompt has more than %d entries", maxPrompts)
		case k != first:
			p.wrong(name, "of the same type as those before it")
		case k == jsonscan.String:
			out = append(out, Prompt{Text: p.string(name)})
		case k == jsonscan.Array:
			ids := p.tokenIDs(name, math.MaxInt32)
			if len(ids) == 0 {
				p.refuse("prompt", "%s is empty", name)
			}
			out = append(out, Prompt{Tokens: ids, IsTokens: true})
		default:
			p.wrong(name, "a string or a token list")
		}
	}
	if len(out) == 0 {
		p.refuse("prompt", "prompt is empty")
	}
	return out
}

func (p *parser) highestID() int64 {
	if p.vocab > 0 {
		return int64(p.vocab) - 1
	}
	return math.MaxInt32
}

func (p *parser) tokenIDs(field string, limit int) []int32 {
	if !p.is(field, jsonscan.Array, "a list of token ids") {
		return nil
	}
	return p.idsAfter([]int32{}, field, limit)
}

// idsAfter appends a list of token ids, behind its bracket.
func (p *parser) idsAfter(ids []int32, field string, limit int) []int32 {
	for p.Item() {
		n := len(ids)
		if ids = p.Ints(ids, p.highestID()); len(ids) == n {
			name := fmt.Sprintf("%s[%d]", field, n)
			if p.Peek() != jsonscan.Number {
				p.wrong(name, "a token id")
			}
			id, _ := p.int(name, 0, p.highestID())
			ids = append(ids, int32(id))
		}
		if len(ids) > limit {
			p.refuse(field, "%s has more than %d entries", field, limit)
		}
	}
	return ids
}

// stop reads a string or a list of strings, none of them empty.
func (p *parser) stop() (out []string) {
	one := func(field string) {
		s := p.string(field)
		switch {
		case s == "":
			p.refuse("stop", "%s must not be empty", field)
		case len(s) > maxStopBytes:
			p.refuse("stop", "%s is longer than %d bytes", field, maxStopBytes)
		}
		out = append(out, s)
	}
	if p.Peek() == jsonscan.String {
		one("stop")
		return out
	}
	if !p.is("stop", jsonscan.Array, "a string or a list of strings") {
		return nil
	}
	for p.Item() {
		if len(out) == maxStops {
			p.refuse("stop", "stop has more than %d entries", maxStops)
		}
		one(fmt.Sprintf("stop[%d]", len(out)))
	}
	return out
}

func (p *parser) logitBias() (out []Bias) {
	if !p.is("logit_bias", jsonscan.Object, "an object") {
		return nil
	}
	at := map[int32]int{} // id -> index in out, for duplicate keys
	for p.Next() == jsonscan.Key {
		id, err := strconv.ParseInt(string(p.Decoded()), 10, 32)
		if err != nil || id < 0 || id > p.highestID() {
			p.refuse("logit_bias", "logit_bias has the key %q, which is no token id of this model", clip(string(p.Decoded()), 40))
		}
		v, given := p.float(fmt.Sprintf("logit_bias[%d]", id), -100, 100)
		i, twice := at[int32(id)]
		switch {
		case !given:
			p.refuse("logit_bias", "logit_bias[%d] must be a number", id)
		case twice:
			out[i].Value = v
		case len(out) == maxBias:
			p.refuse("logit_bias", "logit_bias has more than %d entries", maxBias)
		default:
			at[int32(id)] = len(out)
			out = append(out, Bias{int32(id), v})
		}
	}
	return out
}

// objectType reads an object, counting its values, and returns its member "type"; given is
// false for null.
func (p *parser) objectType(field string) (kind string, given bool) {
	if !p.is(field, jsonscan.Object, "an object") {
		return "", false
	}
	p.count(field)
	for p.Next() == jsonscan.Key {
		if string(p.Decoded()) != "type" {
			p.walk(field)
			continue
		}
		p.count(field)
		kind = p.string(field + ".type")
	}
	return kind, true
}
