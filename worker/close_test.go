package worker_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/kvconn/tcp"
	"github.com/xpyd/xpyd/kvconn/way"
	"github.com/xpyd/xpyd/worker"
)

// TestCloseUnusedConnection: neither a connection on which nothing was ever
// asked nor an idle one delays the end of a worker.
func TestCloseUnusedConnection(t *testing.T) {
	cfg := worker.DefaultConfig(fleet.Decode)
	cfg.Threads, cfg.KVMemory = 1, 1<<20
	tr := tcp.New(nil)
	w, err := worker.Start(t.Context(), cfg, worker.Deps{Log: slog.New(slog.DiscardHandler), Registry: prometheus.NewRegistry(), Ways: []way.Kind{way.Network(tr)}, Build: "test"})
	if err != nil {
		t.Fatal(err)
	}
	unused, err := net.Dial("tcp", strings.TrimPrefix(w.URL(), "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer unused.Close()
	// Connections are accepted in turn: when this one is answered, so is that.
	send(t, http.MethodGet, w.URL()+"/health", nil, "")
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	start := time.Now()
	if err := w.Close(ctx); err != nil {
		t.Error(err)
	}
	if d := time.Since(start); d > slack {
		t.Errorf("close took %v", d)
	}
}

// TestLifelineEnds: a lifeline ends in order, however old it is.
func TestLifelineEnds(t *testing.T) {
	w := start(t, func(c *worker.Config) { c.StallTimeout = 400 * time.Millisecond })
	line, err := client.Get(w.URL() + "/xpyd/v1/lifeline")
	if err != nil {
		t.Fatal(err)
	}
	defer line.Body.Close()
	if _, err := io.ReadFull(line.Body, make([]byte, 1)); err != nil {
		t.Error(err)
	}
	time.Sleep(500 * time.Millisecond) // more than writing its begin could have taken
	if err := w.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if b, err := io.ReadAll(line.Body); err != nil || len(b) > 0 {
		t.Errorf("%q, %v", b, err)
	}
}

// TestFailed: the first reason to end is told, also if nobody listens yet.
func TestFailed(t *testing.T) {
	w := start(t, nil)
	w.Fail(errors.New("first"))
	w.Fail(errors.New("second"))
	select {
	case err := <-w.Failed():
		if err.Error() != "first" {
			t.Error(err)
		}
	default:
		t.Error("nothing is told")
	}
}
