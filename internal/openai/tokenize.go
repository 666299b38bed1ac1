package openai

import (
	"math"

	"github.com/xpyd/xpyd/internal/jsonscan"
)

// ParseTokenize reads a POST /tokenize body in either of vLLM's forms: prompt, or messages with
// the chat fields.
func ParseTokenize(body []byte, vocab int) (*Tokenize, *Error) {
	t, c := &Tokenize{}, &Chat{Sampling: defaults(), AddGenerationPrompt: true}
	var hasPrompt, hasMessages, special, specialGiven bool
	p := parser{vocab: vocab}
	p.begin(body)
	for p.Next() == jsonscan.Key {
		switch key := p.Decoded(); string(key) {
		case "prompt":
			hasPrompt = p.Peek() != jsonscan.Null
			t.Prompt = p.string("prompt")
		case "add_special_tokens":
			specialGiven = p.Peek() != jsonscan.Null
			special = p.bool("add_special_tokens", false)
		case "return_token_strs":
			t.ReturnStrs = p.bool("return_token_strs", false)
		case "messages":
			hasMessages = p.Peek() != jsonscan.Null
			p.chatField(c, key)
		default:
			p.chatField(c, key)
		}
	}
	if err := p.end(); err != nil {
		return nil, err
	}
	t.Model = c.Model
	switch {
	case hasMessages && hasPrompt:
		return nil, BadRequest("prompt", "give prompt or messages, not both")
	case hasMessages:
		if err := p.checkChat(c); err != nil {
			return nil, err
		}
		t.Chat = c
	case !hasPrompt:
		return nil, BadRequest("prompt", "prompt or messages is required")
	default:
		t.AddSpecial = true
	}
	if specialGiven {
		t.AddSpecial = special
	}
	if t.Chat != nil {
		t.Chat.AddSpecial = t.AddSpecial
	}
	return t, nil
}

// ParseDetokenize reads a POST /detokenize body.
func ParseDetokenize(body []byte, vocab int) (*Detokenize, *Error) {
	d := &Detokenize{}
	p := parser{vocab: vocab}
	p.begin(body)
	for p.Next() == jsonscan.Key {
		switch string(p.Decoded()) {
		case "model":
			d.Model = p.string("model")
		case "tokens":
			d.Tokens = p.tokenIDs("tokens", math.MaxInt32)
		default:
			p.Skip()
		}
	}
	err := p.end()
	if err == nil && d.Tokens == nil {
		err = BadRequest("tokens", "tokens is required")
	}
	if err != nil {
		return nil, err
	}
	return d, nil
}

// AppendTokenized appends the answer to /tokenize; strs nil renders as null.
func AppendTokenized(dst []byte, tokens []int32, strs []string, maxModelLen int) []byte {
	dst = appendInt(dst, `{"count":`, len(tokens))
	dst = appendInt(dst, `,"max_model_len":`, maxModelLen)
	dst = appendInts(append(dst, `,"tokens":`...), tokens)
	dst = append(dst, `,"token_strs":`...)
	if strs == nil {
		return append(dst, `null}`...)
	}
	dst = append(dst, '[')
	for i, s := range strs {
		dst = AppendString(comma(dst, i), s)
	}
	return append(dst, `]}`...)
}

// AppendDetokenized appends the answer to /detokenize.
func AppendDetokenized(dst []byte, prompt string) []byte {
	return append(appendStr(dst, `{"prompt":`, prompt), '}')
}

// Model is one entry of /v1/models.
type Model struct {
	ID          string
	Created     int64
	MaxModelLen int
}

// AppendModels appends the answer to /v1/models.
func AppendModels(dst []byte, models []Model) []byte {
	dst = append(dst, `{"object":"list","data":[`...)
	for i, m := range models {
		dst = AppendModel(comma(dst, i), m)
	}
	return append(dst, `]}`...)
}

// AppendModel appends the answer to /v1/models/{id}.
func AppendModel(dst []byte, m Model) []byte {
	dst = appendStr(dst, `{"id":`, m.ID)
	dst = appendInt(dst, `,"object":"model","created":`, m.Created)
	dst = appendStr(dst, `,"owned_by":"xpyd","root":`, m.ID)
	dst = appendInt(dst, `,"parent":null,"max_model_len":`, m.MaxModelLen)
	return append(dst, '}')
}
