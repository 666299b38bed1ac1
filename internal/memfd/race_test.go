//go:build linux

package memfd_test

import (
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/xpyd/xpyd/internal/memfd"
)

// TestOthersStay: allocating takes no address range away from other threads,
// also where there are no huge pages to be had and the attempt fails.
func TestOthersStay(t *testing.T) {
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		defer close(done)
		for range 300 {
			m, err := memfd.New("xpyd-test", 8<<20)
			if err != nil {
				t.Error(err)
				return
			}
			if err := m.Close(); err != nil {
				t.Error(err)
			}
		}
	})
	for range 3 {
		wg.Go(func() {
			for {
				b, err := unix.Mmap(-1, 0, 8<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
				if err != nil {
					t.Error(err)
					return
				}
				for i := 0; i < len(b); i += 1 << 20 {
					b[i] = 1 // a fault if the range is gone
				}
				if err := unix.Munmap(b); err != nil {
					t.Error(err)
				}
				select {
				case <-done:
					return
				default:
				}
			}
		})
	}
	wg.Wait()
}
