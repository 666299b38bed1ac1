package openai

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"unicode/utf8"

	"github.com/xpyd/xpyd/internal/jsonscan"
)

// A stream of an engine that knows nothing of takeovers goes on elsewhere as another request: a
// completion whose prompt is the tokens of the first one's prompt and answer. What a client asks
// for must mean the same there, so fields that are not listed here, or may not, prevent it.
const (
	fieldCarried = iota + 1 // as it is
	fieldSpent              // it has made the prompt, or is counted anew
	fieldOff                // only if it asks for nothing
	fieldOne                // only as 1
	fieldSeed               // only if no draw depends on it
	fieldStop               // as it is, if an engine holds little text back for it
)

var replayFields = map[string]int{
	"model": fieldCarried, "stream": fieldCarried, "stream_options": fieldCarried, "user": fieldCarried, "priority": fieldCarried,
	"cache_salt": fieldCarried, "temperature": fieldCarried, "top_p": fieldCarried, "top_k": fieldCarried, "min_p": fieldCarried,
	"logit_bias": fieldCarried, "allowed_token_ids": fieldCarried, "stop_token_ids": fieldCarried, "ignore_eos": fieldCarried,
	"skip_special_tokens": fieldCarried, "spaces_between_special_tokens": fieldCarried,
	"repetition_penalty": fieldCarried, // counts prompt and answer alike

	"prompt": fieldSpent, "messages": fieldSpent, "add_special_tokens": fieldSpent, "truncate_prompt_tokens": fieldSpent, "truncation_side": fieldSpent,
	"chat_template": fieldSpent, "chat_template_kwargs": fieldSpent, "add_generation_prompt": fieldSpent, "continue_final_message": fieldSpent, "documents": fieldSpent,
	"max_tokens": fieldSpent, "max_completion_tokens": fieldSpent, "min_tokens": fieldSpent,
	"service_tier": fieldSpent, "metadata": fieldSpent, "store": fieldSpent,

	"stop": fieldStop,

	// These count the answer's tokens alone, or need its text.
	"presence_penalty": fieldOff, "frequency_penalty": fieldOff, "logprobs": fieldOff, "top_logprobs": fieldOff, "echo": fieldOff,
	"tools": fieldOff, "return_token_ids": fieldOff, "include_stop_str_in_output": fieldOff,
	"n": fieldOne, "best_of": fieldOne,
	"seed": fieldSeed,
}

// defaultMaxTokens is what a completion without max_tokens has; a chat has the rest of the context.
const defaultMaxTokens = 16

// errNoMore: the answer has all tokens that it may have.
var errNoMore = errors.New("its answer has all its tokens")

// maxHeld bounds a stop string of a request that may go on as another one, in characters.
const maxHeld = 256

// Replayable returns how many characters an engine holds back for a streamed request's stop strings,
// and why it cannot go on as another request; nil if it can.
func Replayable(body []byte, top *Top) (held int, err error) {
	_, held, err = appendReplay(nil, body, top, nil, nil, math.MaxInt32)
	return held, err
}

// AskIDs returns a request that has its engine tell the tokens' ids.
func AskIDs(body []byte, top *Top) []byte {
	e := NewEdit(body, top)
	e.Set(ReturnTokenIDs, "true")
	return bytes.Join(e.Parts(), nil)
}

// AppendReplay appends the completion with which another engine goes on with a request: behind the
// tokens of its prompt and of its answer so far, which are as AppendIDs writes them. If the request has no
// limit of its own, context is how many tokens there may be, with the prompt's; 0: unknown.
func AppendReplay(dst, body []byte, top *Top, prompt, answer []byte, context int) ([]byte, error) {
	dst, _, err := appendReplay(dst, body, top, prompt, answer, context)
	return dst, err
}

func appendReplay(dst, body []byte, top *Top, prompt, answer []byte, context int) (_ []byte, held int, _ error) {
	var r reader
	seen := map[string]bool{}
	most, least, greedy, seeded := -1, 0, false, false
	if !top.Messages {
		most = defaultMaxTokens
	}
	dst = append(dst, '{')
	r.begin(body)
	for r.Next() == jsonscan.Key {
		key := string(r.Decoded())
		if seen[key] {
			return nil, 0, fmt.Errorf("%s is there twice", Clip(key))
		}
		seen[key] = true
		raw := r.Raw()
		if raw == nil {
			return nil, 0, errors.New("its body is not valid JSON")
		}
		absent := string(raw) == "null"
		fate, ok := replayFields[key], true
		switch {
		case key == "messages":
			ok = onlyText(raw)
		case key == "max_tokens" && absent && !top.Messages:
			most = -1
		case key == "min_tokens":
			least, ok = count(raw)
		case key == "stop":
			held, ok = heldFor(raw)
		case key == "temperature":
			greedy = isOff(raw) && !absent
		}
		switch {
		case !ok, fate == 0 && !absent, fate == fieldOff && !isOff(raw), fate == fieldOne && !absent && string(raw) != "1":
			return nil, 0, fmt.Errorf("%s cannot be carried over", Clip(key))
		case fate == fieldSeed && !absent:
			seeded = true
			fallthrough
		case fate == fieldCarried, fate == fieldStop:
			dst = append(AppendString(dst, key), ':')
			dst = append(append(dst, raw...), ',')
		}
	}
	n := len(answer) / IDBytes
	if top.MaxTokens > 0 {
		most = top.MaxTokens
	}
	if seeded && !greedy {
		return nil, 0, errors.New("draws by a seed cannot be carried over")
	}
	if most < 0 { // a completion must say
		if context == 0 {
			return nil, 0, errors.New("the request has no limit of its own, and the engine's max_model_len is not known")
		}
		most = context - len(prompt)/IDBytes
	}
	if most <= n {
		return nil, 0, errNoMore
	}
	dst = append(dst, `"prompt":[`...)
	dst = appendIDList(dst, prompt, answer)
	dst = append(dst, `],"max_tokens":`...)
	dst = strconv.AppendInt(dst, int64(most-n), 10)
	if least > n {
		dst = appendInt(dst, `,"min_tokens":`, least-n)
	}
	return append(dst, `,"return_token_ids":true}`...), held, nil
}

func appendIDList(dst []byte, lists ...[]byte) []byte {
	first := true
	for _, ids := range lists {
		for i := range len(ids) / IDBytes {
			if !first {
				dst = append(dst, ',')
			}
			first = false
			dst = strconv.AppendInt(dst, int64(IDAt(ids, i)), 10)
		}
	}
	return dst
}

// count reads a number of tokens, 0 for null.
func count(raw []byte) (int, bool) {
	if string(raw) == "null" {
		return 0, true
	}
	return atoi(raw)
}

// heldFor returns how many characters an engine holds back while one of these strings may begin.
func heldFor(stop []byte) (n int, ok bool) {
	var list []string
	if stop[0] == '"' {
		stop = slices.Concat([]byte("["), stop, []byte("]"))
	}
	if json.Unmarshal(stop, &list) != nil {
		return 0, false
	}
	for _, s := range list {
		size := utf8.RuneCountInString(s)
		if size == 0 || size > maxHeld {
			return 0, false
		}
		n = max(n, size-1)
	}
	return n, true
}

// isOff reports whether a value asks for nothing.
func isOff(raw []byte) bool {
	switch string(raw) {
	case "null", "false", "[]", "{}", `""`:
		return true
	}
	v, err := strconv.ParseFloat(string(raw), 64)
	return err == nil && v == 0
}

// onlyText reports whether messages consist of nothing but text: the tokens that stand for an image
// do not hold it.
func onlyText(messages []byte) bool {
	var list []struct{ Content json.RawMessage }
	if json.Unmarshal(messages, &list) != nil {
		return false
	}
	for _, m := range list {
		var parts []struct{ Type string }
		if len(m.Content) == 0 || m.Content[0] != '[' {
			continue
		}
		if json.Unmarshal(m.Content, &parts) != nil {
			return false
		}
		for _, p := range parts {
			if p.Type != "text" {
				return false
			}
		}
	}
	return true
}
