package openai

import (
	"math"
	"strings"

	"github.com/xpyd/xpyd/internal/jsonscan"
)

// Given is what a router knows of a stream whose worker is gone, for another one to go on from.
type Given struct {
	Created int64         // as the stream's chunks say
	Prompt  string        // hash of the prompts' tokens, 16 hex digits
	Choices []GivenChoice // of all prompts, by index
}

// GivenChoice is a choice as far as the client has it.
type GivenChoice struct {
	IDs  []int32 // all tokens of its events
	Done bool    // its last event was among them
	// Begun: its first event was, which may have no token.
	Begun bool
}

// ParseGiven reads a Given of at most so many choices.
func ParseGiven(text []byte, vocab, most int) (*Given, *Error) {
	g := &Given{}
	p := parser{vocab: vocab}
	p.begin(text)
	for p.Next() == jsonscan.Key {
		switch string(p.Decoded()) {
		case "created":
			g.Created, _ = p.int("created", 1, math.MaxInt32<<8)
		case "prompt":
			g.Prompt = p.string("prompt")
		case "choices":
			g.Choices = p.givenChoices(most)
		default:
			p.Skip()
		}
	}
	switch err := p.end(); {
	case err != nil:
		return nil, err
	case g.Created == 0:
		return nil, BadRequest("created", "created is required")
	case len(g.Prompt) != 16 || strings.Trim(g.Prompt, hexDigits) != "":
		return nil, BadRequest("prompt", "prompt must be 16 hex digits")
	case len(g.Choices) == 0:
		return nil, BadRequest("choices", "choices is required")
	}
	return g, nil
}

func (p *parser) givenChoices(most int) (list []GivenChoice) {
	if !p.is("choices", jsonscan.Array, "a list") {
		return nil
	}
	for p.Item() {
		if len(list) == most {
			p.refuse("choices", "choices has more than %d entries", most)
			break
		}
		var c GivenChoice
		if !p.is("choices", jsonscan.Object, "a list of objects") {
			p.refuse("choices", "choices must be a list of objects")
			break
		}
		for p.Next() == jsonscan.Key {
			switch string(p.Decoded()) {
			case "ids":
				c.IDs = p.tokenIDs("ids", math.MaxInt32)
			case "done":
				c.Done = p.bool("done", false)
			case "begun":
				c.Begun = p.bool("begun", false)
			default:
				p.Skip()
			}
		}
		c.Begun = c.Begun || len(c.IDs) > 0
		list = append(list, c)
	}
	return list
}
