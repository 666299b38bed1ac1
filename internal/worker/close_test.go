package worker_test

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/worker"
	"github.com/xpyd/xpyd/kvconn/tcp"
)

// TestCloseUnusedConnection: neither a connection on which nothing was ever
// asked nor an idle one delays the end of a worker.
func TestCloseUnusedConnection(t *testing.T) {
	cfg := worker.DefaultConfig(fleet.Decode)
	cfg.Threads, cfg.KVMemory = 1, 1<<20
	tr, err := tcp.New(tcp.DefaultConfig())
	if err != nil {
		t.Fatal(err)
	}
	w, err := worker.Start(t.Context(), cfg, worker.Deps{Log: slog.New(slog.DiscardHandler), Registry: prometheus.NewRegistry(), Transport: tr, Build: "test"})
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.Get(w.URL() + "/health")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	unused, err := net.Dial("tcp", strings.TrimPrefix(w.URL(), "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer unused.Close()
	time.Sleep(20 * time.Millisecond) // accepted
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	start := time.Now()
	if err := w.Close(ctx); err != nil {
		t.Error(err)
	}
	if d := time.Since(start); d > 3*time.Second {
		t.Errorf("close took %v", d)
	}
}
