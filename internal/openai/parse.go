package openai

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"

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
	if err := c.check(p.streamOptionsGiven); err != nil {
		return nil, err
	}
	if c.LogprobIDs != nil && (c.Logprobs == nil || *c.MaxTokens == 0) {
		return nil, BadRequest("logprob_token_ids", "logprob_token_ids needs logprobs, and max_tokens above 0")
	}
	return c, nil
}

// completionField reads one field of a completion.
func (p *parser) completionField(c *Completion, key []byte) {
	switch string(key) {
	case "prompt":
		c.Prompts = p.prompts("prompt")
	case "echo":
		c.Echo = p.bool("echo", false)
	case "logprobs":
		c.Logprobs = p.optInt("logprobs", All, maxListed)
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

	streamOptionsGiven bool

	completionTokens bool   // max_completion_tokens was given
	topLogprobs      bool   // top_logprobs above 0 was given
	generationGiven  bool   // add_generation_prompt was given
	effort           string // reasoning_effort
	documents        json.RawMessage

	batch         bool // messages are conversations
	conversations [][]json.RawMessage
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
		s.PromptLogprobs = p.optInt("prompt_logprobs", All, maxListed)
	case "logprob_token_ids":
		s.LogprobIDs = p.someIDs("logprob_token_ids", maxBias)
	case "allowed_token_ids":
		s.AllowedIDs = p.someIDs("allowed_token_ids", maxAllowed)
	case "bad_words":
		s.BadWords = p.badWords()
	case "truncate_prompt_tokens":
		if s.Truncate = p.optInt("truncate_prompt_tokens", -1, math.MaxInt32); s.Truncate != nil && *s.Truncate == 0 {
			p.refuse("truncate_prompt_tokens", "truncate_prompt_tokens must be -1 or above 0")
		}
	case "truncation_side":
		switch side := p.string("truncation_side"); side {
		case "", "left", "right":
			s.KeepHead = side == "right"
		default:
			p.refuse("truncation_side", "truncation_side must be left or right, not %q", clip(side, 40))
		}
	case "return_token_ids":
		s.ReturnTokenIDs = p.bool("return_token_ids", false)
	case "return_tokens_as_token_ids":
		s.give(GivenTokensAsIDs, p.Peek() != jsonscan.Null)
		s.TokensAsIDs = p.bool("return_tokens_as_token_ids", false)
	case "cache_salt":
		given := p.Peek() != jsonscan.Null
		switch s.CacheSalt = p.string("cache_salt"); {
		case given && s.CacheSalt == "":
			p.refuse("cache_salt", "cache_salt must not be empty")
		case len(s.CacheSalt) > maxSalt:
			p.refuse("cache_salt", "cache_salt has %d bytes; %d is the limit", len(s.CacheSalt), maxSalt)
		}
	case "cache_priority":
		s.CachePriority = p.intOr("cache_priority", 50, 0, 100) - 50
	case "kv_transfer_params":
		if k := p.Peek(); k != jsonscan.Object && k != jsonscan.Null {
			p.wrong("kv_transfer_params", "an object")
		}
		s.KVTransferParams = bytes.Clone(p.raw())
	case "bootstrap_host", "bootstrap_port", "bootstrap_room":
		p.bootstrap(s, string(key))
	case "use_beam_search":
		if p.bool("use_beam_search", false) {
			p.refuse("use_beam_search", "use_beam_search is not supported")
		}
	case "logits_processors", "prompt_embeds":
		// They would change the answer, so they may not be ignored.
		name := string(key)
		if raw := p.raw(); raw != nil && string(raw) != "[]" {
			p.refuse(name, "%s is not supported", name)
		}
	case "stop_regex", "lora_path", "thinking_token_budget", "watermarking", "repetition_detection", "return_weight_versions",
		"return_prompt_text", "ec_transfer_params":
		name := string(key)
		if raw := p.raw(); raw != nil && string(raw) != "false" {
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
func (s *Sampling) check(streamOptions bool) *Error {
	switch {
	case s.MaxTokens != nil && s.MinTokens > *s.MaxTokens:
		return BadRequest("min_tokens", "min_tokens (%d) is above max_tokens (%d)", s.MinTokens, *s.MaxTokens)
	case s.Stream && s.PromptLogprobs != nil:
		return BadRequest("prompt_logprobs", "prompt_logprobs is not available when stream is true")
	case !s.Stream && streamOptions:
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
	p.streamOptionsGiven = p.Peek() != jsonscan.Null
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
func (p *parser) prompts(field string) (out []Prompt) {
	if p.Peek() == jsonscan.String {
		return []Prompt{{Text: p.string(field)}}
	}
	if !p.is(field, jsonscan.Array, "a string, a list of strings, a token list, or a list of token lists") {
		return nil
	}
	if p.Peek() == jsonscan.Number { // one prompt of token ids
		room := make([]int32, 0, p.Left()/4) // for ids of some digits
		return []Prompt{{Tokens: p.idsAfter(room, field, math.MaxInt32), IsTokens: true}}
	}
	first := p.Peek()
	for p.Item() {
		name := fmt.Sprintf("%s[%d]", field, len(out))
		switch k := p.Peek(); {
		case len(out) == maxPrompts:
			p.refuse(field, "%s has more than %d entries", field, maxPrompts)
		case k != first:
			p.wrong(name, "of the same type as those before it")
		case k == jsonscan.String:
			out = append(out, Prompt{Text: p.string(name)})
		case k == jsonscan.Array:
			ids := p.tokenIDs(name, math.MaxInt32)
			if len(ids) == 0 {
				p.refuse(field, "%s is empty", name)
			}
			out = append(out, Prompt{Tokens: ids, IsTokens: true})
		default:
			p.wrong(name, "a string or a token list")
		}
	}
	if len(out) == 0 {
		p.refuse(field, "%s is empty", field)
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
			id, _ := p.int(name, math.MinInt64, math.MaxInt64)
			if id < 0 || id > p.highestID() {
				p.refuse(field, "%s must be between 0 and %d, not %d, which is out of vocabulary", name, p.highestID(), id)
			}
			ids = append(ids, int32(id))
		}
		if len(ids) > limit {
			p.refuse(field, "%s has more than %d entries", field, limit)
		}
	}
	return ids
}

// someIDs reads a list of token ids; nil for null, and refused if it is empty: it would leave nothing.
func (p *parser) someIDs(field string, limit int) []int32 {
	ids := p.tokenIDs(field, limit)
	if ids != nil && len(ids) == 0 {
		p.refuse(field, "%s must not be empty", field)
	}
	return ids
}

// badWords reads a list of texts, none of them empty.
func (p *parser) badWords() (out []string) {
	if !p.is("bad_words", jsonscan.Array, "a list of strings") {
		return nil
	}
	for p.Item() {
		name := fmt.Sprintf("bad_words[%d]", len(out))
		word := ""
		if p.Peek() == jsonscan.String {
			word = p.string(name)
		} else {
			p.wrong(name, "a string")
		}
		switch {
		case word == "":
			p.refuse("bad_words", "%s must not be empty", name)
		case len(word) > maxStopBytes:
			p.refuse("bad_words", "%s is longer than %d bytes", name, maxStopBytes)
		case len(out) == maxBias:
			p.refuse("bad_words", "bad_words has more than %d entries", maxBias)
		}
		out = append(out, word)
	}
	return out
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
	var bad []string      // keys, for the message
	for p.Next() == jsonscan.Key {
		key := p.Decoded()
		id, err := strconv.ParseInt(string(key), 10, 32)
		if err != nil || id < 0 || id > p.highestID() {
			if len(bad) < maxNamed {
				bad = append(bad, strconv.Quote(clip(string(key), 40)))
			}
			p.Skip()
			continue
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
	if len(bad) > 0 {
		p.refuse("logit_bias", "logit_bias has the keys %s, which are no token ids of this model: it has %d, from 0 on", strings.Join(bad, ", "), p.highestID()+1)
	}
	return out
}

// maxNamed is how many of an object's wrong keys an error names.
const maxNamed = 8
