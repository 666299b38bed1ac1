package workload

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"sync/atomic"
)

// Prompts is requests with prompts of the user's own, over and over.
type Prompts struct {
	unrelated
	items []Item // Out 0: drawn
	out   Dist
	text  *Text
	next  atomic.Uint64
}

// ReadPrompts reads JSON lines, each with a prompt (a string), messages (a chat) or turns
// (the first is taken), and maybe max_tokens. Otherwise out gives the answer's length.
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
	var l struct {
		Prompt   string   `json:"prompt"`
		Turns    []string `json:"turns"`
		Messages []struct {
			Role    string `json:"role"`
			Content string `json:"content"`
		} `json:"messages"`
		Out int `json:"max_tokens"`
	}
	if err := json.Unmarshal(line, &l); err != nil {
		return Item{}, err
	}
	if l.Out < 0 || l.Out > maxTokens {
		return Item{}, fmt.Errorf("max_tokens %d", l.Out)
	}
	it := Item{Out: l.Out}
	add := func(role, content string) error {
		quoted, err := json.Marshal(content)
		it.Messages = append(it.Messages, Message{Role: role, Content: quoted[1 : len(quoted)-1]})
		return err
	}
	switch {
	case l.Prompt != "":
		return it, add("user", l.Prompt)
	case len(l.Turns) > 0:
		return it, add("user", l.Turns[0])
	case len(l.Messages) > 0:
		for _, m := range l.Messages {
			switch m.Role {
			case "system", "user", "assistant", "developer":
			default:
				return Item{}, fmt.Errorf("role %q", m.Role)
			}
			if err := add(m.Role, m.Content); err != nil {
				return Item{}, err
			}
		}
		return it, nil
	}
	return Item{}, errors.New("none of prompt, messages and turns")
}

// Next is the next prompt, in the file's order.
func (p *Prompts) Next(context.Context) (*Item, bool) {
	n := p.next.Add(1) - 1
	it := p.items[n%uint64(len(p.items))]
	if it.Out == 0 {
		it.Out = p.out.Tokens(p.rng(n), 1)
	}
	return &it, true
}

func (p *Prompts) rng(n uint64) *rand.Rand { return p.text.rng(streamPrompt, n) }
