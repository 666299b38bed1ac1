package router

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/scarce"
)

// suspect looks at a worker whose connection broke: if it takes no new one it
// is reported dead. A single broken connection does not condemn it.
func (r *Router) suspect(inst *fleet.Instance, err error) {
	if scarce.Ours(err) || errors.Is(err, errRefusesUs) {
		return
	}
	if errors.Is(err, syscall.ECONNREFUSED) {
		r.fleet.ReportDead(inst.ID, inst.Epoch, err.Error())
		return
	}
	r.knock(inst, func(derr error) {
		if derr != nil {
			r.fleet.ReportDead(inst.ID, inst.Epoch, fmt.Sprintf("%v, then %v", err, derr))
		}
	})
}

// knock connects to a worker and tells then whether it took the connection;
// while one knock is out others are dropped. A slow answer is no answer. What the
// router lacks for a connection says nothing, and then is not told.
func (r *Router) knock(inst *fleet.Instance, then func(error)) {
	addr, err := hostPort(inst.URL)
	if err != nil {
		return
	}
	key := fmt.Sprintf("%s/%d", inst.ID, inst.Epoch)
	r.mu.Lock()
	busy := r.knocks[key]
	r.knocks[key] = true
	r.mu.Unlock()
	if busy {
		return
	}
	done := func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.knocks, key)
	}
	if !r.spawn(func() {
		defer done()
		ctx, cancel := context.WithTimeout(r.ctx, 500*time.Millisecond)
		defer cancel()
		conn, err := r.up.dialer.DialContext(ctx, "tcp", bare(addr))
		if err == nil {
			conn.Close()
		}
		if r.ctx.Err() == nil && !scarce.Ours(err) {
			then(err)
		}
	}) {
		done()
	}
}
