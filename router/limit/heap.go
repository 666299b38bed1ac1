package limit

// heap is a binary heap whose elements know their place, so that any of them can move or
// leave in O(log n).
type heap struct {
	less func(a, b *flow) bool
	at   func(*flow) *int // where an element keeps its place; -1 outside the heap
	all  []*flow
}

func (h *heap) push(f *flow) {
	*h.at(f) = len(h.all)
	h.all = append(h.all, f)
	h.fix(f)
}

// fix restores the order after f's key changed.
func (h *heap) fix(f *flow) {
	i := *h.at(f)
	for i > 0 {
		up := (i - 1) / 2
		if !h.less(h.all[i], h.all[up]) {
			break
		}
		h.swap(i, up)
		i = up
	}
	for {
		down := 2*i + 1
		if down >= len(h.all) {
			return
		}
		if down+1 < len(h.all) && h.less(h.all[down+1], h.all[down]) {
			down++
		}
		if !h.less(h.all[down], h.all[i]) {
			return
		}
		h.swap(i, down)
		i = down
	}
}

func (h *heap) remove(f *flow) {
	i, last := *h.at(f), len(h.all)-1
	h.swap(i, last)
	h.all[last] = nil
	h.all = h.all[:last]
	*h.at(f) = -1
	if i < last {
		h.fix(h.all[i])
	}
}

func (h *heap) swap(i, j int) {
	h.all[i], h.all[j] = h.all[j], h.all[i]
	*h.at(h.all[i]), *h.at(h.all[j]) = i, j
}
