package dialect

import (
	"github.com/valyala/fasthttp"
)

// openAI is any engine with the OpenAI API that does both phases itself. Its one leg carries
// the client's bytes.
var openAI = Dialect{
	Rules:  Rules{Order: Alone, Splits: Shapes, Hedges: true},
	Decode: Plain,
}

// Plain is the client's request for an engine that serves it alone: a whole engine, or decode
// when a request cannot be split.
func Plain(h *fasthttp.RequestHeader, x *Exchange) [][]byte {
	foreign(h, x)
	peered(h, x)
	promised(h, x)
	salted(h, x)
	return continued(h, x)
}
