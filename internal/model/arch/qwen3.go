package arch

// Qwen3 norms each head of q and k before it rotates them.
var qwen3 = Family{
	Name: "qwen3", Class: "Qwen3ForCausalLM", GGUF: "qwen3",

	readHF: func(b []byte) (Config, error) {
		c, err := denseHF(b, denseJSON{HeadDim: new(128)}) // transformers' default
		c.QKNorm = true
		return c, err
	},
	readGGUF: func(m *metadata) Config {
		c := denseGGUF(m)
		c.QKNorm = true
		return c
	},
	tensors: denseTensors,
	layer:   denseLayer,
}
