package openai

import (
	"fmt"
	"math"

	"github.com/xpyd/xpyd/internal/jsonscan"
)

// ParseCohereEmbed reads and validates a /v2/embed body, without aliasing it: of Cohere's API, for texts.
func ParseCohereEmbed(body []byte) (*Embeddings, *Error) {
	e := &Embeddings{Cohere: true, Cuts: CutsEnd}
	p := parser{}
	p.begin(body)
	for p.Next() == jsonscan.Key {
		switch string(p.Decoded()) {
		case "model":
			e.Model = p.string("model")
		case "texts":
			e.Inputs = p.texts()
		case "embedding_types":
			e.Base64 = p.embeddingTypes()
		case "output_dimension":
			e.Dimensions = p.optInt("output_dimension", 1, math.MaxInt32)
		case "max_tokens":
			e.MaxTokens = p.optInt("max_tokens", 1, math.MaxInt32)
		case "truncate":
			e.Cuts = p.cuts()
		case "input_type":
			p.string("input_type") // our models have no prompts for it
		case "images":
			p.otherThanTexts("images")
		case "inputs":
			p.otherThanTexts("inputs")
		default:
			p.Skip()
		}
	}
	switch err := p.end(); {
	case err != nil:
		return nil, err
	case len(e.Inputs) == 0:
		return nil, BadRequest("texts", "texts is required and must not be empty")
	}
	return e, nil
}

// otherThanTexts refuses a field that holds other things to embed.
func (p *parser) otherThanTexts(name string) {
	if p.raw() != nil {
		p.refuse(name, "%s is not supported; use texts", name)
	}
}

// texts reads a list of texts, none of them empty.
func (p *parser) texts() (out []Prompt) {
	if !p.is("texts", jsonscan.Array, "a list of strings") {
		return nil
	}
	for p.Item() {
		name := fmt.Sprintf("texts[%d]", len(out))
		if p.Peek() != jsonscan.String {
			p.wrong(name, "a string")
		}
		text := p.string(name)
		switch {
		case text == "":
			p.refuse("texts", "%s must not be empty", name)
		case len(out) == maxPrompts:
			p.refuse("texts", "texts has more than %d entries", maxPrompts)
		}
		out = append(out, Prompt{Text: text})
	}
	return out
}

// embeddingTypes reads a list of one type, float or base64; float is the default.
func (p *parser) embeddingTypes() (base64 bool) {
	const name = "embedding_types"
	if !p.is(name, jsonscan.Array, "a list") {
		return false
	}
	for n := 0; p.Item(); n++ {
		switch kind := p.string(name); {
		case n > 0:
			p.refuse(name, "embedding_types may have one entry")
		case kind != "float" && kind != "base64":
			p.refuse(name, "embedding_types must be float or base64, not %q", clip(kind, 40))
		default:
			base64 = kind == "base64"
		}
	}
	return base64
}

func (p *parser) cuts() Cuts {
	switch how := p.string("truncate"); how {
	case "NONE":
		return CutsNothing
	case "START":
		return CutsStart
	case "END", "":
	default:
		p.refuse("truncate", "truncate must be NONE, START or END, not %q", clip(how, 40))
	}
	return CutsEnd
}

// AppendCohereEmbed appends Cohere's answer to ParseCohereEmbed's request. The vectors' numbers are finite.
func AppendCohereEmbed(dst []byte, id string, e *Embeddings, vectors [][]float32, tokens int) []byte {
	kind := "float"
	if e.Base64 {
		kind = "base64"
	}
	dst = append(appendStr(append(appendStr(dst, `{"id":`, id), `,"embeddings":{`...), "", kind), ":["...)
	for i, v := range vectors {
		dst = appendVector(comma(dst, i), v, e.Base64)
	}
	dst = append(dst, `]},"texts":[`...)
	for i := range e.Inputs {
		dst = AppendString(comma(dst, i), e.Inputs[i].Text)
	}
	dst = appendInt(dst, `],"meta":{"api_version":{"version":"2"},"billed_units":{"input_tokens":`, tokens)
	return append(dst, `}},"response_type":"embeddings_by_type"}`...)
}
