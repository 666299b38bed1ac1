package dialect

import (
	"github.com/valyala/fasthttp"
)

// OpenAI is any engine with the OpenAI API that does both phases itself. There
// is one leg, with the client's bytes.
type OpenAI struct{}

var openaiRules = Rules{Order: Alone, Link: "none", Splits: Shapes, Hedges: true}

// Rules of an engine alone.
func (OpenAI) Rules() *Rules { return &openaiRules }

// Prefill is never sent.
func (OpenAI) Prefill(*fasthttp.RequestHeader, *Exchange) [][]byte { return nil }

// Decode is the client's request.
func (OpenAI) Decode(h *fasthttp.RequestHeader, x *Exchange) [][]byte { return Plain(h, x) }

// Result is never asked.
func (OpenAI) Result(_ *Exchange, a Answer) Result { return status(a) }

// Plain is the client's request for an engine that serves it alone: a whole
// engine, or decode when a request cannot be split.
func Plain(h *fasthttp.RequestHeader, x *Exchange) [][]byte {
	foreign(h, x)
	peered(h, x)
	return [][]byte{x.Body}
}
