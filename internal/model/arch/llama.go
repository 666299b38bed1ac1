package arch

var llama = dense(Family{
	Name: "llama", Also: []string{"smollm"}, Class: "LlamaForCausalLM", GGUF: "llama",

	tensors: func(c *Config) []Tensor { return paired(c, denseTensors(c)) },
}, denseJSON{}, func(c *Config) {
	if c.Experts > 0 { // a GGUF file's
		c.ModelType, c.NormExperts = "mixtral", true
	}
})

// paired marks the rows that llama.cpp's converter pairs: those of its architecture llama alone.
func paired(c *Config, ts []Tensor) []Tensor {
	for i := range ts {
		switch ts[i].Role {
		case Q, QBias:
			ts[i].PairedHeads = c.Heads
		case K, KBias:
			ts[i].PairedHeads = c.KVHeads
		}
	}
	return ts
}
