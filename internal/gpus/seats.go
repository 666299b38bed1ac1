package gpus

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
)

// Seats hand GPUs out to workers, one seat for each GPU in a list. A GPU that is there twice has two
// seats, for two workers that share it. It is safe for concurrent use.
type Seats struct {
	mu   sync.Mutex
	list []*seat
}

type seat struct {
	Seat
	who, role string // who has it; "": nobody
}

// Seat is a worker's part of a GPU.
type Seat struct {
	GPU
	Node  int // NUMA node of the GPU; -1: unknown
	Share int // seats that the GPU has in all
}

// NewSeats makes seats on those GPUs. node returns the NUMA node of a bus id.
func NewSeats(list []GPU, node func(pci string) int) *Seats {
	s := &Seats{}
	for _, g := range list {
		share := 0
		for _, o := range list {
			if o.UUID == g.UUID {
				share++
			}
		}
		s.list = append(s.list, &seat{Seat: Seat{g, node(g.PCI), share}})
	}
	return s
}

// ErrTaken says that all seats are taken.
var ErrTaken = errors.New("no GPU is free")

// Len is how many there are.
func (s *Seats) Len() int { return len(s.list) }

// Take gives a worker n seats until Give, or none. It takes those of GPUs with the fewest workers; of those
// the ones of the NUMA node with the fewest workers of the same role, so that each node gets prefill and
// decode and pairs find each other there; of those the first of the list. What a worker has several of is
// of as many GPUs as possible, and of the node of the first as far as that has them.
func (s *Seats) Take(role, who string, n int) ([]Seat, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	on, near := map[string]int{}, map[int]int{} // workers by UUID; of the role by node
	var free []*seat
	for _, t := range s.list {
		switch {
		case t.who == "":
			free = append(free, t)
			continue
		case t.role == role:
			near[t.Node]++
		}
		on[t.UUID]++
	}
	if len(free) < n {
		if n > 1 {
			return nil, fmt.Errorf("%w for %s, which takes %d: %s", ErrTaken, who, n, s.says())
		}
		return nil, fmt.Errorf("%w for %s: %s", ErrTaken, who, s.says())
	}
	var took []*seat
	away := func(t *seat) int { // it is not beside the first
		if len(took) == 0 || t.Node == took[0].Node {
			return 0
		}
		return 1
	}
	for range n {
		best := slices.MinFunc(free, func(a, b *seat) int { // the first of several
			return cmp.Or(cmp.Compare(on[a.UUID], on[b.UUID]), cmp.Compare(away(a), away(b)), cmp.Compare(near[a.Node], near[b.Node]))
		})
		took = append(took, best)
		on[best.UUID]++
		free = slices.DeleteFunc(free, func(t *seat) bool { return t == best })
	}
	var seats []Seat
	for _, t := range took {
		t.who, t.role = who, role
		seats = append(seats, t.Seat)
	}
	return seats, nil
}

// Give gives back what a worker has.
func (s *Seats) Give(who string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.list {
		if t.who == who {
			t.who, t.role = "", ""
		}
	}
}

// saysMost bounds how many workers an error names.
const saysMost = 16

// says who has which; needs mu.
func (s *Seats) says() string {
	if len(s.list) > saysMost {
		return fmt.Sprintf("all %d are in use", len(s.list))
	}
	var list []string
	for _, t := range s.list {
		list = append(list, fmt.Sprintf("%s has %s", t.GPU, cmp.Or(t.who, "nobody")))
	}
	return strings.Join(list, ", ")
}
