package arch

// Qwen2 always has biases on q, k and v, whatever config.json says.
var qwen2 = Family{
	Name: "qwen2", Class: "Qwen2ForCausalLM", GGUF: "qwen2",

	readHF: func(b []byte) (Config, error) {
		c, err := denseHF(b, denseJSON{})
		c.QKVBias = true
		return c, err
	},
	readGGUF: func(m *metadata) Config {
		c := denseGGUF(m)
		c.QKVBias = true
		return c
	},
	tensors: denseTensors,
	layer:   denseLayer,
}
