package router

import (
	"container/list"
	"context"
	"sync"
	"time"

	"github.com/xpyd/xpyd/internal/openai"
)

// gate admits requests: so many run, so many more wait in order of arrival,
// the rest are refused.
type gate struct {
	mu      sync.Mutex
	limits  Limits
	running int
	queue   list.List // of chan struct{}, closed when its owner may run
}

// enter waits for a place. The caller leaves once for each nil error.
func (g *gate) enter(ctx context.Context) *openai.Error {
	g.mu.Lock()
	lim := g.limits
	if g.running < lim.MaxInFlight && g.queue.Len() == 0 {
		g.running++
		g.mu.Unlock()
		return nil
	}
	if g.queue.Len() >= lim.MaxQueue {
		g.mu.Unlock()
		return openai.TooMany("%d requests are running and %d are waiting; try again later", lim.MaxInFlight, lim.MaxQueue)
	}
	turn := make(chan struct{})
	place := g.queue.PushBack(turn)
	g.mu.Unlock()

	timer := time.NewTimer(lim.QueueWait)
	defer timer.Stop()
	var err *openai.Error
	select {
	case <-turn:
		return nil
	case <-timer.C:
		err = openai.Unavailable("no place became free within %v; try again later", lim.QueueWait)
	case <-ctx.Done():
		err = contextError(ctx)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	select {
	case <-turn: // it came at the last moment: pass it on
		g.running--
		g.admit()
	default:
		g.queue.Remove(place)
	}
	return err
}

// leave gives a place back.
func (g *gate) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.running--
	g.admit()
}

// admit lets waiters run while there are places; g.mu is held.
func (g *gate) admit() {
	for g.running < g.limits.MaxInFlight && g.queue.Len() > 0 {
		turn := g.queue.Remove(g.queue.Front()).(chan struct{})
		g.running++
		close(turn)
	}
}

// set changes the limits; more places are given out at once.
func (g *gate) set(l Limits) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.limits = l
	g.admit()
}

func (g *gate) get() Limits {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.limits
}

func (g *gate) counts() (running, waiting int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.running, g.queue.Len()
}
