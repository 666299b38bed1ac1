package tokenizer

import "fmt"

// preFamily is the meaning of tokenizer.ggml.pre in a byte-level vocabulary.
type preFamily struct {
	patterns     []string // each cuts the pieces of the one before
	nfc          bool
	ignoreMerges bool
	bos          bool // begin with BOS where the file does not say
}

// Patterns that only GGUF files name, as the models' own tokenizers spell them.
const (
	o200kPattern = `[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?` +
		`|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?` +
		`|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	deepseekPattern = "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+" +
		"| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)

// ggufPre returns the family of a name. The names are llama.cpp's. Where llama.cpp differs
// from the models' own tokenizers in normalising or ignoring merges, this follows the
// models' own, which they were trained with.
func ggufPre(name string) (preFamily, error) {
	switch name {
	case "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4":
		return preFamily{patterns: []string{gpt2Pattern}}, nil
	case "llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2":
		return preFamily{patterns: []string{llama3Pattern}, ignoreMerges: true, bos: true}, nil
	case "dbrx", "smaug-bpe":
		return preFamily{patterns: []string{llama3Pattern}}, nil
	case "qwen2", "deepseek-r1-qwen":
		return preFamily{patterns: []string{qwen2Pattern}, nfc: true}, nil
	case "stablelm2", "hunyuan":
		return preFamily{patterns: []string{qwen2Pattern}}, nil
	case "smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b":
		return preFamily{patterns: []string{`\p{N}`, gpt2Pattern}}, nil
	case "gpt-4o", "llama4":
		return preFamily{patterns: []string{o200kPattern}, ignoreMerges: true}, nil
	case "deepseek-v3":
		return preFamily{patterns: []string{`\p{N}{1,3}`, `[一-龥぀-ゟ゠-ヿ]+`, deepseekPattern}}, nil
	case "", "default":
		return preFamily{patterns: []string{`[\p{P}\$\+<=>\^~\|]+`, gpt2Pattern, `\p{N}+`, `[0-9][0-9][0-9]`}}, nil
	}
	return preFamily{}, fmt.Errorf("%spre %q is not supported", ggml, name)
}
