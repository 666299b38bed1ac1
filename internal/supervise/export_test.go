package supervise

// Add starts one child, as Scale starts several.
func (s *Supervisor) Add(c Child) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.add(c)
}

// Remove drains one child. It reports whether there is one.
func (s *Supervisor) Remove(name string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	ch := s.children[name]
	if ch != nil {
		ch.end()
	}
	return ch != nil
}
