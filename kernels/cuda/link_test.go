//go:build cuda && cgo && linux

package cuda_test

import (
	"context"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cuda"
)

// TestLinksBeside: links come and are broken off in the midst of transfers, some before
// they are ready, while another link of the same two GPUs goes on moving. It prints how
// long the other is held up. Needs two GPUs and XPYD_CUDA_PUSH=1.
func TestLinksBeside(t *testing.T) {
	if os.Getenv("XPYD_CUDA_PUSH") == "" {
		t.Skip("XPYD_CUDA_PUSH is not set")
	}
	const size, rounds = 16 << 20, 8
	a := shape(2, 256, 64, 4, 4, 64, 64)
	var gpus [2]*cuda.Backend
	for n := range gpus {
		b, err := cuda.NewRandom(a, 1, cuda.Options{Device: n, Blocks: 64, MaxTokens: 64, MaxSeqs: 2, NoGraphs: true})
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := b.Close(); err != nil { // links that have not ended
				t.Error(err)
			}
		}()
		gpus[n] = b
	}
	all, cancel := context.WithTimeout(t.Context(), 25*time.Second)
	defer cancel()
	pair := func() (ends [2]kernels.Link) {
		id, err := gpus[1].NewLink()
		if err != nil {
			t.Fatal(err)
		}
		for n, end := range []kernels.LinkEnd{kernels.LinkSender, kernels.LinkReceiver} {
			if ends[n], err = gpus[n].OpenLink(id, end, size); err != nil {
				t.Fatal(err)
			}
		}
		return ends
	}
	ready := func(l kernels.Link) {
		if err := l.Ready(all); err != nil {
			t.Errorf("join: %v", err)
		}
	}
	shut := func(ends [2]kernels.Link) {
		var both sync.WaitGroup
		for _, l := range ends {
			both.Go(func() {
				if err := l.Close(all); err != nil {
					t.Errorf("close: %v", err)
				}
			})
		}
		both.Wait()
	}
	steady := pair()
	ready(steady[0])
	ready(steady[1])
	var moved atomic.Int64
	var slowest, over atomic.Int64
	var busy sync.WaitGroup
	busy.Go(func() {
		for over.Load() == 0 && all.Err() == nil {
			began := time.Now()
			for _, l := range steady {
				p, err := l.Transfer(all, 0, 8<<20, nil)
				if err != nil {
					t.Error(err)
					return
				}
				if l == steady[1] {
					if err := p.Wait(all); err != nil {
						t.Errorf("a transfer of the link beside: %v", err)
						return
					}
				}
			}
			moved.Add(1)
			slowest.Store(max(slowest.Load(), int64(time.Since(began))))
		}
	})
	var joined, closed []string
	for round := range rounds {
		began := time.Now()
		other := pair()
		if round%4 != 3 { // else it is broken off while it joins
			ready(other[0])
			ready(other[1])
			joined = append(joined, fmt.Sprint(time.Since(began).Milliseconds()))
			if _, err := other[1].Transfer(all, 0, size, nil); err != nil { // nobody sends it
				t.Error(err)
			}
		}
		began = time.Now()
		shut(other)
		closed = append(closed, fmt.Sprint(time.Since(began).Milliseconds()))
	}
	over.Store(1)
	busy.Wait()
	fmt.Printf("LINKS: joined in %v ms, closed in %v ms; beside them %d transfers of 8 MiB, the slowest %.1f ms\n", joined, closed, moved.Load(), float64(slowest.Load())/1e6)
	shut(steady)
}
