package limit

// Tenants is how many are remembered, waiting or not.
func (q *Queue) Tenants() int {
	n := 0
	for i := range q.classes {
		n += len(q.classes[i].flows)
	}
	return n
}
