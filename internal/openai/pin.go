package openai

import (
	"slices"
	"strconv"
	"strings"
	"time"
)

// LongestPin bounds ttl_s.
const LongestPin = 31 * 24 * time.Hour

// Pin is what the body of a pin, or of its end, has besides a completion's or a
// chat's fields: the prompt, or messages, and cache_salt name what is pinned.
type Pin struct {
	TTL  time.Duration // of a new pin
	ID   string        // of the one to end; "": the prompt says which
	Chat bool          // the prompt is messages
}

// ParsePin reads the body of a pin, or if ends that of its end. The prompt's own
// fields are left to ParseCompletion and ParseChat. Fields that nobody knows are
// refused: a pin that is not what was meant shows only when it is too late.
func ParsePin(body []byte, ends bool) (pin Pin, _ *Error) {
	p := parser{lim: Limits{}.withDefaults()}
	var prompt, ttl bool
	err := p.body(body, func(key []byte) (err *Error) {
		switch string(key) {
		case "ttl_s":
			pin.TTL, ttl, err = p.seconds("ttl_s", LongestPin)
		case "id":
			pin.ID, _, err = p.r.readString("id")
		case "prompt", "messages":
			name := string(key)
			if p.r.peek() != 'n' { // null is none
				prompt, pin.Chat = true, pin.Chat || name == "messages"
			}
			err = p.r.skip()
		default:
			if !known(key) {
				name := clip(string(key), 40)
				return BadRequest(name, "%s is unknown; send %s, and what else the completion or the chat has", name, wanted(ends))
			}
			err = p.r.skip()
		}
		return err
	})
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

// wanted is an example of a pin's body, or of its end's.
func wanted(ends bool) string {
	if ends {
		return `{"id": "…"} or {"prompt": "You are …"}`
	}
	return `{"prompt": "You are …", "ttl_s": 3600}`
}

// seconds reads a number of seconds above 0.
func (p *parser) seconds(field string, most time.Duration) (d time.Duration, given bool, err *Error) {
	if null, err := p.r.null(); null || err != nil {
		return 0, false, err
	}
	if c := p.r.peek(); c != '-' && (c < '0' || c > '9') {
		return 0, false, p.r.wrong(field, "a number of seconds")
	}
	text, err := p.r.num()
	if err != nil {
		return 0, false, err
	}
	f, perr := strconv.ParseFloat(string(text), 64)
	if perr != nil || f <= 0 || f > most.Seconds() {
		return 0, false, BadRequest(field, "%s must be above 0 and at most %d, not %s", field, int(most.Seconds()), clip(string(text), 40))
	}
	return time.Duration(f * float64(time.Second)), true, nil
}

// elsewhere are fields of requests that a worker has no use for.
var elsewhere = []string{"metadata", "parallel_tool_calls", "priority", "prompt_cache_key", "reasoning_effort",
	"safety_identifier", "service_tier", "store", "verbosity"}

// known says whether a completion or a chat has such a field: whether its parser
// does more than skip it.
func known(key []byte) bool {
	p := parser{r: reader{b: []byte("null")}, lim: Limits{}.withDefaults()}
	_ = p.completionField(&Completion{}, key)
	if !p.unknown {
		return true
	}
	p = parser{r: reader{b: []byte("null")}, lim: p.lim}
	_ = p.chatField(&Chat{}, key)
	return !p.unknown || slices.Contains(elsewhere, string(key))
}
