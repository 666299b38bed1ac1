package sense

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/scarce"
	"github.com/xpyd/xpyd/router/h1"
)

// Suspect looks at a worker whose connection broke: if it takes no new one it
// is reported dead. A single broken connection does not condemn it.
func (ms *Members) Suspect(inst *fleet.Instance, err error) {
	if scarce.Ours(err) || errors.Is(err, ErrRefusesUs) {
		return
	}
	if errors.Is(err, syscall.ECONNREFUSED) {
		ms.Fleet.ReportDead(inst.ID, inst.Epoch, err.Error())
		return
	}
	ms.knock(inst, func(derr error) {
		if derr != nil {
			ms.Fleet.ReportDead(inst.ID, inst.Epoch, fmt.Sprintf("%v, then %v", err, derr))
		}
	})
}

// knock connects to a worker and tells then whether it took the connection;
// while one knock is out others are dropped. A slow answer is no answer. What the
// router lacks for a connection says nothing, and then is not told.
func (ms *Members) knock(inst *fleet.Instance, then func(error)) {
	addr, err := h1.Address(inst.URL)
	if err != nil {
		return
	}
	key := fmt.Sprintf("%s/%d", inst.ID, inst.Epoch)
	ms.mu.Lock()
	busy := ms.knocks[key]
	ms.knocks[key] = true
	ms.mu.Unlock()
	if busy {
		return
	}
	done := func() {
		ms.mu.Lock()
		defer ms.mu.Unlock()
		delete(ms.knocks, key)
	}
	if !ms.Spawn(func() {
		defer done()
		ctx, cancel := context.WithTimeout(ms.Ctx, 500*time.Millisecond)
		defer cancel()
		conn, err := ms.Client.Dialer.DialContext(ctx, "tcp", h1.Bare(addr))
		if err == nil {
			conn.Close()
		}
		if ms.Ctx.Err() == nil && !scarce.Ours(err) {
			then(err)
		}
	}) {
		done()
	}
}

// Knocking reports whether a connection is being tried.
func (ms *Members) Knocking() bool {
	ms.mu.Lock()
	defer ms.mu.Unlock()
	return len(ms.knocks) > 0
}

// ReviveEvery is how often dead members that do not announce themselves are
// tried.
const ReviveEvery = 2 * time.Second

// Revive tries them, each on its own goroutine and one at a time.
func (ms *Members) Revive() {
	rev, ok := ms.Fleet.(Reviver)
	if !ok {
		return
	}
	s := ms.Fleet.Snapshot()
	for i := range s.Members {
		if m := &s.Members[i]; m.State == fleet.Dead && m.Source != fleet.NATS {
			ms.knock(&m.Instance, func(err error) {
				if err == nil {
					rev.ReportAlive(m.ID, m.Epoch)
				}
			})
		}
	}
}
