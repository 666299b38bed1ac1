package sim

import (
	"container/heap"
	"time"
)

// clock is virtual time. Events run one after the other, in the order of their times and, at the
// same time, of their making: nothing else decides, so a run repeats.
type clock struct {
	now   time.Duration // since the start
	queue events
	made  uint64
}

type event struct {
	at  time.Duration
	nth uint64
	do  func()
}

// start is when runs begin: any fixed time will do.
var start = time.Unix(1_000_000_000, 0).UTC()

// time is the time as code that takes a clock sees it.
func (c *clock) time() time.Time { return start.Add(c.now) }

// after runs do in some time.
func (c *clock) after(d time.Duration, do func()) {
	c.made++
	heap.Push(&c.queue, event{c.now + max(d, 0), c.made, do})
}

// next runs the next event; false if there is none.
func (c *clock) next() bool {
	if len(c.queue) == 0 {
		return false
	}
	e := heap.Pop(&c.queue).(event)
	c.now = e.at
	e.do()
	return true
}

type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return e[i].at < e[j].at || e[i].at == e[j].at && e[i].nth < e[j].nth
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	last := len(*e) - 1
	x := (*e)[last]
	(*e)[last] = event{}
	*e = (*e)[:last]
	return x
}
