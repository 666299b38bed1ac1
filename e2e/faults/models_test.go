package faults

import (
	"os"
	"path/filepath"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/internal/model/modeltest"
	"github.com/xpyd/xpyd/kernels"
)

var (
	// slowModel is a model on which a prompt of slowPrompt tokens takes seconds.
	slowModel = cluster.Once("slow", random(modeltest.Stories110M()))
	// mediumModel is one on which a prompt of some hundred tokens takes a while.
	mediumModel = cluster.Once("medium", random(modeltest.Stories15M()))
	// tinyModel is one that answers at once.
	tinyModel = cluster.Once("tiny", random(modeltest.Tiny("llama")))
)

// random writes a model with random weights and the tokenizer of stories260k.
func random(c arch.Config) func(dir string) error {
	return func(dir string) error {
		files := map[string][]byte{"chat_template.jinja": []byte("{% for m in messages %}{{ m.content }} {% endfor %}")}
		for _, name := range []string{"tokenizer.json", "tokenizer_config.json"} {
			b, err := os.ReadFile(filepath.Join("..", "..", "internal", "model", "stories260k", name))
			if err != nil {
				return err
			}
			files[name] = b
		}
		c.Vocab, c.MaxPositions = 512, 4096
		return modeltest.WriteHF(dir, c, modeltest.HFOptions{Seed: 1, DType: kernels.F16, Files: files})
	}
}
