package worker_test

import (
	"fmt"
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
	_, b := send(t, http.MethodGet, w.URL()+"/metrics", nil, "")
	return string(b)
}
