package sim

import (
	"slices"
	"time"

	"github.com/xpyd/xpyd/kernels"
)

// shared is one device for several workers, as processes share a GPU: their steps under way take turns
// in small parts, so each gets on by its part of the time.
type shared struct {
	clock *clock
	cost  float64 // times as long as steps take without turns
	busy  []*device
	at    time.Duration // until when they have got on
	armed uint64        // the event that ends a step; those before it are void
}

// launch begins a step, or queues it behind the same worker's.
func (s *shared) launch(d *device, step *kernels.Step) {
	s.advance()
	d.under = append(d.under, running{step: step, left: d.timer.Takes(step)})
	if len(d.under) == d.ended+1 {
		s.busy = append(s.busy, d)
		s.begin(d)
	}
	s.arm()
}

func (s *shared) begin(d *device) {
	r := &d.under[d.ended]
	r.begins, r.idleFrom = s.clock.now, d.free
}

// advance has all steps get on until now.
func (s *shared) advance() {
	for _, d := range s.busy {
		d.under[d.ended].left -= time.Duration(float64(s.clock.now-s.at) / s.slower())
	}
	s.at = s.clock.now
}

// slower is how many times as long a step takes as alone.
func (s *shared) slower() float64 {
	if n := len(s.busy); n > 1 {
		return float64(n) * s.cost
	}
	return 1
}

// arm makes the event of the next end.
func (s *shared) arm() {
	s.armed++
	if len(s.busy) == 0 {
		return
	}
	least := s.busy[0].under[s.busy[0].ended].left
	for _, d := range s.busy[1:] {
		least = min(least, d.under[d.ended].left)
	}
	nth := s.armed
	s.clock.after(time.Duration(float64(least)*s.slower()), func() {
		if nth == s.armed {
			s.end()
		}
	})
}

// end ends the steps that are through.
func (s *shared) end() {
	s.advance()
	rounding := time.Duration(s.slower()) + 1
	s.busy = slices.DeleteFunc(s.busy, func(d *device) bool {
		if r := &d.under[d.ended]; r.left > rounding {
			return false
		} else {
			r.ends, d.free = s.clock.now, s.clock.now
		}
		d.ended++
		if do := d.waiting; do != nil {
			d.waiting = nil
			s.clock.after(0, do)
		}
		if len(d.under) == d.ended {
			return true
		}
		s.begin(d)
		return false
	})
	s.arm()
}
