package openai

import (
	"encoding/json"
	"fmt"

	"github.com/xpyd/xpyd/internal/jsonscan"
)

// ParseChatBatch reads a body whose messages are conversations: c says what all of them are asked, and has the
// first one's messages. Nothing of body is kept.
func ParseChatBatch(body []byte, vocab int) (c *Chat, conversations [][]json.RawMessage, _ *Error) {
	c = &Chat{Sampling: defaults(), AddGenerationPrompt: true}
	p := parser{vocab: vocab, batch: true}
	p.begin(body)
	for p.Next() == jsonscan.Key {
		p.chatField(c, p.Decoded())
	}
	if err := p.end(); err != nil {
		return nil, nil, err
	}
	if len(p.conversations) > 0 {
		c.Messages = p.conversations[0]
	}
	if err := p.checkChat(c); err != nil {
		return nil, nil, err
	}
	switch {
	case c.Stream:
		return nil, nil, BadRequest("stream", "a batch of chats does not stream")
	case c.N != 1:
		return nil, nil, BadRequest("n", "n must be 1 in a batch of chats, not %d", c.N)
	case c.Tools != nil:
		return nil, nil, BadRequest("tools", "tools are not supported in a batch of chats")
	}
	return c, p.conversations, nil
}

// conversationList reads the conversations of a batch.
func (p *parser) conversationList() (out [][]json.RawMessage) {
	if !p.is("messages", jsonscan.Array, "a list of conversations") {
		return nil
	}
	for p.Item() {
		field := fmt.Sprintf("messages[%d]", len(out))
		if p.Peek() != jsonscan.Array {
			p.wrong(field, "a conversation, which is a list of messages")
		}
		if len(out) == maxPrompts {
			p.refuse("messages", "messages has more than %d conversations", maxPrompts)
		}
		one := p.messages(field)
		if len(one) == 0 {
			p.refuse("messages", "%s is empty", field)
		}
		out = append(out, one)
	}
	return out
}

// CountChats has t be of a batch of chats, whose messages are conversations, each a prompt.
func (t *Top) CountChats() {
	var r reader
	r.Reset(t.Prompt)
	_, n := t.prompts(&r)
	t.Prompts = max(n, 1)
}
