package main

import (
	"slices"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/supervise"
)

// doing returns what a worker of `up` does now: an order may have drained it or changed its role.
func doing(front *front) func(supervise.Status) (string, supervise.Use) {
	w, r := front.watcher, front.router
	return func(s supervise.Status) (string, supervise.Use) {
		m := w.Snapshot().Get(s.Name)
		if m == nil || s.PID == 0 || m.PID != s.PID || m.State == fleet.Dead || m.State == fleet.Gone {
			if r.Drained(s.Name) {
				return s.Role, supervise.Idle
			}
			return s.Role, supervise.Coming
		}
		switch {
		case m.Draining || r.Drained(m.ID):
			return string(m.Role), supervise.Idle
		case !r.Serves(m):
			return string(m.Role), supervise.Coming
		}
		return string(m.Role), supervise.Working
	}
}

// again preserves the effect of orders on a worker across a crash: its role, and a drain. args are
// those of its first start. One goroutine calls it.
func again(front *front, id string, args []string) func() (string, []string) {
	w, r := front.watcher, front.router
	args = slices.Clone(args)
	return func() (string, []string) {
		if m := w.Snapshot().Get(id); m != nil && m.State != fleet.Gone {
			args[0] = string(m.Role) // kept, in case the fleet forgets the worker before it is back
		}
		if r.Drained(id) {
			return args[0], append(slices.Clone(args), "--drained")
		}
		return args[0], slices.Clone(args)
	}
}
