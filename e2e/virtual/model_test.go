package virtual

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/xpyd/xpyd/internal/model/modeltest"
	"github.com/xpyd/xpyd/kernels"
)

// makeModel writes a tiny model with random weights and the tokenizer of stories260k.
func makeModel(t *testing.T, dir string) {
	t.Helper()
	files := map[string][]byte{"chat_template.jinja": []byte("{% for m in messages %}{{ m.content }} {% endfor %}")}
	for _, name := range []string{"tokenizer.json", "tokenizer_config.json"} {
		b, err := os.ReadFile(filepath.Join("..", "..", "internal", "model", "stories260k", name))
		if err != nil {
			t.Fatal(err)
		}
		files[name] = b
	}
	c := modeltest.Tiny("llama")
	c.Vocab, c.MaxPositions = 512, 4096
	if err := modeltest.WriteHF(dir, c, modeltest.HFOptions{Seed: 1, DType: kernels.F16, Files: files}); err != nil {
		t.Fatal(err)
	}
}
