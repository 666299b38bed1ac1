package gpus_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/xpyd/xpyd/internal/gpus"
	"github.com/xpyd/xpyd/internal/gpus/gpustest"
)

// desk makes seats on a fake machine whose GPUs are on those NUMA nodes.
func desk(t *testing.T, choice string, nodes ...int) *gpus.Seats {
	t.Helper()
	c, err := gpus.ParseChoice(choice)
	if err != nil {
		t.Fatal(err)
	}
	list, err := look(t, gpustest.FakeNVML(len(nodes)), "-").Choose(c)
	if err != nil {
		t.Fatal(err)
	}
	sys := gpustest.FakeSys([]string{"0-3", "4-7"}, nodes...)
	return gpus.NewSeats(list, func(pci string) int { return gpus.NodeOf(sys, pci) })
}

// TestSeats: who comes, goes, restarts and comes again gets which GPU.
func TestSeats(t *testing.T) {
	type step struct{ do, want string } // "prefill p0" or "-p0"
	for _, c := range []struct {
		name, choice string
		nodes        []int
		steps        []step
	}{
		{"one each, in order", "all", []int{0, 0, 0}, []step{{"prefill p0", "cuda:0"}, {"decode d0", "cuda:1"}, {"decode d1", "cuda:2"},
			{"decode d2", "no GPU is free for d2: cuda:0 has p0, cuda:1 has d0, cuda:2 has d1"}}},
		{"who ends frees its own", "all", []int{0, 0}, []step{{"prefill p0", "cuda:0"}, {"decode d0", "cuda:1"}, {"-p0", ""}, {"-nobody", ""}, {"decode d1", "cuda:0"},
			{"prefill p0", "no GPU is free"}, {"-d0", ""}, {"prefill p0", "cuda:1"}}},
		{"each node gets both roles", "all", []int{0, 0, 1, 1}, []step{{"prefill p0", "cuda:0"}, {"prefill p1", "cuda:2"}, {"decode d0", "cuda:1"}, {"decode d1", "cuda:3"}}},
		{"also later", "all", []int{0, 0, 1, 1}, []step{{"prefill p0", "cuda:0"}, {"decode d0", "cuda:1"}, {"decode d1", "cuda:2"}, {"-d0", ""}, {"-d1", ""},
			{"decode d2", "cuda:1"}, {"decode d3", "cuda:2"}}},
		{"the list's order", "cuda:2,cuda:0", []int{0, 0, 0}, []step{{"prefill p0", "cuda:2"}, {"decode d0", "cuda:0"}}},
		{"an empty GPU before a shared one", "cuda:0,cuda:0,cuda:1,cuda:1", []int{0, 0}, []step{{"prefill p0", "cuda:0/2"}, {"prefill p1", "cuda:1/2"},
			{"decode d0", "cuda:0/2"}, {"decode d1", "cuda:1/2"}, {"decode d2", "no GPU is free"}}},
		{"two each, of one node", "all", []int{0, 0, 0, 1, 1, 1}, []step{{"prefill p0", "cuda:0+cuda:1"}, {"decode d0", "cuda:2+cuda:3"}, {"decode d1", "cuda:4+cuda:5"}, {"-d0", ""},
			{"decode d2", "cuda:2+cuda:3"}, {"-p0", ""}, {"decode d3", "cuda:0"}, {"prefill p1", "cuda:1"}}},
		{"of several GPUs before one twice", "cuda:0,cuda:0,cuda:1,cuda:1", []int{0, 0}, []step{{"prefill p0", "cuda:0/2+cuda:1/2"}, {"decode d0", "cuda:0/2+cuda:1/2"}}},
		{"unlike shares", "cuda:0,cuda:1,cuda:1", []int{0, 0}, []step{{"prefill p0", "cuda:0"}, {"decode d0", "cuda:1/2"}, {"decode d1", "cuda:1/2"}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := desk(t, c.choice, c.nodes...)
			for _, st := range c.steps {
				if who, goes := strings.CutPrefix(st.do, "-"); goes {
					s.Give(who)
					continue
				}
				role, who, _ := strings.Cut(st.do, " ")
				seats, err := s.Take(role, who, max(1, strings.Count(st.want, "+")+1))
				var parts []string
				for _, seat := range seats {
					part := seat.String()
					if seat.Share > 1 {
						part = fmt.Sprintf("%s/%d", part, seat.Share)
					}
					parts = append(parts, part)
				}
				got := strings.Join(parts, "+")
				if err != nil {
					got = err.Error()
				}
				if got != st.want && !(err != nil && errors.Is(err, gpus.ErrTaken) && strings.HasPrefix(got, st.want)) {
					t.Errorf("%s: %s, want %s", st.do, got, st.want)
				}
			}
		})
	}
}

// TestSeatsAtOnce: however many take and give at once, nobody has another's seat, and none is lost.
func TestSeatsAtOnce(t *testing.T) {
	nodes := make([]int, 20)
	s := desk(t, "all", nodes...)
	var mu sync.Mutex
	has := map[string]bool{}
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for range 200 {
				who := fmt.Sprint("w", w)
				seats, err := s.Take("decode", who, 1)
				if err != nil {
					t.Error(err)
					return
				}
				seat := seats[0]
				mu.Lock()
				if has[seat.UUID] {
					t.Errorf("%s is given twice", seat)
				}
				has[seat.UUID] = true
				mu.Unlock()
				mu.Lock()
				delete(has, seat.UUID)
				mu.Unlock()
				s.Give(who)
			}
		})
	}
	wg.Wait()
	for i := range 20 {
		if _, err := s.Take("decode", fmt.Sprint(i), 1); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.Take("decode", "more", 1); err == nil || !strings.Contains(err.Error(), "all 20 are in use") {
		t.Error(err)
	}
}
