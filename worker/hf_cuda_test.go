//go:build cuda && cgo && linux

package worker

import (
	"encoding/binary"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/model"
	"github.com/xpyd/xpyd/kernels"
)

// TestHFLogits is the half of scripts/cuda-hf that has our logits: for each model
// under XPYD_HF_DIR it reads tokens.bin (int32) and writes [tokens][vocabulary]
// float32: decoded.bin token by token, chunked.bin with the rows after each chunk
// of 16 (others zero), and invariant.bin as decoded.bin under batch_invariant. All by
// so many ranks on one GPU as XPYD_HF_RANKS says.
func TestHFLogits(t *testing.T) {
	root := os.Getenv("XPYD_HF_DIR")
	if root == "" {
		t.Skip("XPYD_HF_DIR is not set; scripts/cuda-hf sets it")
	}
	var devices []int // nil: one rank
	if n := os.Getenv("XPYD_HF_RANKS"); n != "" {
		ranks, err := strconv.Atoi(n)
		if err != nil || ranks < 2 {
			t.Fatalf("XPYD_HF_RANKS is %s", n)
		}
		devices = make([]int, ranks)
	}
	dirs, err := filepath.Glob(filepath.Join(root, "*", "config.json"))
	if err != nil || len(dirs) == 0 {
		t.Fatalf("no models in %s: %v", root, err)
	}
	for _, config := range dirs {
		dir := filepath.Dir(config)
		t.Run(filepath.Base(dir), func(t *testing.T) {
			raw, err := os.ReadFile(filepath.Join(dir, "tokens.bin"))
			if err != nil {
				t.Fatal(err)
			}
			tokens := make([]int32, len(raw)/4)
			if _, err := binary.Decode(raw, binary.LittleEndian, tokens); err != nil {
				t.Fatal(err)
			}
			m, err := model.Open(t.Context(), dir, model.Options{Log: slog.New(slog.DiscardHandler)})
			if err != nil {
				t.Fatal(err)
			}
			defer m.Close()
			run := func(name string, chunk int, invariant bool) {
				cfg := DefaultConfig(fleet.Prefill)
				cfg.Device, cfg.Blocks, cfg.BatchInvariant = "cuda", 64, invariant
				cfg.TensorParallel = max(len(devices), 1)
				b, err := newBackend(&cfg, m, devices, false, nil, slog.New(slog.DiscardHandler))
				if err != nil {
					t.Fatal(err)
				}
				defer b.Close()
				logits := make([]float32, len(tokens)*b.Arch().Vocab)
				table := []int32{}
				for i := range (len(tokens) + cfg.BlockTokens - 1) / cfg.BlockTokens {
					table = append(table, int32(i*29%64))
				}
				for pos := 0; pos < len(tokens); {
					part := tokens[pos:min(pos+chunk, len(tokens))]
					r, err := b.Step(&kernels.Step{Seqs: []kernels.Seq{{Tokens: part, Pos: pos, Blocks: table, WantLogits: true}}})
					if err != nil {
						t.Fatal(err)
					}
					pos += len(part)
					copy(logits[(pos-1)*b.Arch().Vocab:], r[0].Logits)
				}
				out, err := binary.Append(nil, binary.LittleEndian, logits)
				if err == nil {
					err = os.WriteFile(filepath.Join(dir, name), slices.Clip(out), 0o600)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			run("decoded.bin", 1, false)
			run("chunked.bin", 16, false)
			run("invariant.bin", 1, true)
		})
	}
}
