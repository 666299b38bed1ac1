package openai

import (
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"math"
	"strconv"

	"github.com/xpyd/xpyd/internal/jsonscan"
)

// Embeddings is a POST /v1/embeddings body.
type Embeddings struct {
	Model      string
	Inputs     []Prompt // at least one, none of them empty
	Base64     bool     // encoding_format
	Dimensions *int

	Cohere    bool // of Cohere's API, which has other names for fields
	Cuts      Cuts // what an input that does not fit loses
	MaxTokens *int // of each input; nil: as many as fit
}

// Cuts says which end of an input that is too long is left out.
type Cuts uint8

// The cuts.
const (
	CutsNothing Cuts = iota // it is refused
	CutsStart
	CutsEnd
)

// ParseEmbeddings reads and validates an embeddings body, without aliasing it. Token ids must be below
// vocab; 0 leaves them unchecked.
func ParseEmbeddings(body []byte, vocab int) (*Embeddings, *Error) {
	e := &Embeddings{}
	p := parser{vocab: vocab}
	p.begin(body)
	for p.Next() == jsonscan.Key {
		switch string(p.Decoded()) {
		case "model":
			e.Model = p.string("model")
		case "input":
			e.Inputs = p.prompts("input")
		case "encoding_format":
			e.Base64 = p.encodingFormat()
		case "dimensions":
			e.Dimensions = p.optInt("dimensions", 1, math.MaxInt32)
		case "user":
			p.string("user") // for the router's log, if anybody's
		default:
			p.Skip()
		}
	}
	err := p.end()
	switch {
	case err != nil:
		return nil, err
	case len(e.Inputs) == 0:
		return nil, BadRequest("input", "input is required")
	}
	for i, in := range e.Inputs {
		if len(in.Text)+len(in.Tokens) == 0 {
			return nil, BadRequest("input", "input %d is empty", i)
		}
	}
	return e, nil
}

func (p *parser) encodingFormat() (base64 bool) {
	given := p.Peek() != jsonscan.Null
	switch format := p.string("encoding_format"); {
	case format == "base64":
		return true
	case given && format != "float":
		p.refuse("encoding_format", "encoding_format must be float or base64, not %q", clip(format, 40))
	}
	return false
}

// EmbeddingBytes bounds what AppendEmbeddings writes for a vector of so many numbers.
func EmbeddingBytes(width int) int { return 80 + 16*width }

// AppendEmbeddings appends the answer to embeddings. The vectors' numbers are finite.
func AppendEmbeddings(dst []byte, model string, vectors [][]float32, inBase64 bool, tokens int) []byte {
	dst = append(dst, `{"object":"list","data":[`...)
	for i, v := range vectors {
		dst = append(comma(dst, i), `{"object":"embedding","embedding":`...)
		dst = appendVector(dst, v, inBase64)
		dst = append(appendInt(dst, `,"index":`, i), '}')
	}
	dst = appendStr(dst, `],"model":`, model)
	return fmt.Appendf(dst, `,"usage":{"prompt_tokens":%d,"total_tokens":%d}}`, tokens, tokens)
}

// appendVector appends a vector as a list, or packed.
func appendVector(dst []byte, v []float32, inBase64 bool) []byte {
	if inBase64 {
		return appendPacked(dst, v)
	}
	dst = append(dst, '[')
	for j, x := range v {
		dst = strconv.AppendFloat(comma(dst, j), float64(x), 'g', -1, 32)
	}
	return append(dst, ']')
}

// appendPacked appends numbers as a string: little-endian, in base64.
func appendPacked(dst []byte, v []float32) []byte {
	raw := make([]byte, 0, 4*len(v))
	for _, x := range v {
		raw = binary.LittleEndian.AppendUint32(raw, math.Float32bits(x))
	}
	return append(base64.StdEncoding.AppendEncode(append(dst, '"'), raw), '"')
}
