package limit

import (
	"math"
	"time"
)

// drain measures how fast a queue is served, in tokens a second, while anything waits. What
// is older than a few times drainMemory hardly counts.
type drain struct {
	cost, seconds float64
	n             int // services seen, up to drainLeast
	since         time.Time
	on            bool
}

const (
	drainMemory = 10 * time.Second
	drainLeast  = 4 // services before a rate is believed
)

// pass moves the measure on to now.
func (d *drain) pass(now time.Time) {
	if d.on {
		s := max(now.Sub(d.since).Seconds(), 0)
		fade := math.Exp(-s / drainMemory.Seconds())
		d.cost *= fade
		d.seconds = d.seconds*fade + s
	}
	d.since = now
}

// waits notes whether anything waits from now on.
func (d *drain) waits(now time.Time, on bool) {
	if d.on != on {
		d.pass(now)
		d.on = on
	}
}

func (d *drain) served(now time.Time, cost float64) {
	d.pass(now)
	d.cost += max(cost, 1)
	d.n = min(d.n+1, drainLeast)
}

// rate is in tokens a second; false while too little is known.
func (d *drain) rate(now time.Time) (float64, bool) {
	d.pass(now)
	if d.n < drainLeast || d.seconds <= 0 || d.cost <= 0 {
		return 0, false
	}
	return d.cost / d.seconds, true
}

// least is the shortest of recent durations, over at least leastWindow.
type least struct {
	now, before time.Duration // 0 is none
	since       time.Time
}

const leastWindow = 30 * time.Second

func (l *least) turn(now time.Time) {
	switch age := now.Sub(l.since); {
	case age >= 2*leastWindow:
		l.now, l.before, l.since = 0, 0, now
	case age >= leastWindow:
		l.now, l.before, l.since = 0, l.now, now
	}
}

func (l *least) add(now time.Time, d time.Duration) {
	l.turn(now)
	if d > 0 && (l.now == 0 || d < l.now) {
		l.now = d
	}
}

// get returns 0 if nothing was seen lately.
func (l *least) get(now time.Time) time.Duration {
	l.turn(now)
	if l.now == 0 || l.before != 0 && l.before < l.now {
		return l.before
	}
	return l.now
}
