package supervise

import "maps"

// Add starts one child by a Scale of a role that is only its.
func (s *Supervisor) Add(c Child) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	templates := s.cfg.Templates
	defer func() { s.cfg.Templates = templates }()
	s.cfg.Templates = maps.Clone(templates)
	if s.cfg.Templates == nil {
		s.cfg.Templates = map[string]func(int) Child{}
	}
	s.cfg.Templates[c.Role] = func(int) Child { return c }
	_, err := s.scale(map[string]int{c.Role: len(s.wanted(c.Role)) + 1}, nil)
	return err
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
