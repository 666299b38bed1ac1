package cpu_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cpu"
)

// Another mapping of a shared pool's file shows each block where Shared says.
func TestShared(t *testing.T) {
	a := shape(3, 32, 48, 4, 2, 8, 50)
	w := randomWeights(a, kernels.F32, 1)
	private := open(t, a, w, cpu.Options{Blocks: 4, BlockTokens: 8, Threads: 1})
	if _, err := private.Shared(); err == nil {
		t.Error("a pool that was not asked to be shared is")
	}
	b, err := cpu.New(a, w, cpu.Options{Blocks: 4, BlockTokens: 8, Threads: 1, Share: true})
	if err != nil {
		t.Fatal(err)
	}
	mustStep(t, b, kernels.Seq{Tokens: randomTokens(rand.New(rand.NewPCG(1, 1)), 16, 50), Blocks: []int32{3, 1}})
	s, err := b.Shared()
	if err != nil {
		t.Fatal(err)
	}
	mem, err := unix.Mmap(s.FD, 0, int(s.Bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	l := b.Layout()
	stride := int64(l.Resolve()[0].BlockBytes())
	want := make([]byte, stride)
	for layer := range l.Layers() {
		for block := range int64(4) {
			at := s.Layers[layer] + block*stride
			b.Gather(layer, int32(block), 0, l.BlockTokens, want)
			if !bytes.Equal(mem[at:at+stride], want) {
				t.Errorf("layer %d block %d differs", layer, block)
			}
		}
	}
	mem[s.Layers[2]+stride] ^= 1
	if b.Gather(2, 1, 0, l.BlockTokens, want); want[0] != mem[s.Layers[2]+stride] {
		t.Error("the pool does not show what the other mapping wrote")
	}
	for range 2 {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	}
	if err := unix.Munmap(mem); err != nil {
		t.Error(err)
	}
}

// mapped is another mapping of a backend's shared pool.
func mapped(t *testing.T, b *cpu.Backend) (kernels.Shared, []byte) {
	t.Helper()
	s, err := b.Shared()
	if err != nil {
		t.Fatal(err)
	}
	mem, err := unix.Mmap(s.FD, 0, int(s.Bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(mem) })
	return s, mem
}

// TestPopulate: a pool takes its memory at once, shared or not, and a pool too large for
// the machine is refused before it takes any.
func TestPopulate(t *testing.T) {
	a := shape(3, 32, 48, 4, 2, 8, 50)
	w := randomWeights(a, kernels.F32, 1)
	for _, share := range []bool{false, true} {
		b, err := cpu.New(a, w, cpu.Options{Blocks: 4, BlockTokens: 8, Threads: 1, Share: share})
		if err != nil {
			t.Fatal(err)
		}
		if err := b.Populate(t.Context()); err != nil {
			t.Error(err)
		}
		ended, end := context.WithCancel(t.Context())
		end()
		if err := b.Populate(ended); !errors.Is(err, context.Canceled) {
			t.Errorf("after the end: %v", err)
		}
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	}
	var large *cpu.PoolError
	if _, err := cpu.New(a, w, cpu.Options{Blocks: 1 << 30, BlockTokens: 256, Threads: 1}); !errors.As(err, &large) {
		t.Errorf("a pool of 2^38 tokens: %v", err)
	}
}

// TestRanksShared: another mapping of the pool's file shows each rank's blocks where Shared says.
func TestRanksShared(t *testing.T) {
	a := shape(3, 32, 48, 4, 2, 8, 50)
	w := randomWeights(a, kernels.F32, 1)
	for _, ranks := range []int{1, 2, 4} {
		t.Run(fmt.Sprint(ranks), func(t *testing.T) {
			b := open(t, a, w, cpu.Options{Blocks: 4, BlockTokens: 8, Ranks: ranks, Share: true})
			mustStep(t, b, kernels.Seq{Tokens: randomTokens(rand.New(rand.NewPCG(1, 1)), 16, 50), Blocks: []int32{3, 1}})
			s, mem := mapped(t, b)
			layers := b.Layout().Layers()
			if s.Ranks != ranks || len(s.Layers) != ranks*layers {
				t.Fatalf("%d ranks with %d layers", s.Ranks, len(s.Layers))
			}
			for layer := range layers {
				for block := range int32(4) {
					for r, p := range b.Parts(nil, layer, block) {
						at := s.Layers[r*layers+layer] + int64(block)*int64(len(p.Run))
						if !slices.Equal(mem[at:at+int64(len(p.Run))], p.Run) {
							t.Errorf("layer %d block %d of rank %d differs", layer, block, r)
						}
					}
				}
			}
		})
	}
}
