package sense

import (
	"context"
	"encoding/json"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/tokenizer"
)

// Prompt is a request's prompt.
type Prompt struct {
	Top   *openai.Top
	Body  []byte
	Cache string // whose cache it is, of our own workers
}

// tokens is the first prompt's token IDs, as the client sent them or as a configured
// tokenizer makes them; nil if they cannot be known.
func (e *Feeds) tokens(ctx context.Context, q *Prompt) []uint32 {
	if !q.Top.Messages {
		if ids := tokenIDs(q.Top.Prompt); ids != nil {
			return ids
		}
	}
	e.mu.Lock()
	alien := e.alien[q.Top.Model]
	e.mu.Unlock()
	tok := e.toks[q.Top.Model]
	if tok == nil || alien {
		return nil
	}
	if q.Top.Messages {
		return chatTokens(ctx, tok, q.Body)
	}
	c, err := openai.ParseCompletion(q.Body, 0)
	if err != nil || len(c.Prompts) == 0 || c.Truncate != nil {
		return nil // the worker will say what is wrong with it
	}
	return unsigned(tok.Encode(c.Prompts[0].Text, c.AddSpecial))
}

func chatTokens(ctx context.Context, tok *tokenizer.Tokenizer, body []byte) []uint32 {
	c, err := openai.ParseChat(body, 0)
	if err != nil || !tok.HasChatTemplate() || c.Template != "" || c.Truncate != nil {
		return nil
	}
	in := tokenizer.ChatInput{Messages: c.Messages, AddGenerationPrompt: c.AddGenerationPrompt,
		ContinueFinalMessage: c.ContinueFinalMessage, Kwargs: c.TemplateKwargs}
	if c.UsesTools() {
		if json.Unmarshal(c.Tools, &in.Tools) != nil {
			return nil
		}
	}
	text, rerr := tok.RenderChat(ctx, in)
	if rerr != nil {
		return nil
	}
	return unsigned(tok.Encode(text, c.AddSpecial))
}

func unsigned(ids []int32) []uint32 {
	out := make([]uint32, len(ids))
	for i, id := range ids {
		out[i] = uint32(id)
	}
	return out
}

// tokenIDs reads a JSON list of IDs, or the first of a list of such lists; nil for anything
// else. The text is known to be JSON.
func tokenIDs(raw []byte) []uint32 {
	i := 0
	space := func() {
		for i < len(raw) && (raw[i] == ' ' || raw[i] == '\n' || raw[i] == '\t' || raw[i] == '\r') {
			i++
		}
	}
	depth := 0
	for space(); i < len(raw) && raw[i] == '[' && depth < 2; space() {
		depth++
		i++
	}
	if depth == 0 {
		return nil
	}
	out := make([]uint32, 0, len(raw)/6)
	for {
		space()
		id, digits := uint64(0), 0
		for ; i < len(raw) && raw[i] >= '0' && raw[i] <= '9' && digits < 10; i++ {
			id = id*10 + uint64(raw[i]-'0')
			digits++
		}
		space()
		if digits == 0 || id > 1<<32-1 || i == len(raw) {
			return nil
		}
		out = append(out, uint32(id))
		switch raw[i] {
		case ',':
			i++
		case ']':
			return out
		default:
			return nil
		}
	}
}
