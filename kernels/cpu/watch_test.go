package cpu

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/kerneltest"
)

func ranked(t *testing.T, ranks, threads int) *Backend {
	t.Helper()
	a := arch.Config{ModelType: "llama", Layers: 2, Hidden: 32, Intermediate: 48, Heads: 4, KVHeads: 2, HeadDim: 8,
		Vocab: 50, MaxPositions: 640, NormEps: 1e-5, RopeTheta: 10000, TiedHead: true}
	b, err := New(a, kerneltest.Weights(a, kernels.F32, 1), Options{Blocks: 4, Ranks: ranks, Threads: threads})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func step(b *Backend) error {
	_, err := b.Step(&kernels.Step{Seqs: []kernels.Seq{{Tokens: []int32{1, 2, 3}, Blocks: []int32{0}, WantLogits: true}}})
	return err
}

// TestHungRank: whichever member never comes to a barrier, its rank is named within 2 s, the step
// fails, and so does every later one. Close does not wait for it.
func TestHungRank(t *testing.T) {
	for _, threads := range []int{4, 8} {
		for hung := range threads {
			t.Run(fmt.Sprintf("%d of %d", hung, threads), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					b := ranked(t, 4, threads)
					if err := step(b); err != nil {
						t.Fatal(err)
					}
					time.Sleep(time.Hour) // between steps nobody is silent
					release := make(chan struct{})
					b.work = func(member int) {
						if member == hung {
							<-release
						}
						b.member(member)
					}
					began := time.Now()
					err := step(b)
					if took := time.Since(began); took > 2*time.Second || took < time.Second {
						t.Errorf("known after %v", took)
					}
					rank := fmt.Sprintf("rank %d of 4", hung*4/threads)
					told := <-b.Hung()
					for _, err := range []error{err, told, step(b)} {
						if !errors.Is(err, kernels.ErrHung) || !strings.Contains(err.Error(), rank) {
							t.Errorf("%v, want %s", err, rank)
						}
					}
					if err := b.Close(); err != nil {
						t.Error(err)
					}
					close(release)
				})
			})
		}
	}
}

// TestSlowRank: a rank that works for minutes while the others wait is not hung, nor is one whose
// step waits for what arrives.
func TestSlowRank(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := ranked(t, 2, 2)
		defer b.Close()
		b.work = func(member int) {
			if member == 1 {
				for range 200 {
					time.Sleep(time.Second) // an item of a slow machine
					b.step.members[member].progress()
				}
			}
			b.member(member)
		}
		if err := step(b); err != nil {
			t.Error(err)
		}
		b.work = b.member
		gate, err := b.Gate()
		if err != nil {
			t.Fatal(err)
		}
		time.AfterFunc(time.Minute, func() { gate.Open(math.MaxInt) })
		_, err = b.Step(&kernels.Step{Seqs: []kernels.Seq{{Tokens: []int32{1}, Blocks: []int32{0}}}, Arrivals: []kernels.Arrival{gate}})
		if err != nil {
			t.Error(err)
		}
	})
}

// TestBrokenRank: a rank that fails ends the step, is named, and later steps are unaffected.
func TestBrokenRank(t *testing.T) {
	b := ranked(t, 4, 8)
	defer b.Close()
	cause := errors.New("device lost")
	for bad := range 8 {
		for _, value := range []any{cause, "device lost"} {
			b.work = func(member int) {
				if member == bad {
					panic(value)
				}
				b.member(member)
			}
			func() {
				defer func() {
					err, _ := recover().(error)
					if want := fmt.Sprintf("rank %d: device lost", bad/2); err == nil || err.Error() != want || errors.Is(err, cause) != (value == any(cause)) {
						t.Errorf("member %d: %v, want %s", bad, err, want)
					}
				}()
				err := step(b)
				t.Errorf("member %d: the step returns %v", bad, err)
			}()
			b.work = b.member
			if err := step(b); err != nil {
				t.Errorf("after member %d: %v", bad, err)
			}
		}
	}
}

// TestSilence: no call of a projection is so long that a slow machine could seem to hang in it.
func TestSilence(t *testing.T) {
	watched, alone := ranked(t, 2, 2), ranked(t, 1, 2)
	defer watched.Close()
	defer alone.Close()
	for _, k := range []int{8, 64, 4096, 1 << 17} {
		for _, n := range []int{1, 2, 12, 13, 1 << 20} {
			panel := panelRows * k * min(n, 12)
			if most := watched.team.mostPanels(k, n); most < 1 || most > 1 && most*panel > silentMACs {
				t.Errorf("%d panels of %d multiply-adds", most, panel)
			}
			if alone.team.mostPanels(k, n) < 1<<30 {
				t.Error("one rank takes less at a time, and nobody watches")
			}
		}
	}
}

// TestGaze: silence is that of members at work, in ticks that come in time.
func TestGaze(t *testing.T) {
	team := newTeam(4, 2)
	defer team.close()
	began := time.Now()
	f := func(what string, want int, every time.Duration, at func(tick int)) {
		t.Helper()
		g := newGaze(team, began)
		for i := range team.seats {
			team.seats[i].rest()
		}
		team.seats[1].resume()
		team.seats[3].resume()
		g.look(team, began)
		for tick := 1; tick <= 10*watchTicks; tick++ {
			at(tick)
			stuck := g.look(team, began.Add(time.Duration(tick)*every))
			if stuck == nil {
				continue
			}
			if tick != want || strings.Join(stuck, ",") != "1" {
				t.Errorf("%s: ranks %v hang at tick %d, want rank 1 at %d", what, stuck, tick, want)
			}
			return
		}
		if want > 0 {
			t.Errorf("%s: nobody hangs", what)
		}
	}
	works := func(int) { team.seats[1].progress() }
	f("one is silent", watchTicks, watchTick, works)
	f("it works at times", 0, watchTick, func(tick int) {
		if works(tick); tick%(watchTicks-1) == 0 {
			team.seats[3].progress()
		}
	})
	f("ticks are late", 0, 2*watchTick, works)
	f("it begins to rest", 0, watchTick, func(tick int) {
		if works(tick); tick == watchTicks-1 {
			team.seats[3].rest()
		}
	})
}
