package console

import "sync"

// ring keeps the latest things of a kind, each under a number, from 0 on. Any goroutine may use it.
type ring[T any] struct {
	mu   sync.Mutex
	list []T // at number % its bound
	next int
}

// put adds what of makes of its number. At most so many are kept, which is always the same number.
func (r *ring[T]) put(most int, of func(seq int) T) {
	r.mu.Lock()
	defer r.mu.Unlock()
	one := of(r.next)
	if len(r.list) < most {
		r.list = append(r.list, one)
	} else {
		r.list[r.next%most] = one
	}
	r.next++
}

// after is what has come from number seq on, the oldest first, and the number of the next one. A number that is still
// to come is of a router before this one: then it is all there is.
func (r *ring[T]) after(seq int) ([]T, int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if seq > r.next {
		seq = 0
	}
	out := []T{}
	for i := max(seq, r.next-len(r.list)); i < r.next; i++ {
		out = append(out, r.list[i%len(r.list)])
	}
	return out, r.next
}
