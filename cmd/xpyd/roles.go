package main

import (
	"slices"
	"sync"

	"github.com/xpyd/xpyd/internal/fleet"
)

// lastRoles are those in which the workers of an `up` ran last, as it or an operator gave them, so that a
// worker restarts in its own. Only what its own process announces counts: another process may have
// been started with its id by mistake.
type lastRoles struct {
	mu sync.Mutex
	of map[string]ran
}

// ran is the last that a process of ours announced.
type ran struct {
	pid  int
	role fleet.Role
}

// see notes m's role if it is the process pid.
func (r *lastRoles) see(m *fleet.Member, pid int) {
	if m == nil || m.PID != pid || m.State == fleet.Gone {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.of == nil {
		r.of = map[string]ran{}
	}
	r.of[m.ID] = ran{pid, m.Role}
}

// restart returns supervise.Child.Again of the worker id, which preserves the effect of orders across a
// crash: its role, and a drain. args are those of its first start. One goroutine calls it.
func (r *lastRoles) restart(w *fleet.Watcher, drained func(id string) bool, id string, args []string) func(pid int) (string, []string) {
	args = slices.Clone(args)
	return func(pid int) (string, []string) {
		r.see(w.Snapshot().Get(id), pid) // it may have changed a moment before its end
		r.mu.Lock()
		if last := r.of[id]; last.pid == pid {
			args[0] = string(last.role) // kept, in case the next process ends before it is heard
		}
		r.mu.Unlock()
		if drained(id) {
			return args[0], append(slices.Clone(args), "--drained")
		}
		return args[0], slices.Clone(args)
	}
}
