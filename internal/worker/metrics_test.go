package worker_test

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/worker"
)

// counter reads one series; labels are part of its name.
func counter(t testing.TB, w *worker.Worker, name string) (v float64) {
	t.Helper()
	_, rest, ok := strings.Cut(metrics(t, w), "\n"+name+" ")
	if !ok {
		t.Fatalf("no %s", name)
	}
	fmt.Sscan(rest, &v)
	return v
}

func metrics(t testing.TB, w *worker.Worker) string {
	t.Helper()
	resp, err := http.Get(w.URL() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
