package arch

// Qwen2 always has biases on q, k and v, whatever config.json says.
var qwen2 = dense(Family{Name: "qwen2", Class: "Qwen2ForCausalLM", GGUF: "qwen2"}, denseJSON{},
	func(c *Config) { c.QKVBias = true })
