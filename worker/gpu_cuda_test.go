//go:build cuda && cgo && linux

package worker_test

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/worker"
)

// TestOnGPU: a worker on a GPU sizes its pool by itself, answers, and shows what
// the GPU does.
func TestOnGPU(t *testing.T) {
	w := start(t, func(c *worker.Config) { c.Device, c.KVMemory, c.GPUMemory, c.BatchInvariant = "cuda", 0, 0.3, true })
	i := w.Instance()
	if i.Blocks < 1<<16 || i.KVBytes < 1<<26 || !strings.HasPrefix(i.Numerics, "cuda-bf16-invariant-2-") {
		t.Errorf("%+v", i)
	}
	if a := complete(t, w, nil, `{"prompt":"Once upon a time","max_tokens":20,"temperature":0}`); !strings.Contains(a.Choices[0].Text, "there was a little girl named Lily") {
		t.Errorf("%+v", a)
	}
	var shown string
	soon(t, 10*time.Second, func() error {
		resp, err := http.Get(w.URL() + "/metrics")
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			return err
		}
		shown = ""
		for line := range strings.Lines(string(b)) {
			if strings.HasPrefix(line, "xpyd_gpu_") {
				shown += line
			}
		}
		for _, name := range []string{"utilization_ratio", "memory_used_bytes", "memory_total_bytes", "power_watts", "temperature_celsius"} {
			if !strings.Contains(shown, "xpyd_gpu_"+name+" ") {
				return fmt.Errorf("no %s in %q", name, shown)
			}
		}
		return nil
	})
	t.Log(shown)
}

// TestOnGPUInFP16: a worker that is told to computes in fp16, says so to the fleet,
// and tells the same story.
func TestOnGPUInFP16(t *testing.T) {
	w := start(t, func(c *worker.Config) { c.Device, c.KVMemory, c.DType = "cuda", 64<<20, "fp16" })
	if i := w.Instance(); i.Numerics != "cuda-fp16-1" || !strings.Contains(string(i.Layout.Groups), `"dtype":"f16"`) {
		t.Errorf("%+v", i)
	}
	if a := complete(t, w, nil, `{"prompt":"Once upon a time","max_tokens":20,"temperature":0}`); !strings.Contains(a.Choices[0].Text, "there was a little girl named Lily") {
		t.Errorf("%+v", a)
	}
}
