package openai

import (
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/xpyd/xpyd/internal/jsonscan"
)

// LongestPin bounds ttl_s.
const LongestPin = 31 * 24 * time.Hour

// Pin holds the fields of a pin's or unpin's body that completions and chats lack. The prompt
// (or messages), cache_salt and Cache name what is pinned.
type Pin struct {
	TTL   time.Duration // of a new pin
	ID    string        // the pin to end; "": the one of the prompt
	Chat  bool          // the prompt is messages
	Cache string        // of the API keys whose prompt it is
}

// ParsePin reads the body of a pin or, if ends, of an unpin, and leaves the prompt's own fields
// to ParseCompletion and ParseChat. It refuses unknown fields, since a mistaken pin shows too
// late.
func ParsePin(body []byte, ends bool) (pin Pin, _ *Error) {
	p := parser{}
	var prompt, ttl bool
	p.begin(body)
	for p.Next() == jsonscan.Key {
		switch name := string(p.Decoded()); name {
		case "ttl_s":
			pin.TTL, ttl = p.seconds("ttl_s", LongestPin)
		case "cache":
			pin.Cache = p.string("cache")
		case "id":
			pin.ID = p.string("id")
		case "prompt", "messages":
			if p.raw() != nil {
				prompt, pin.Chat = true, pin.Chat || name == "messages"
			}
		default:
			if !known(name) {
				name = clip(name, 40)
				p.refuse(name, "%s is unknown; send %s, and what else the completion or the chat has", name, wanted(ends))
			}
			p.Skip()
		}
	}
	err := p.end()
	switch {
	case err != nil && err.Param == "" && strings.TrimSpace(string(body)) == "":
		err = BadRequest("", "the body must be JSON: it is empty; send %s", wanted(ends))
	case err != nil && err.Param == "":
		err = BadRequest("", "the body must be JSON: %s; send %s", strings.TrimPrefix(err.Message, "the body is not valid JSON: "), wanted(ends))
	case err != nil:
	case ends && pin.ID == "" && !prompt:
		err = BadRequest("id", "id, prompt or messages is required; send %s", wanted(true))
	case !ends && !prompt:
		err = BadRequest("prompt", "prompt or messages is required; send %s", wanted(false))
	case !ends && !ttl:
		err = BadRequest("ttl_s", "ttl_s is required: seconds, above 0 and at most %d", int(LongestPin.Seconds()))
	}
	return pin, err
}

// wanted returns an example of a pin's body, or of an unpin's.
func wanted(ends bool) string {
	if ends {
		return `{"id": "…"} or {"prompt": "You are …"}`
	}
	return `{"prompt": "You are …", "ttl_s": 3600}`
}

// seconds reads a number of seconds above 0; given is false for null.
func (p *parser) seconds(field string, most time.Duration) (d time.Duration, given bool) {
	text := p.number(field, "a number of seconds")
	if text == nil {
		return 0, false
	}
	f, err := strconv.ParseFloat(string(text), 64)
	if err != nil || f <= 0 || f > most.Seconds() {
		p.refuse(field, "%s must be above 0 and at most %d, not %s", field, int(most.Seconds()), clip(string(text), 40))
	}
	return time.Duration(f * float64(time.Second)), true
}

// elsewhere lists request fields that a worker does not use.
var elsewhere = []string{"metadata", "parallel_tool_calls", "priority", "prompt_cache_key", "reasoning_effort",
	"safety_identifier", "service_tier", "store", "verbosity"}

// known reports whether completions or chats have such a field: their parser does not skip it.
func known(name string) bool {
	if slices.Contains(elsewhere, name) {
		return true
	}
	p := parser{}
	p.Reset([]byte("null"))
	p.completionField(&Completion{}, []byte(name))
	if !p.unknown {
		return true
	}
	p = parser{}
	p.Reset([]byte("null"))
	p.chatField(&Chat{}, []byte(name))
	return !p.unknown
}
