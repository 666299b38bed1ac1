package engine_test

import (
	"fmt"
	"testing"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/enginetest"
	"github.com/xpyd/xpyd/kernels"
)

// instant answers steps at once with token 1, so that only the engine's own
// work between steps is left to measure.
type instant struct {
	*enginetest.Backend
	gate    chan struct{} // closed to begin
	results []kernels.Result
	samples []kernels.Sampled
}

func (b *instant) Step(s *kernels.Step) ([]kernels.Result, error) {
	<-b.gate
	b.results = b.results[:0]
	for _, q := range s.Seqs {
		b.results = append(b.results, kernels.Result{Samples: b.samples[:len(q.Samples)]})
	}
	return b.results, nil
}

// BenchmarkStep measures the gap between steps: ns/op is one step of n
// decoding sequences, delivery and reading included.
func BenchmarkStep(b *testing.B) {
	for _, n := range []int{1, 64, 256} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			backend := &instant{Backend: enginetest.New(enginetest.Config{
				Blocks: 1 << 18, BlockTokens: 16, MaxPositions: 1 << 30, Layers: 1,
			}), gate: make(chan struct{}), samples: []kernels.Sampled{{Token: 1}}}
			r := newRigOn(b, config(), backend)
			var handles []*engine.Handle
			for i := range n {
				req := request([]int32{int32(i % 48), 2, 3}, b.N+1)
				handles = append(handles, r.submit(req))
			}
			b.ReportAllocs()
			b.ResetTimer()
			close(backend.gate)
			done := make(chan error)
			for _, h := range handles {
				go func() {
					_, err := readAll(h)
					done <- err
				}()
			}
			for range handles {
				if err := <-done; err != nil {
					b.Error(err)
				}
			}
		})
	}
}
