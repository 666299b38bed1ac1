package arch

// Mistral's window is in use whenever config.json gives one; a window shorter
// than the context is not served.
var mistral = Family{
	Name: "mistral", Class: "MistralForCausalLM", // a GGUF file of one is a llama

	readHF:  func(b []byte) (Config, error) { return denseHF(b, denseJSON{UseSliding: true}) },
	tensors: denseTensors,
	layer:   denseLayer,
}
