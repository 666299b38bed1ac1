package openai

import (
	"fmt"
	"math"
	"strconv"
)

// ParseCompletion reads and validates a completions body. Nothing of body is
// kept, except as Prompt text copies.
func ParseCompletion(body []byte, lim Limits) (*Completion, *Error) {
	c := &Completion{Sampling: defaults(), AddSpecial: true}
	c.MaxTokens = new(16)
	p := parser{lim: lim.withDefaults()}
	err := p.body(body, func(key []byte) *Error { return p.completionField(c, key) })
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
func (p *parser) completionField(c *Completion, key []byte) (err *Error) {
	switch string(key) {
	case "prompt":
		c.Prompts, err = p.prompts()
	case "echo":
		c.Echo, _, err = p.r.readBool("echo")
	case "logprobs":
		c.Logprobs, err = p.optInt("logprobs", 0, int64(p.lim.MaxLogprobs))
	case "max_tokens":
		if c.MaxTokens, err = p.optInt("max_tokens", 0, math.MaxInt32); c.MaxTokens == nil {
			c.MaxTokens = new(16)
		}
	case "add_special_tokens":
		err = p.boolOr("add_special_tokens", &c.AddSpecial, true)
	case "best_of":
		var n int64
		var given bool
		n, given, err = p.r.readInt("best_of", math.MinInt32, math.MaxInt32)
		p.bestOf = given && n != 1
	case "suffix":
		var s string
		if s, _, err = p.r.readString("suffix"); err == nil && s != "" {
			err = BadRequest("suffix", "suffix is not supported")
		}
	case "response_format":
		err = p.textFormatOnly()
	default:
		err = p.sampling(&c.Sampling, key)
	}
	return err
}

func defaults() Sampling {
	return Sampling{N: 1, SkipSpecial: true, Temperature: 1, TopP: 1, Repetition: 1}
}

// parser is one parse: the reader, the limits, and what only the end of the
// object can decide.
type parser struct {
	r      reader
	lim    Limits
	bestOf bool

	unknown bool // there was a field that is skipped
	values  int  // JSON values in the field that is read, see maxValues

	completionTokens bool // max_completion_tokens was given
	topLogprobs      bool // top_logprobs above 0 was given
	generationGiven  bool // add_generation_prompt was given and true
}

func (p *parser) body(body []byte, field func(key []byte) *Error) *Error {
	r, err := newReader(body, p.lim.MaxDepth)
	if err != nil {
		return err
	}
	p.r = r
	if p.r.peek() != '{' {
		return p.r.notObject()
	}
	if err := p.r.object(field); err != nil {
		return err
	}
	return p.r.end()
}

// sampling reads one field that completions and chat share; unknown ones are
// checked for syntax and ignored.
func (p *parser) sampling(s *Sampling, key []byte) (err *Error) {
	r := &p.r
	switch string(key) {
	case "model":
		s.Model, _, err = r.readString("model")
	case "user":
		s.User, _, err = r.readString("user")
	case "n":
		err = p.intOr("n", &s.N, 1, 1, int64(p.lim.MaxN))
	case "seed":
		var v int64
		var given bool
		if v, given, err = r.readInt("seed", math.MinInt64, math.MaxInt64); given {
			s.Seed = &v
		} else {
			s.Seed = nil
		}
	case "stream":
		s.Stream, _, err = r.readBool("stream")
	case "stream_options":
		err = p.streamOptions(s)
	case "min_tokens":
		err = p.intOr("min_tokens", &s.MinTokens, 0, 0, math.MaxInt32)
	case "stop":
		s.Stop, err = p.stop()
	case "stop_token_ids":
		s.StopTokenIDs, err = p.tokenIDs("stop_token_ids", p.lim.MaxBias)
	case "include_stop_str_in_output":
		s.IncludeStop, _, err = r.readBool("include_stop_str_in_output")
	case "ignore_eos":
		s.IgnoreEOS, _, err = r.readBool("ignore_eos")
	case "skip_special_tokens":
		err = p.boolOr("skip_special_tokens", &s.SkipSpecial, true)
	case "temperature":
		err = p.float("temperature", s, GivenTemperature, &s.Temperature, 1, 0, 2)
	case "top_p":
		if err = p.float("top_p", s, GivenTopP, &s.TopP, 1, 0, 1); err == nil && s.TopP == 0 {
			err = BadRequest("top_p", "top_p must be above 0 and at most 1")
		}
	case "min_p":
		err = p.float("min_p", s, GivenMinP, &s.MinP, 0, 0, 1)
	case "top_k":
		var v int64
		var given bool
		v, given, err = r.readInt("top_k", -1, math.MaxInt32)
		s.TopK = int(max(v, 0)) // -1 and 0 both mean the whole vocabulary
		s.give(GivenTopK, given)
	case "presence_penalty":
		err = p.float("presence_penalty", s, 0, &s.Presence, 0, -2, 2)
	case "frequency_penalty":
		err = p.float("frequency_penalty", s, 0, &s.Frequency, 0, -2, 2)
	case "repetition_penalty":
		if err = p.float("repetition_penalty", s, GivenRepetition, &s.Repetition, 1, 0, 2); err == nil && s.Repetition == 0 {
			err = BadRequest("repetition_penalty", "repetition_penalty must be above 0 and at most 2")
		}
	case "logit_bias":
		s.LogitBias, err = p.logitBias()
	case "prompt_logprobs":
		s.PromptLogprobs, err = p.optInt("prompt_logprobs", 0, int64(p.lim.MaxLogprobs))
	case "return_token_ids":
		s.ReturnTokenIDs, _, err = r.readBool("return_token_ids")
	case "cache_salt":
		var given bool
		if s.CacheSalt, given, err = r.readString("cache_salt"); given && s.CacheSalt == "" {
			err = BadRequest("cache_salt", "cache_salt must not be empty")
		}
	case "cache_priority":
		var v int64
		var given bool
		if v, given, err = r.readInt("cache_priority", 0, 100); given {
			s.CachePriority = int(v) - 50
		}
	case "kv_transfer_params":
		if c := r.peek(); c != '{' && c != 'n' {
			return r.wrong("kv_transfer_params", "an object")
		}
		var raw []byte
		raw, err = r.raw()
		s.KVTransferParams = clone(raw)
	case "use_beam_search":
		var on bool
		if on, _, err = r.readBool("use_beam_search"); on {
			err = BadRequest("use_beam_search", "use_beam_search is not supported")
		}
	case "allowed_token_ids", "bad_words", "logits_processors", "prompt_embeds", "truncate_prompt_tokens",
		"structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar":
		// They would change the answer, so they may not be ignored.
		name := string(key)
		var raw []byte
		if raw, err = r.raw(); err == nil && raw != nil && string(raw) != "[]" {
			err = BadRequest(name, "%s is not supported", name)
		}
	default:
		p.unknown = true
		err = r.skip()
	}
	return err
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

func (p *parser) streamOptions(s *Sampling) *Error {
	s.IncludeUsage, s.ContinuousUsage = false, false
	if null, err := p.r.null(); null || err != nil {
		return err
	}
	if p.r.peek() != '{' {
		return p.r.wrong("stream_options", "an object")
	}
	return p.r.object(func(key []byte) (err *Error) {
		switch string(key) {
		case "include_usage":
			s.IncludeUsage, _, err = p.r.readBool("stream_options.include_usage")
		case "continuous_usage_stats":
			s.ContinuousUsage, _, err = p.r.readBool("stream_options.continuous_usage_stats")
		default:
			err = p.r.skip()
		}
		return err
	})
}

// prompts reads the four forms of prompt.
func (p *parser) prompts() ([]Prompt, *Error) {
	switch p.r.peek() {
	case 'n':
		return nil, p.r.literal("null")
	case '"':
		text, _, err := p.r.readString("prompt")
		return []Prompt{{Text: text}}, err
	case '[':
	default:
		return nil, p.r.wrong("prompt", "a string, a list of strings, a token list, or a list of token lists")
	}
	var out []Prompt
	flat := false // a bare token list: one prompt
	err := p.r.array(func(i int) *Error {
		c := p.r.peek()
		isNum := c == '-' || c >= '0' && c <= '9'
		if i == 0 {
			flat = isNum
		}
		if flat && i > 0 {
			i = len(out[0].Tokens) // plainInts goes ahead
		}
		if flat != isNum || i > 0 && !flat && (c == '[') != out[0].IsTokens {
			return p.r.wrong(fmt.Sprintf("prompt[%d]", i), "of the same type as those before it")
		}
		if flat {
			if i == 0 {
				out = []Prompt{{IsTokens: true, Tokens: p.idsAhead()}}
			}
			id, err := p.tokenID("prompt", i)
			out[0].Tokens = p.r.plainInts(append(out[0].Tokens, id), p.highestID())
			return err
		}
		if len(out) == p.lim.MaxPrompts {
			return BadRequest("prompt", "prompt has more than %d entries", p.lim.MaxPrompts)
		}
		name := fmt.Sprintf("prompt[%d]", i)
		switch c {
		case '"':
			text, _, err := p.r.readString(name)
			out = append(out, Prompt{Text: text})
			return err
		case '[':
			ids, err := p.tokenIDs(name, math.MaxInt32)
			if err == nil && len(ids) == 0 {
				err = BadRequest("prompt", "%s is empty", name)
			}
			out = append(out, Prompt{Tokens: ids, IsTokens: true})
			return err
		}
		return p.r.wrong(name, "a string or a token list")
	})
	if err != nil {
		err.Param = paramRoot(err.Param)
		return nil, err
	}
	if len(out) == 0 {
		return nil, BadRequest("prompt", "prompt is empty")
	}
	return out, nil
}

// paramRoot keeps prompt of prompt[3][1]: the field, where the message has
// the index.
func paramRoot(param string) string {
	for i := range len(param) {
		if param[i] == '[' {
			return param[:i]
		}
	}
	return param
}

// idsAhead has room for as many ids of some digits as there are bytes left for.
func (p *parser) idsAhead() []int32 { return make([]int32, 0, (len(p.r.b)-p.r.i)/4) }

func (p *parser) highestID() int64 {
	if p.lim.VocabSize > 0 {
		return int64(p.lim.VocabSize) - 1
	}
	return math.MaxInt32
}

func (p *parser) tokenID(field string, i int) (int32, *Error) {
	hi := p.highestID()
	// The common case, without a name for the error that will not come.
	at := p.r.i
	if id, ok := p.r.plainInt(); ok && id <= hi {
		return int32(id), nil
	}
	p.r.i = at
	id, given, err := p.r.readInt(field, 0, hi)
	if err == nil && given {
		return int32(id), nil
	}
	p.r.i = at
	name := fmt.Sprintf("%s[%d]", field, i)
	if !given && err == nil {
		return 0, p.r.wrong(name, "a token id")
	}
	_, _, err = p.r.readInt(name, 0, hi)
	return 0, err
}

func (p *parser) tokenIDs(field string, limit int) ([]int32, *Error) {
	if null, err := p.r.null(); null || err != nil {
		return nil, err
	}
	if p.r.peek() != '[' {
		return nil, p.r.wrong(field, "a list of token ids")
	}
	ids := []int32{}
	err := p.r.array(func(i int) *Error {
		if i >= limit {
			return BadRequest(field, "%s has more than %d entries", field, limit)
		}
		id, err := p.tokenID(field, i)
		ids = append(ids, id)
		return err
	})
	if err != nil {
		err.Param = paramRoot(err.Param)
		return nil, err
	}
	return ids, nil
}

// stop reads a string or a list of strings; an empty string stops nothing and
// is refused.
func (p *parser) stop() ([]string, *Error) {
	one := func(field string) (string, *Error) {
		s, given, err := p.r.readString(field)
		switch {
		case err != nil:
			err.Param = paramRoot(err.Param)
			return "", err
		case !given || s == "":
			return "", BadRequest("stop", "%s must not be empty", field)
		case len(s) > p.lim.MaxStopBytes:
			return "", BadRequest("stop", "%s is longer than %d bytes", field, p.lim.MaxStopBytes)
		}
		return s, nil
	}
	switch p.r.peek() {
	case 'n':
		return nil, p.r.literal("null")
	case '"':
		s, err := one("stop")
		return []string{s}, err
	case '[':
	default:
		return nil, p.r.wrong("stop", "a string or a list of strings")
	}
	var out []string
	err := p.r.array(func(i int) *Error {
		if i >= p.lim.MaxStops {
			return BadRequest("stop", "stop has more than %d entries", p.lim.MaxStops)
		}
		s, err := one(fmt.Sprintf("stop[%d]", i))
		out = append(out, s)
		return err
	})
	return out, err
}

func (p *parser) logitBias() ([]Bias, *Error) {
	if null, err := p.r.null(); null || err != nil {
		return nil, err
	}
	if p.r.peek() != '{' {
		return nil, p.r.wrong("logit_bias", "an object")
	}
	hi := int64(math.MaxInt32)
	if p.lim.VocabSize > 0 {
		hi = int64(p.lim.VocabSize) - 1
	}
	var out []Bias
	at := map[int32]int{} // id -> index in out, for duplicate keys
	err := p.r.object(func(key []byte) *Error {
		id, perr := strconv.ParseInt(string(key), 10, 32)
		if perr != nil || id < 0 || id > hi {
			return BadRequest("logit_bias", "logit_bias has the key %q, which is no token id of this model", clip(string(key), 40))
		}
		v, given, err := p.r.readFloat(fmt.Sprintf("logit_bias[%d]", id), -100, 100)
		if err != nil || !given {
			if err == nil {
				err = BadRequest("logit_bias", "logit_bias[%d] must be a number", id)
			}
			err.Param = paramRoot(err.Param)
			return err
		}
		if i, dup := at[int32(id)]; dup {
			out[i].Value = v
			return nil
		}
		if len(out) == p.lim.MaxBias {
			return BadRequest("logit_bias", "logit_bias has more than %d entries", p.lim.MaxBias)
		}
		at[int32(id)] = len(out)
		out = append(out, Bias{int32(id), v})
		return nil
	})
	return out, err
}

// textFormatOnly accepts response_format null or {"type":"text"}.
func (p *parser) textFormatOnly() *Error {
	raw, err := p.r.raw()
	if err != nil || raw == nil {
		return err
	}
	if kind, err := objectType(raw, "response_format", p.lim.MaxDepth); err != nil || kind != "text" {
		if err != nil {
			return err
		}
		return BadRequest("response_format", "response_format is not supported here")
	}
	return nil
}

// objectType reads the member "type" of a raw JSON object.
func objectType(raw []byte, field string, maxDepth int) (kind string, err *Error) {
	r := reader{b: raw, maxDepth: maxDepth}
	if r.peek() != '{' {
		return "", r.wrong(field, "an object")
	}
	err = r.object(func(key []byte) (err *Error) {
		if string(key) == "type" {
			kind, _, err = r.readString(field + ".type")
			return err
		}
		return r.skip()
	})
	return kind, err
}

// optInt reads an integer that may be absent.
func (p *parser) optInt(field string, lo, hi int64) (*int, *Error) {
	v, given, err := p.r.readInt(field, lo, hi)
	if err != nil || !given {
		return nil, err
	}
	n := int(v)
	return &n, nil
}

func (p *parser) intOr(field string, dst *int, def int, lo, hi int64) *Error {
	v, given, err := p.r.readInt(field, lo, hi)
	if *dst = int(v); !given {
		*dst = def
	}
	return err
}

func (p *parser) boolOr(field string, dst *bool, def bool) *Error {
	v, given, err := p.r.readBool(field)
	if *dst = v; !given {
		*dst = def
	}
	return err
}

func (p *parser) float(field string, s *Sampling, f Fields, dst *float32, def float32, lo, hi float64) *Error {
	v, given, err := p.r.readFloat(field, lo, hi)
	if *dst = v; !given {
		*dst = def
	}
	s.give(f, given)
	return err
}

func clone(b []byte) []byte {
	if b == nil {
		return nil
	}
	return append([]byte(nil), b...)
}
