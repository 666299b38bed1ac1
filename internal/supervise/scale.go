package supervise

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
)

// Seats give each child that Scale starts something of its own. They are called under the
// Supervisor's lock: they must not block or call it.
type Seats interface {
	// Take returns further arguments of a child, for all its starts, or why there is nothing for it.
	Take(role, name string) (args []string, err error)
	// Give takes back what a child had, which has ended for good, or never began.
	Give(name string)
}

// Scaled lists a role's children by what Scale did to them.
type Scaled struct {
	Added   []string `json:"added"`
	Removed []string `json:"removed"`
	Kept    []string `json:"kept"`
}

// Scale starts or drains children until n of each role in want are wanted, and returns at once. All
// that have the role now count, except those asked to end. The least useful go first, then those that
// began in another role, then those with the highest index. An index and a seat are free again when
// their process has exited. leaves, if not nil, is told the name of each that goes, before that one
// knows. After an error nothing has changed.
func (s *Supervisor) Scale(want map[string]int, leaves func(name string)) (map[string]Scaled, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.scale(want, leaves)
}

// ScaleBy is Scale of one role to so many more than are wanted now or, below 0, so many fewer, but not
// to none.
func (s *Supervisor) ScaleBy(role string, by int) (Scaled, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	done, err := s.scale(map[string]int{role: max(1, len(s.wanted(role))+by)}, nil)
	return done[role], err
}

// change is what scale does to a role.
type change struct {
	role  string
	want  int
	has   []*child // the first to go first
	begin []seated
}

// seated is a child that is to begin.
type seated struct {
	Child
	seat []string
}

func (s *Supervisor) scale(want map[string]int, leaves func(name string)) (map[string]Scaled, error) {
	roles := slices.Sorted(maps.Keys(want))
	slices.Reverse(roles) // always in one order, as that decides who gets which seat: prefill first
	var changes []change
	for _, role := range roles {
		changes = append(changes, change{role: role, want: want[role], has: s.wanted(role)})
	}
	if err := s.prepare(changes); err != nil {
		for _, c := range changes {
			for _, b := range c.begin {
				s.give(b.Name)
			}
		}
		return nil, err
	}
	done := map[string]Scaled{}
	for _, c := range changes {
		d := Scaled{[]string{}, []string{}, []string{}} // JSON has lists, not null
		for _, ch := range c.has[:max(len(c.has)-c.want, 0)] {
			if leaves != nil {
				leaves(ch.Name)
			}
			ch.end()
			d.Removed = append(d.Removed, ch.Name)
		}
		for _, ch := range c.has[len(d.Removed):] {
			d.Kept = append(d.Kept, ch.Name)
		}
		for _, b := range c.begin {
			s.add(b.Child, b.seat)
			d.Added = append(d.Added, b.Name)
		}
		done[c.role] = d
	}
	return done, nil
}

// prepare finds the children that are to begin, and seats for them. After an error those that are
// listed have theirs.
func (s *Supervisor) prepare(changes []change) error {
	if s.stopping {
		return ErrStopping
	}
	total := len(s.children)
	for at := range changes {
		c := &changes[at]
		template := s.cfg.Templates[c.role]
		if template == nil {
			return fmt.Errorf("scale %s: no such role", c.role)
		}
		more := max(c.want-len(c.has), 0)
		if total += more; c.want < 0 || c.want > s.cfg.MaxChildren || more > 0 && total > s.cfg.MaxChildren {
			return fmt.Errorf("scale %s to %d: %w", c.role, c.want, ErrTooMany)
		}
		for i := 0; len(c.begin) < more; i++ {
			b := seated{Child: template(i)}
			if i > 2*s.cfg.MaxChildren {
				return fmt.Errorf("scale %s to %d: %s: names repeat", c.role, c.want, b.Name)
			}
			if s.children[b.Name] != nil || s.cfg.Taken != nil && s.cfg.Taken(b.Name) {
				continue
			}
			if s.cfg.Seats != nil {
				var err error
				if b.seat, err = s.cfg.Seats.Take(c.role, b.Name); err != nil {
					return err
				}
			}
			c.begin = append(c.begin, b)
		}
	}
	return nil
}

// give takes a child's seat back.
func (s *Supervisor) give(name string) {
	if s.cfg.Seats != nil {
		s.cfg.Seats.Give(name)
	}
}

// wanted returns the children of a role that were not asked to end, the first to go first.
func (s *Supervisor) wanted(role string) []*child {
	var out []*child
	use, strange := map[*child]Use{}, map[*child]int{}
	for _, ch := range s.children {
		now, u := s.cfg.Doing(ch.status)
		if now != role || ch.ending() {
			continue
		}
		if use[ch] = u; ch.Role != role {
			strange[ch] = -1
		}
		out = append(out, ch)
	}
	slices.SortFunc(out, func(a, b *child) int {
		return cmp.Or(cmp.Compare(use[a], use[b]), cmp.Compare(strange[a], strange[b]),
			cmp.Compare(len(b.Name), len(a.Name)), // worker-10 before worker-9
			cmp.Compare(b.Name, a.Name))
	})
	return out
}
