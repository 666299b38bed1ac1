package pick_test

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router/pick"
)

// sim is a fleet in simulated time: prefill computes one prompt after another
// at its own speed and caches whole prefixes, decode runs sequences side by
// side. It is deterministic: one seed, no clock.
type sim struct {
	p    *pick.Picker
	snap *fleet.Snapshot
	now  float64 // seconds
	todo events
	free map[string]float64 // when a prefill is done with what it has
	rate map[string]float64 // its tokens a second
	warm map[string]map[int]bool
	ttft []float64
	hits int
}

type event struct {
	at float64
	do func()
}

type events []event

func (e events) Len() int           { return len(e) }
func (e events) Less(i, j int) bool { return e[i].at < e[j].at }
func (e events) Swap(i, j int)      { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)        { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	last := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]
	return last
}

func (s *sim) after(d float64, do func()) { heap.Push(&s.todo, event{s.now + d, do}) }

// request is one prompt of a family, of which families share their first
// tokens.
func (s *sim) request(t *testing.T, family int, rnd *rand.Rand) {
	const shared, own, output = 3000, 300, 100
	text := strings.Repeat(fmt.Sprintf("family %03d ", family), shared*4/11)
	own1 := fmt.Sprintf("%d", rnd.Uint64())
	req := &pick.Request{Model: "m", Tokens: shared + own, Output: output, Seqs: 1, Tokenized: true, Session: fmt.Sprint(family),
		Chain: pick.NewChain([]byte(text + strings.Repeat(own1, own*4/len(own1))))}
	for id, families := range s.warm {
		if families[family] {
			req.Warm = append(req.Warm, pick.Warm{ID: id, Epoch: 1, Tokens: shared})
		}
	}
	slices.SortFunc(req.Warm, func(a, b pick.Warm) int { return strings.Compare(a.ID, b.ID) })
	c, err := s.p.Pick(pick.View{Snapshot: s.snap}, req)
	if err != nil {
		t.Fatal(err)
	}
	id, work := c.Prefill.ID, float64(shared+own)
	if s.warm[id][family] {
		work -= shared
		s.hits++
	}
	if s.warm[id] == nil {
		s.warm[id] = map[int]bool{}
	}
	s.warm[id][family] = true
	start := s.now
	s.free[id] = max(s.free[id], s.now) + work/s.rate[id]
	s.after(s.free[id]-s.now, func() {
		c.EndPrefill()
		took := time.Duration((s.now - start) * 1e9)
		c.Answered(took, took+5*time.Millisecond)
		s.ttft = append(s.ttft, s.now-start)
		s.after(output*0.02, c.EndDecode)
	})
}

// simulate sends requests at random times and returns the mean and the 99th
// percentile of the time to the first token.
func simulate(t *testing.T, policy string) (mean, p99 float64, hits int) {
	cfg := pick.DefaultConfig()
	cfg.Policy = policy
	rnd := rand.New(rand.NewPCG(11, 12))
	s := &sim{p: pick.New(cfg, rand.New(rand.NewPCG(1, 2))), free: map[string]float64{}, rate: map[string]float64{}, warm: map[string]map[int]bool{}}
	var members []fleet.Member
	for i := range 8 {
		id := fmt.Sprintf("p%d", i)
		s.rate[id] = 20_000
		if i < 2 {
			s.rate[id] = 5_000 // two are of an older generation
		}
		members = append(members, member(id, fleet.Prefill, func(m *fleet.Member) { m.KVEvents = "h:1" }), member(fmt.Sprintf("d%d", i), fleet.Decode))
	}
	s.snap = fleet.NewSnapshot(1, time.Time{}, members)
	at := 0.0
	for range 4000 {
		at += rnd.ExpFloat64() / 60 // requests a second
		family := rnd.IntN(40)
		heap.Push(&s.todo, event{at, func() { s.request(t, family, rnd) }})
	}
	for s.todo.Len() > 0 {
		e := heap.Pop(&s.todo).(event)
		s.now = e.at
		e.do()
	}
	sum := 0.0
	for _, v := range s.ttft {
		sum += v
	}
	slices.Sort(s.ttft)
	for i := range 8 {
		for _, id := range []string{fmt.Sprintf("p%d", i), fmt.Sprintf("d%d", i)} {
			if l := s.p.Loads(id, 1); l != (pick.Loads{}) {
				t.Errorf("%s: %s still holds %+v", policy, id, l)
			}
		}
	}
	return sum / float64(len(s.ttft)), s.ttft[len(s.ttft)*99/100], s.hits
}

// TestSimulation compares the policies on one and the same traffic, with
// prompts of 40 families and prefill workers of two speeds.
func TestSimulation(t *testing.T) {
	mean, p99 := map[string]float64{}, map[string]float64{}
	for _, policy := range pick.Policies {
		m, p, hits := simulate(t, policy)
		mean[policy], p99[policy] = m, p
		t.Logf("%-16s ttft mean %6.1f ms, p99 %7.1f ms, %4d of 4000 warm", policy, m*1000, p*1000, hits)
		again, _, _ := simulate(t, policy)
		if again != m {
			t.Errorf("%s: %v, then %v", policy, m, again)
		}
	}
	better := func(a, b string) {
		if mean[a] > mean[b] {
			t.Errorf("%s (%.1f ms) is worse than %s (%.1f ms)", a, mean[a]*1000, b, mean[b]*1000)
		}
	}
	better(pick.PowerOfTwo, pick.Random)
	better(pick.LeastLoaded, pick.RoundRobin)
	better(pick.LeastLoaded, pick.Random)
	better(pick.KVEvents, pick.LeastLoaded)
	better(pick.KVEvents, pick.Session)
	better(pick.PredictedTTFT, pick.KVEvents) // it knows the slow ones
	if p99[pick.PredictedTTFT] > p99[pick.LeastLoaded] {
		t.Errorf("p99 %.1f ms, least loaded %.1f", p99[pick.PredictedTTFT]*1000, p99[pick.LeastLoaded]*1000)
	}
}
