package workload

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync/atomic"
)

// Prompts repeats the user's own prompts.
type Prompts struct {
	unrelated
	items []Item // Out 0: draw
	out   Dist
	text  *Text
	next  atomic.Uint64
}

// ReadPrompts reads JSON lines, each with a prompt (a string), messages (a chat) or turns, of
// which it takes the first, and maybe max_tokens. Otherwise out gives the answer's length.
func ReadPrompts(r io.Reader, text *Text, out Dist) (*Prompts, error) {
	items, err := readLines(r, "prompts", func(line []byte) (Item, bool, error) {
		it, err := promptLine(line)
		return it, true, err
	})
	return &Prompts{text: text, out: out, items: items}, err
}

func promptLine(line []byte) (Item, error) {
	type message struct{ Role, Content string }
	var l struct {
		Prompt   string
		Turns    []string
		Messages []message
		Out      int `json:"max_tokens"`
	}
	if err := json.Unmarshal(line, &l); err != nil {
		return Item{}, err
	}
	if l.Out < 0 || l.Out > maxTokens {
		return Item{}, fmt.Errorf("max_tokens %d", l.Out)
	}
	switch {
	case l.Prompt != "":
		l.Messages = []message{{"user", l.Prompt}}
	case len(l.Turns) > 0:
		l.Messages = []message{{"user", l.Turns[0]}}
	case len(l.Messages) == 0:
		return Item{}, errors.New("none of prompt, messages and turns")
	}
	it := Item{Out: l.Out}
	for _, m := range l.Messages {
		if !slices.Contains([]string{"system", "user", "assistant", "developer"}, m.Role) {
			return Item{}, fmt.Errorf("role %q", m.Role)
		}
		quoted, err := json.Marshal(m.Content)
		if err != nil {
			return Item{}, err
		}
		it.Messages = append(it.Messages, Message{Role: m.Role, Content: quoted[1 : len(quoted)-1]})
	}
	return it, nil
}

// Next is the next prompt, in the file's order.
func (p *Prompts) Next(context.Context) (*Item, bool) {
	n := p.next.Add(1) - 1
	it := p.items[n%uint64(len(p.items))]
	if it.Out == 0 {
		it.Out = p.out.Tokens(p.text.rng(streamPrompt, n), 1)
	}
	return &it, true
}
