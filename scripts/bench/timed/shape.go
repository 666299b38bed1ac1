package timed

import (
	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/internal/model/modeltest"
)

// Shape is of a model whose rows are as few bytes as can be: it has one layer and one head, and takes
// contexts of so many positions.
func Shape(vocab, positions int) arch.Config {
	c := modeltest.Tiny("llama")
	c.Layers, c.Heads, c.KVHeads, c.HeadDim, c.Vocab, c.MaxPositions = 1, 1, 1, rowBytes/4, vocab, positions
	return c
}
