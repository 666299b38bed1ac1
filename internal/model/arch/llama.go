package arch

var llama = dense(Family{
	Name: "llama", Also: []string{"smollm"}, Class: "LlamaForCausalLM", GGUF: "llama",

	// Of all families llama.cpp's converter pairs the rows of this one alone.
	tensors: func(c *Config) []Tensor {
		ts := denseTensors(c)
		for i := range ts {
			switch ts[i].Role {
			case Q, QBias:
				ts[i].PairedHeads = c.Heads
			case K, KBias:
				ts[i].PairedHeads = c.KVHeads
			}
		}
		return ts
	},
}, denseJSON{}, nil)
