package engine

import (
	"testing"
	"time"
)

// TestPromisesCost: promises of requests cost the plan of a step no allocation, however many wait.
func TestPromisesCost(t *testing.T) {
	e := &Engine{now: time.Now, own: 1}
	e.pace.rates = []float64{1000}
	list := make([]*sequence, 256)
	for i := range list {
		h := &Handle{e: e, req: &Request{Prompt: make([]int32, 50)}, unread: make([]int, 1), arrived: time.Now().Add(-time.Duration(i*37%256) * time.Millisecond)}
		h.promise = Promise{TTFT: time.Duration(i%3) * 100 * time.Millisecond, TPOT: time.Duration(i%4) * time.Millisecond}
		list[i] = &sequence{h: h, tokens: h.req.Prompt, computed: i % 2 * 49}
	}
	e.running = list
	waiting := make([]*sequence, len(list))
	if n := testing.AllocsPerRun(100, func() {
		copy(waiting, list)
		e.tpot = e.strictest()
		e.room(e.byPromise(waiting))
	}); n > 0 {
		t.Errorf("%v allocations", n)
	}
	if e.tpot != time.Millisecond || len(e.behind) == 0 || len(e.behind) == len(list) {
		t.Errorf("the strictest gap is %v, %d of %d prompts are late: the case shows nothing", e.tpot, len(e.behind), len(list))
	}
}
