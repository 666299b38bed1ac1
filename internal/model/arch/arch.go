// Package arch describes the models that xpyd serves, each architecture in a file of its
// own: its names in config.json and GGUF files, how to read its sizes, what its layers
// compute and which tensors it has. Readers, fingerprints, backends and the writers of
// test models rely on it.
//
// To add an architecture, write a file like qwen3.go and list it in Families. A
// layer that computes something new is a new Attention or FeedForward: a
// backend has a case for it, or refuses the model.
package arch

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Family is one architecture.
type Family struct {
	Name  string   // "model_type" in config.json; Config.ModelType
	Also  []string // other model_types that mean the same
	Class string   // its name among config.json's "architectures"
	GGUF  string   // "general.architecture"; "" where GGUF files call it another family

	readHF   func(configJSON []byte) (Config, error)
	readGGUF func(m *metadata) Config
	tensors  func(c *Config) []Tensor
	layer    func(c *Config, layer int) (Attention, FeedForward)
}

// Families lists the architectures that are served, in the order of error messages.
func Families() []*Family {
	return []*Family{&llama, &mistral, &qwen2, &qwen3, &mixtral, &qwen3MoE, &gemma3, &deepseekV2, &deepseekV3}
}

// Attention is how a layer attends. Sizes are Config's.
type Attention string

// Kinds of it.
const (
	// GQA is causal attention of grouped query heads, rotated by halves, over all
	// positions; with Config's biases and head norms.
	GQA Attention = "grouped-query"
	// WindowGQA is GQA over a position and those before it, Config.Window in all, rotated by
	// Config.WindowTheta.
	WindowGQA Attention = "windowed grouped-query"
	// MLA is causal attention over one latent of Config.KVRank and one key of Config.RopeDim, rotated by
	// pairs side by side, that all query heads share. A head's keys and values are products of the latent.
	MLA Attention = "multi-head latent"
)

// FeedForward is what a layer does with each position alone.
type FeedForward string

// Kinds of it.
const (
	// SwiGLU is down(silu(gate(x)) * up(x)).
	SwiGLU FeedForward = "SwiGLU"
	// GeGLU is down(gelu(gate(x)) * up(x)), with the approximation of GELU by tanh.
	GeGLU FeedForward = "GeGLU"
	// Mixture is the sum of Config.ExpertsPerToken of Config.Experts SwiGLUs, those of the greatest
	// router(x), each times its part in the softmax over all; with Config.NormExperts over those chosen.
	Mixture FeedForward = "mixture of SwiGLUs"
	// SharedMixture is a mixture whose experts are chosen by Config.Routing, and beside it one SwiGLU,
	// Config.SharedExperts wide as an expert, for every position.
	SharedMixture FeedForward = "mixture of SwiGLUs beside shared ones"
)

// Role is what a tensor is for.
type Role uint8

// Roles: of the whole model, and of a layer.
const (
	Embed Role = iota // [vocab, hidden]
	Norm              // [hidden], before the head
	Head              // [vocab, hidden]; absent if Config.TiedHead

	AttnNorm // [hidden]
	MLPNorm  // [hidden]
	Q        // [heads*head_dim, hidden]
	K        // [kv_heads*head_dim, hidden]
	V        // [kv_heads*head_dim, hidden]
	O        // [hidden, heads*head_dim]
	Gate     // [intermediate, hidden]; in a mixture one an expert
	Up       // [intermediate, hidden]
	Down     // [hidden, intermediate]
	QBias    // [rows of Q]; Config.QKVBias
	KBias    // [rows of K]
	VBias    // [rows of V]
	QNorm    // [head_dim]; Config.QKNorm
	KNorm    // [head_dim]
	Router   // [experts, hidden]

	AttnPostNorm // [hidden], of what attention adds; Config.PostNorms
	MLPPostNorm  // [hidden], of what the feed-forward adds

	QA         // [q_rank, hidden]; these are MLA's. Without a rank of queries there is Q in place of the three
	QANorm     // [q_rank]
	QB         // [heads*head_dim, q_rank]; of each head what is not rotated, then what is
	KVA        // [kv_rank + rope_dim, hidden]: the latent, then the rotated key
	KVANorm    // [kv_rank]
	KVB        // [heads*(nope_dim + value_dim), kv_rank]; of each head keys, then values
	RouterBias // [experts], added to scores where experts are chosen; Config.Routing
	SharedGate // [shared_experts*expert_width, hidden]
	SharedUp   // as SharedGate
	SharedDown // [hidden, shared_experts*expert_width]
)

// Projection reports whether a checkpoint may have the tensor in FP8.
func (r Role) Projection() bool {
	switch r {
	case QA, QB, KVA, KVB, SharedGate, SharedUp, SharedDown:
		return true
	}
	return r >= Q && r <= Down
}

// Place is where a tensor belongs in a model. Layer is 0 for those of the
// whole model, Expert for those that are no expert's.
type Place struct {
	Role   Role
	Layer  int
	Expert int
}

// At is the place of r in a layer.
func (r Role) At(layer int) Place { return Place{Role: r, Layer: layer} }

// Of is the place of an expert's r in a layer.
func (r Role) Of(layer, expert int) Place { return Place{Role: r, Layer: layer, Expert: expert} }

// Tensor is one weight that a model has.
type Tensor struct {
	Place
	Name  string // Hugging Face's
	GGUF  string // llama.cpp's
	Shape []int  // row-major; projections are [out, in]
	// PairedHeads, if not 0, is the number of heads whose rows i and
	// i + head_dim/2 lie side by side in GGUF files. Elsewhere, and in what
	// readers return, rows are in rotate-half order.
	PairedHeads int
	// Stacked, if not 0, is how many experts' tensors of this role and layer GGUF files hold as one,
	// of one dimension more.
	Stacked int
}

// InLayer reports whether a file's tensor of that name belongs to a layer.
func InLayer(name string) bool {
	return strings.HasPrefix(name, "model.layers.") || strings.HasPrefix(name, "blk.")
}

// Drafts reports whether a tensor of that name belongs to one of the layers behind the model's
// (DraftLayers).
func (c *Config) Drafts(name string) bool {
	number, _, _ := strings.Cut(strings.TrimPrefix(name, "model.layers."), ".")
	n, err := strconv.Atoi(number)
	return err == nil && n >= c.Layers && n < c.Layers+c.DraftLayers
}

// find returns the family that goes by name, or an error that lists those served.
func find(key, name string, names func(*Family) []string) (*Family, error) {
	var served []string
	for _, f := range Families() {
		if slices.Contains(names(f), name) {
			return f, nil
		}
		served = append(served, names(f)...)
	}
	return nil, fmt.Errorf("%s %.60q is not supported (%s are)", key, name, strings.Join(served, ", "))
}

func (c *Config) family() (*Family, error) {
	return find("architecture", c.ModelType, func(f *Family) []string { return []string{f.Name} })
}

// Tensors lists every tensor of the model, in forward order. It is empty if no
// family has the model's type.
func (c *Config) Tensors() []Tensor {
	f, err := c.family()
	if err != nil {
		return nil
	}
	return f.tensors(c)
}

// Layer returns what a layer computes; "" if no family has the model's type.
func (c *Config) Layer(l int) (Attention, FeedForward) {
	f, err := c.family()
	if err != nil {
		return "", ""
	}
	return f.layer(c, l)
}
