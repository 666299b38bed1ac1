package main

import (
	"context"
	"log/slog"
	"path/filepath"

	"github.com/xpyd/xpyd/internal/model"
	"github.com/xpyd/xpyd/internal/model/modeltest"
	"github.com/xpyd/xpyd/kernels"
)

// makeModel writes a model of Llama-3-8B's shape, but with the embedded model's tokens,
// into a folder of dir.
func makeModel(ctx context.Context, dir string) (string, error) {
	tiny, err := model.Open(ctx, "", model.Options{Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		return "", err
	}
	defer tiny.Close()
	c := tiny.Config
	c.Layers, c.Hidden, c.Intermediate, c.Heads, c.KVHeads, c.HeadDim = 32, 4096, 14336, 32, 8, 128
	c.MaxPositions, c.RopeTheta, c.TiedHead = 32768, 500000, false
	tokens, config, _ := tiny.TokenizerFiles()
	to := filepath.Join(dir, "model")
	return to, modeltest.WriteHF(to, c, modeltest.HFOptions{Seed: 1, DType: kernels.BF16, Shards: c.Layers,
		Files: map[string][]byte{"tokenizer.json": tokens, "tokenizer_config.json": config}})
}
