package arch

// Mistral's window is in use whenever config.json gives one; a window shorter
// than the context is not served. A GGUF file of a Mistral is a llama.
var mistral = dense(Family{Name: "mistral", Class: "MistralForCausalLM"}, denseJSON{UseSliding: true}, nil)
