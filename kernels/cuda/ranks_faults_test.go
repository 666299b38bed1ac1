//go:build cuda && cgo && linux

package cuda_test

import (
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/memfd"
	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cuda"
)

// Host memory comes and goes while steps run: the driver may want a device to be idle for it.
func TestRanksRegister(t *testing.T) {
	if inOwnProcess(t) {
		return
	}
	a := families()["llama gqa4 128"]
	w := randomWeights(a, 1)
	mem, err := memfd.Private(16 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	for _, n := range rankCounts(t, 2, 4) {
		b := openRanks(t, a, w, n, cuda.Options{})
		var times atomic.Int32
		stop, over := make(chan struct{}), make(chan error, 1)
		go func() {
			for {
				select {
				case <-stop:
					over <- nil
					return
				default:
				}
				host, err := b.RegisterHost(mem.Bytes)
				if err == nil {
					err = host.Close()
				}
				if err != nil {
					over <- err
					return
				}
				times.Add(1)
			}
		}()
		steps := 0
		for ; steps < 200 || times.Load() < 20; steps++ {
			mustStep(t, b, kernels.Seq{Tokens: []int32{1, 2, 3}, Blocks: []int32{3}, WantLogits: steps%2 == 0})
			if len(over) > 0 {
				break
			}
		}
		close(stop)
		if err := <-over; err != nil {
			t.Error(err)
		}
		t.Logf("%d ranks: %d steps, memory was registered %d times", n, steps, times.Load())
	}
}

// A rank that does not come is found and named within two seconds; steps end with that error
// from then on, and Close returns.
func TestRanksHang(t *testing.T) {
	if inOwnProcess(t) {
		return
	}
	a := families()["llama gqa4 128"]
	w := randomWeights(a, 1)
	for _, n := range rankCounts(t, 2, 4) {
		for rank := range n {
			b := openRanks(t, a, w, n, cuda.Options{Blocks: 16})
			st := &kernels.Step{Seqs: []kernels.Seq{{Tokens: []int32{1, 2, 3}, Blocks: []int32{3}, Samples: []kernels.Sample{{TopP: 1, Repetition: 1, Logprobs: -1}}}}}
			if err := b.LaunchWithout(st, rank); err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			_, err := b.Await()
			took := time.Since(began)
			var hang *cuda.RankError
			if !errors.As(err, &hang) || hang.Rank != rank || hang.Waiting == rank || hang.Waited > 2*time.Second {
				t.Fatalf("%d ranks without rank %d: %v after %v", n, rank, err, took)
			}
			t.Logf("%v: after %v", err, took)
			if _, err := b.Step(st); !errors.As(err, &hang) || !errors.Is(err, kernels.ErrHung) {
				t.Errorf("the next step: %v", err)
			}
			select {
			case err := <-b.Hung():
				if !errors.As(err, &hang) || hang.Rank != rank {
					t.Errorf("without rank %d Hung yields %v", rank, err)
				}
			default:
				t.Error("Hung yields nothing")
			}
			if err := b.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

// A device that does not answer holds neither a step up for long, nor Close, which names it.
func TestRanksDead(t *testing.T) {
	if inOwnProcess(t) {
		return
	}
	a := families()["llama gqa4 128"]
	devices := rankDevices(2)
	b, err := cuda.NewRanks(a, randomWeights(a, 1), cuda.Options{Blocks: 16, FP16: inFP16(), Devices: devices})
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Hold(1, true); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := b.Hold(1, false); err != nil {
			t.Error(err)
		}
	}()
	layers := 0
	st := &kernels.Step{Seqs: []kernels.Seq{{Tokens: []int32{1, 2, 3}, Blocks: []int32{3}}}, OnLayer: func(int) { layers++ }}
	if err := b.Launch(st); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	_, err = b.Await()
	var hang *cuda.RankError
	if took := time.Since(began); !errors.As(err, &hang) || hang.Rank != 1 || hang.Device != devices[1] || took > 10*time.Second {
		t.Errorf("Await: %v after %v", err, took)
	}
	if layers != 0 {
		t.Errorf("%d layers were told of", layers)
	}
	if err := b.Launch(st); !errors.Is(err, kernels.ErrHung) {
		t.Errorf("the next step: %v", err)
	}
	began = time.Now()
	err = b.Close()
	took := time.Since(began)
	if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("rank 1 on device %d", devices[1])) || took > 30*time.Second {
		t.Errorf("Close: %v after %v", err, took)
	}
	t.Logf("Close: %v after %v", err, took)
	if err := b.Close(); err != nil {
		t.Errorf("the second Close: %v", err)
	}
}

// What cannot be is refused, and named.
func TestRanksRefused(t *testing.T) {
	if inOwnProcess(t) {
		return
	}
	a := families()["llama gqa4 128"]
	w := randomWeights(a, 1)
	f := func(want string, a arch.Config, opt cuda.Options) {
		t.Helper()
		opt.Blocks = 8
		b, err := cuda.NewRanks(a, w, opt)
		if err == nil {
			b.Close()
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	f("1 devices: 2 to 8", a, cuda.Options{Devices: []int{0}})
	f("8 heads cannot be divided among 3 ranks", a, cuda.Options{Devices: []int{0, 0, 0}})
	f("device 99 of", a, cuda.Options{Devices: []int{0, 99}})
	if _, err := cuda.New(a, w, cuda.Options{Devices: []int{0, 0}}); err == nil || !strings.Contains(err.Error(), "for Open") {
		t.Errorf("New of several devices: %v", err)
	}
	var none kernels.Backend = openRanks(t, a, w, 2, cuda.Options{})
	if _, ok := none.(kernels.PeerOpener); ok {
		t.Error("ranks push to peers")
	}
}
