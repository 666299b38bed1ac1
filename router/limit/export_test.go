package limit

// Tenants is how many are remembered, waiting or not.
func (q *Queue) Tenants() int {
	n := 0
	for i := range q.classes {
		n += len(q.classes[i].flows)
	}
	return n
}

// Limits that are in force.
func (g *Gate) Limits() Limits { return *g.limits.Load() }

// Running is how many requests were taken and not released.
func (a *Account) Running() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.running
}
