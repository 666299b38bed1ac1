package dialect

import (
	"time"

	"github.com/valyala/fasthttp"
)

// Storage is engines that share a cache of blocks keyed by the prompt's
// tokens: LMCache, vLLM's ExampleConnector and the like. Prefill goes first
// and nothing is carried over.
type Storage struct{}

var storageRules = Rules{
	Order: PrefillFirst, Link: "none: the prompt's tokens",
	Splits: vllmSplits, Falls: true,
	Gap:   time.Minute, // the cache's policy decides
	Usage: true, Hedges: true,
}

// Rules of a shared cache.
func (Storage) Rules() *Rules { return &storageRules }

// Prefill computes the prompt and one token.
func (Storage) Prefill(h *fasthttp.RequestHeader, x *Exchange) [][]byte {
	foreign(h, x)
	pinned(h, x, x.Prefill)
	return onlyPrefill(x).Parts()
}

// Decode is the client's request.
func (Storage) Decode(h *fasthttp.RequestHeader, x *Exchange) [][]byte {
	foreign(h, x)
	pinned(h, x, x.Decode)
	return [][]byte{x.Body}
}

// Result needs nothing of prefill's answer but that it is one.
func (Storage) Result(_ *Exchange, a Answer) Result { return status(a) }
