package sim

import "time"

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
	c.queue.push(event{c.now + max(d, 0), c.made, do})
}

// next runs the next event; false if there is none.
func (c *clock) next() bool {
	if len(c.queue) == 0 {
		return false
	}
	e := c.queue.pop()
	c.now = e.at
	e.do()
	return true
}

// events is a heap, the first event on top. container/heap would allocate each event.
type events []event

func (e events) before(i, j int) bool {
	return e[i].at < e[j].at || e[i].at == e[j].at && e[i].nth < e[j].nth
}

func (e *events) push(x event) {
	*e = append(*e, x)
	q := *e
	for i := len(q) - 1; i > 0; {
		up := (i - 1) / 2
		if !q.before(i, up) {
			break
		}
		q[i], q[up] = q[up], q[i]
		i = up
	}
}

func (e *events) pop() event {
	q := *e
	first, last := q[0], len(q)-1
	q[0], q[last] = q[last], event{}
	q = q[:last]
	for i := 0; ; {
		least := i
		for _, k := range [2]int{2*i + 1, 2*i + 2} {
			if k < len(q) && q.before(k, least) {
				least = k
			}
		}
		if least == i {
			break
		}
		q[i], q[least] = q[least], q[i]
		i = least
	}
	*e = q
	return first
}
