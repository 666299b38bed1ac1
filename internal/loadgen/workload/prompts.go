package workload

import (
	"bufio"
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
	p := &Prompts{text: text, out: out}
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 64<<10), maxLine)
	for number := 1; lines.Scan(); number++ {
		if len(lines.Bytes()) == 0 {
			continue
		}
		it, err := promptLine(lines.Bytes())
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", number, err)
		}
		if len(p.items) == maxEntries {
			return nil, fmt.Errorf("more than %d prompts", maxEntries)
		}
		p.items = append(p.items, it)
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	if len(p.items) == 0 {
		return nil, errors.New("no prompt in the file")
	}
	return p, nil
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
