package flight

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
)

const ms = time.Millisecond

// scales compares workers whose streams have such gaps.
type scales struct {
	*balance
	t *testing.T
}

func newScales(t *testing.T, edit ...func(*Balance)) *scales {
	c := DefaultBalance()
	for _, e := range edit {
		e(&c)
	}
	return &scales{&balance{cfg: c}, t}
}

// gapsOf are of workers d0, d1…, with 8 streams each.
func gapsOf(medians ...time.Duration) (list []gap) {
	for i, m := range medians {
		list = append(list, gap{&fleet.Instance{ID: fmt.Sprintf("d%d", i), Epoch: 1, Dialect: fleet.Native, Model: "m"}, m, 8, true})
	}
	return list
}

// want compares, and checks who is to lose a stream, to whom.
func (s *scales) want(what string, gaps []gap, want map[string]string) {
	s.t.Helper()
	s.judge(slices.Clone(gaps))
	got := map[string]string{}
	for i := range gaps {
		if o := s.order(gaps[i].inst); o != nil {
			got[gaps[i].inst.ID] = o.to
		}
	}
	if !maps.Equal(got, want) {
		s.t.Errorf("%s: %v, want %v", what, got, want)
	}
}

// moves takes the orders there are, as streams do.
func (s *scales) moves() {
	for _, o := range *s.orders.Load() {
		o.take()
	}
}

// TestBalanceHysteresis: a worker must be slow for some comparisons to lose streams, and loses them
// until it is about as fast as the others.
func TestBalanceHysteresis(t *testing.T) {
	s := newScales(t)
	none, one := map[string]string{}, map[string]string{"d0": "d1"}
	slow := gapsOf(14*ms, 10*ms, 11*ms)
	for range 2 {
		s.want("not for long", slow, none)
	}
	s.want("again like the others", gapsOf(13*ms, 10*ms, 11*ms), none)
	for range 2 {
		s.want("anew", slow, none)
	}
	s.want("slow", slow, one)
	if o := s.order(&fleet.Instance{ID: "d0", Epoch: 2}); o != nil {
		t.Errorf("another run of it is to lose a stream to %s", o.to)
	}
	s.moves()
	s.want("still slow", slow, one)
	s.want("nothing to gain", gapsOf(12*ms, 10*ms, 10*ms), none)
	s.want("slow as before", slow, one)
	s.want("fast enough", gapsOf(11*ms, 10*ms, 11*ms), none)
	s.want("slow from the first", slow, none)
}

// TestBalanceShare: within a while a worker loses a share of its streams, taken or not yet.
func TestBalanceShare(t *testing.T) {
	s := newScales(t, func(c *Balance) { c.Windows = 1 })
	slow := gapsOf(20*ms, 10*ms)
	lost := 0
	for range balanceRenews {
		s.judge(slices.Clone(slow))
		if s.order(slow[0].inst) != nil {
			lost++
			s.moves()
		}
	}
	if lost != 2 {
		t.Errorf("%d of 8 streams", lost)
	}
	s.want("after a while", slow, map[string]string{"d0": "d1"})
	for range 2 * balanceRenews {
		s.want("nobody takes it", slow, map[string]string{"d0": "d1"})
	}
}

// TestBalanceNot: nothing moves that would not gain, or has nowhere to go; two do not go to one
// place at a time.
func TestBalanceNot(t *testing.T) {
	none := map[string]string{}
	edit := func(list []gap, f func(list []gap)) []gap {
		f(list)
		return list
	}
	for name, c := range map[string]struct {
		gaps []gap
		want map[string]string
	}{
		"alone":                   {gapsOf(90 * ms), none},
		"too little to notice":    {gapsOf(2900*time.Microsecond, ms), none},
		"of other numerics":       {edit(gapsOf(90*ms, 10*ms), func(l []gap) { l[1].inst.Numerics = "other" }), none},
		"of another model":        {edit(gapsOf(90*ms, 10*ms), func(l []gap) { l[1].inst.Model = "other" }), none},
		"of a dialect that stays": {edit(gapsOf(90*ms, 10*ms), func(l []gap) { l[1].inst.Dialect = "openai" }), none},
		"the fast takes none":     {edit(gapsOf(90*ms, 10*ms), func(l []gap) { l[1].takes = false }), none},
		"its only stream":         {edit(gapsOf(90*ms, 10*ms), func(l []gap) { l[0].streams = 1 }), none},
		"those that take are slow, too": {edit(gapsOf(90*ms, 10*ms, 80*ms, 10*ms), func(l []gap) { l[1].takes, l[3].takes = false, false }),
			none},
		"two are slow":           {gapsOf(50*ms, 60*ms, 10*ms, 12*ms, 11*ms, 10*ms), map[string]string{"d0": "d2", "d1": "d5"}},
		"two, and one place":     {edit(gapsOf(50*ms, 60*ms, 10*ms, 12*ms, 11*ms), func(l []gap) { l[3].takes, l[4].takes = false, false }), map[string]string{"d0": "d2"}},
		"the median is not mean": {gapsOf(12*ms, 10*ms, 10*ms, 500*ms), map[string]string{"d3": "d1"}},
	} {
		newScales(t, func(c *Balance) { c.Windows = 1 }).want(name, c.gaps, c.want)
	}
}

// TestGaps: a stream's gap is what its worker makes it wait for between two runs of events; of a
// stream that mostly waits for its client, or has come just now, nothing is known.
func TestGaps(t *testing.T) {
	r := &legs{open: map[*leg]struct{}{}}
	open := func(id string) *leg {
		l := newLeg(fleet.Decode, &fleet.Instance{ID: id, Epoch: 1}, 1)
		r.add(l)
		return l
	}
	one, two, three := open("d0"), open("d0"), open("d0")
	client, stands := open("d1"), open("d2")
	for _, l := range []*leg{one, two, three, stands} {
		l.waits.Add(1)
	}
	const ticks = 10
	interval := func() []gap {
		for range ticks {
			one.waits.Add(2)
			two.waits.Add(4)
			three.waits.Add(40)
			client.waits.Add(2)
			r.sample()
		}
		return r.gaps(ticks)
	}
	check := func(want string) {
		t.Helper()
		var got []string
		for _, g := range interval() {
			got = append(got, fmt.Sprint(g.inst.ID, " ", g.median, " ", g.streams))
		}
		if all := strings.Join(got, ", "); all != want {
			t.Errorf("%s, want %s", all, want)
		}
	}
	check("d0 50ms 3, d2 1s 1")
	r.sample()
	open("d1").waits.Add(1)
	if got := r.gaps(ticks); got != nil {
		t.Errorf("too soon: %+v", got)
	}
	check("d0 50ms 3, d1 1s 1, d2 1s 1")
	late := open("d3")
	late.waits.Add(1)
	late.samples = -1 // it came after the first look
	check("d0 50ms 3, d1 1s 1, d2 1s 1")
}

// TestBalanceOff: it costs nothing then.
func TestBalanceOff(t *testing.T) {
	s := bareService(t)
	l := newLeg(fleet.Decode, &fleet.Instance{ID: "d0"}, 1)
	s.legs.add(l)
	for tick := range int32(100) {
		s.balanced(tick)
	}
	if l.samples != 0 {
		t.Error("legs are looked at")
	}
}

// TestReliefs: few streams leave a worker at a time, not all at once, and it is forgotten with its
// worker.
func TestReliefs(t *testing.T) {
	r := reliefs{by: map[workerKey]*relief{}}
	a, b := workerKey{"d0", 1}, workerKey{"d1", 1}
	now := time.Unix(1e6, 0)
	begins := func(k workerKey, after time.Duration, want bool) {
		t.Helper()
		if now = now.Add(after); r.begin(k, now) != want {
			t.Errorf("%v begins: %t", k, !want)
		}
	}
	begins(a, 0, true)
	begins(a, reliefEvery-1, false)
	begins(b, 0, true)
	begins(a, 1, true)
	begins(a, time.Hour, false)
	r.count(a, reasonBlocks)
	r.count(a, reasonBalance)
	r.count(a, reasonBlocks)
	r.end(a)
	begins(a, 0, true)
	s := &Service{reliefs: reliefs{by: r.by}}
	member := func(k workerKey) fleet.Member {
		return fleet.Member{Instance: fleet.Instance{ID: k.id, Epoch: k.epoch}}
	}
	m := member(a)
	if got := s.Moved(&m); got != (Moved{Shortage: 2, Balance: 1}) {
		t.Errorf("%+v", got)
	}
	s.reliefs.prune(fleet.NewSnapshot(1, now, []fleet.Member{member(a), member(workerKey{"d1", 2})}))
	if s.reliefs.by[a] == nil || s.reliefs.by[b] != nil {
		t.Errorf("%v", s.reliefs.by)
	}
	m = member(b)
	if got := s.Moved(&m); got != (Moved{}) {
		t.Errorf("%+v", got)
	}
	s.reliefs.end(b) // of one that is gone
	s.reliefs.count(b, reasonBalance)
	if len(s.reliefs.by) != 1 {
		t.Errorf("%v", s.reliefs.by)
	}
}
