package arch

// Qwen3 norms each head of q and k before it rotates them.
var qwen3 = dense(Family{Name: "qwen3", Class: "Qwen3ForCausalLM", GGUF: "qwen3"},
	denseJSON{HeadDim: new(128)}, // transformers' default
	func(c *Config) { c.QKNorm = true })
