//go:build cgo && linux

package worker

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/model"
	"github.com/xpyd/xpyd/kernels/cuda"
)

// TestDeviceAuto: a library that is there and cannot be used is warned of, as somebody
// wants a GPU; device cuda insists.
func TestDeviceAuto(t *testing.T) {
	m, err := model.Open(t.Context(), "", model.Options{Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	library := filepath.Join(t.TempDir(), "libxpyd_cuda.so")
	if err := os.WriteFile(library, []byte("of another kind"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv(cuda.LibraryEnv, library)
	cfg := DefaultConfig(fleet.Decode)
	cfg.Blocks = 4
	var said bytes.Buffer
	log := slog.New(slog.NewTextHandler(&said, &slog.HandlerOptions{Level: slog.LevelWarn}))
	b, err := newBackend(&cfg, m, nil, false, nil, log)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	if b.Info().Name != "cpu" || !strings.Contains(said.String(), "taking the CPU") || !strings.Contains(said.String(), library) {
		t.Errorf("on %s, having said %q", b.Info().Name, &said)
	}
	cfg.Device = "cuda"
	if _, err := newBackend(&cfg, m, nil, false, nil, log); err == nil {
		t.Error("device cuda took something else")
	}
}
