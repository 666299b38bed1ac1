package virtual

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/e2e/unbroken"
	"github.com/xpyd/xpyd/internal/fleet"
)

// TestShortage: drawn streams crowd one decode worker, whose pool does not hold them. Others come to
// have room while they run, and before all is over full pools themselves: whichever moves, waits or
// is computed again, each stream is what it is among few.
func TestShortage(t *testing.T) {
	const rounds, crowd, few = 8, 14, 3
	model := filepath.Join(t.TempDir(), "tiny")
	makeModel(t, "llama", model)
	bubble(t, func(t *testing.T) {
		f := newFleet(t, model)
		f.blocks = 110 // of 16 tokens: for the longest with three choices
		f.start(t, fleet.Prefill, "prefill-0")
		for _, id := range unbroken.IDs {
			f.Start(t, id)
		}
		f.router.WaitServing(t, 30*time.Second, 1, len(unbroken.IDs))
		order := func(what string) {
			for _, id := range unbroken.IDs[1:] {
				if err := f.router.Call(http.MethodPost, "/admin/v1/instances/"+id+"/"+what, nil, nil); err != nil {
					t.Errorf("%s %s: %v", what, id, err)
				}
			}
		}
		moved := 0.0
		for n := range rounds {
			r := rand.New(rand.NewPCG(uint64(n), 22))
			asks := make([]unbroken.Request, crowd)
			for i := range asks {
				asks[i] = unbroken.Draw(r, false)
			}
			tell := func(i int, met func()) *unbroken.Answer {
				return unbroken.Tell(t.Context(), f.client, f.router.URL+asks[i].Path, fmt.Sprintf("short-%d-%d", n, i), "{"+asks[i].Fields+"}", func(string, int) { met() })
			}
			want, got := make([]*unbroken.Answer, crowd), make([]*unbroken.Answer, crowd)
			var wg sync.WaitGroup
			for i := range want {
				wg.Go(func() { want[i] = tell(i, func() {}) })
				if i%few == few-1 {
					wg.Wait()
				}
			}
			wg.Wait()
			order("drain")
			var once sync.Once
			begun := make(chan struct{})
			for i := range got {
				wg.Go(func() { got[i] = tell(i, func() { once.Do(func() { close(begun) }) }) })
			}
			<-begun
			time.Sleep(time.Duration(r.IntN(1000)) * time.Millisecond) // virtual
			order("undrain")
			wg.Wait()
			for i, s := range got {
				if bad := s.Differs(want[i]); bad != "" {
					t.Errorf("round %d: %s: by %s, %d seams, %s", n, asks[i].Fields, s.Decode, s.Seams, bad)
				}
			}
			cluster.Wait(t, 2*time.Second, "ledgers empty", f.router.Idle)
			moves, err := f.router.Metric(`xpyd_router_takeovers_total{outcome="continued",reason="shortage"}`)
			if err != nil {
				t.Fatal(err)
			}
			moved = moves
		}
		if moved < rounds {
			t.Errorf("%v streams moved: the test shows little", moved)
		}
		t.Logf("%v streams moved", moved)
	})
}
