package worker_test

import (
	"log/slog"
	"path/filepath"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/worker"
	"github.com/xpyd/xpyd/kernels/cuda"
)

// A worker that was told to keep KV in what only a GPU has does not fall back to
// the CPU.
func TestKVCacheDTypeNeedsGPU(t *testing.T) {
	t.Setenv(cuda.LibraryEnv, filepath.Join(t.TempDir(), "none.so"))
	cfg := worker.DefaultConfig(fleet.Decode)
	cfg.Threads, cfg.KVMemory, cfg.KVCacheDType = 1, 8<<20, "fp8"
	w, err := worker.Start(t.Context(), cfg, worker.Deps{Log: slog.New(slog.DiscardHandler), Registry: prometheus.NewRegistry(), Build: "test"})
	if err == nil {
		w.Close(t.Context())
		t.Fatal("started")
	}
	if want := "kv_cache_dtype fp8 needs a GPU: "; !strings.Contains(err.Error(), want) {
		t.Errorf("%q is not in %q", want, err)
	}
}
