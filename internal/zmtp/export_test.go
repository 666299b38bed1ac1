package zmtp

// Dropped returns how many messages were lost on slow subscribers.
func (p *Publisher) Dropped() uint64 { return p.dropped.Load() }
