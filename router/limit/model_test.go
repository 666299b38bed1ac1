package limit_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/xpyd/xpyd/router/limit"
)

// modelFlow, modelClass and model are Queue without anything that makes it fast: each decision looks
// at everybody.
type modelFlow struct {
	weight, tag float64
	items       []*limit.Item
}

type modelClass struct {
	tag, now float64
	flows    map[string]*modelFlow
}

type model struct {
	b       limit.Bounds
	now     float64
	classes [limit.Classes]modelClass
}

// most is the most that a request counts as, and that corrections put somebody ahead.
const most = 1 << 20

func (m *model) sum(f func(*limit.Item) float64) (n float64) {
	for _, c := range m.classes {
		for _, fl := range c.flows {
			for _, it := range fl.items {
				n += f(it)
			}
		}
	}
	return n
}

func (c *modelClass) waits() (n int) {
	for _, f := range c.flows {
		n += len(f.items)
	}
	return n
}

func count(*limit.Item) float64     { return 1 }
func bytes(it *limit.Item) float64  { return float64(it.Bytes) }
func costOf(it *limit.Item) float64 { return it.Cost }
func near(a, b float64) bool        { return math.Abs(a-b) <= 1e-9*max(math.Abs(a), math.Abs(b), 1) }
func (m *model) full(n float64) bool {
	return m.sum(count) >= float64(m.b.Items) || m.sum(bytes)+n > float64(m.b.Bytes)
}

func (m *model) flow(it *limit.Item) *modelFlow {
	c := &m.classes[it.Class]
	if c.flows == nil {
		c.flows = map[string]*modelFlow{}
	}
	if c.flows[it.Tenant] == nil {
		c.flows[it.Tenant] = &modelFlow{}
	}
	f := c.flows[it.Tenant]
	if f.weight = it.Weight; f.weight == 0 {
		f.weight = 1
	}
	return f
}

func (m *model) share(class limit.Class, f *modelFlow, more int, bytes int64) float64 {
	held := bytes
	for _, it := range f.items {
		held += it.Bytes
	}
	part := max(float64(len(f.items)+more)/float64(m.b.Items), float64(held)/float64(m.b.Bytes))
	return part / (f.weight * m.b.Weights[class])
}

// push checks a Push against what each decision of it should have been.
func (m *model) push(it *limit.Item, displaced []*limit.Item, ok bool) error {
	c, f := &m.classes[it.Class], m.flow(it)
	var gone []*limit.Item
	back := func() {
		for _, o := range slices.Backward(gone) {
			fl := m.classes[o.Class].flows[o.Tenant]
			fl.items = append(fl.items, o)
		}
	}
	for m.full(float64(it.Bytes)) {
		worst := 0.0
		for class := range m.classes {
			for _, fl := range m.classes[class].flows {
				if len(fl.items) > 0 {
					worst = max(worst, m.share(limit.Class(class), fl, 0, 0))
				}
			}
		}
		if it.Bytes > m.b.Bytes || worst <= m.share(it.Class, f, 1, it.Bytes) {
			if back(); ok || len(displaced) > 0 {
				return fmt.Errorf("accepted, %d displaced: the worst share is %v", len(displaced), worst)
			}
			return nil
		}
		if !ok { // which ones it tried cannot be seen: the same ones, unless some are equal
			for class := range m.classes {
				for _, fl := range m.classes[class].flows {
					if n := len(fl.items); n > 0 && m.share(limit.Class(class), fl, 0, 0) == worst {
						gone, fl.items, worst = append(gone, fl.items[n-1]), fl.items[:n-1], -1
					}
				}
			}
			continue
		}
		if len(displaced) == len(gone) {
			return fmt.Errorf("%d displaced, which is not enough", len(displaced))
		}
		o := displaced[len(gone)]
		fl := m.classes[o.Class].flows[o.Tenant]
		if n := len(fl.items); m.share(o.Class, fl, 0, 0) != worst || fl.items[n-1] != o {
			return fmt.Errorf("displaced %+v with a share of %v, the worst is %v", o, m.share(o.Class, fl, 0, 0), worst)
		}
		gone, fl.items = append(gone, o), fl.items[:len(fl.items)-1]
	}
	if !ok || len(displaced) != len(gone) {
		return fmt.Errorf("accepted %t, %d displaced, want %d", ok, len(displaced), len(gone))
	}
	if c.waits() == 0 {
		c.tag = max(c.tag, m.now)
	}
	if len(f.items) == 0 {
		f.tag = max(f.tag, c.now)
	}
	f.items = append(f.items, it)
	return nil
}

// pop checks that a request was the next.
func (m *model) pop(it *limit.Item) error {
	class, least := -1, math.Inf(1)
	for i := range m.classes {
		if c := &m.classes[i]; c.waits() > 0 && c.tag < least {
			class, least = i, c.tag
		}
	}
	if it == nil || class < 0 {
		if it != nil || class >= 0 {
			return fmt.Errorf("%+v of class %d", it, class)
		}
		return nil
	}
	c := &m.classes[class]
	first := math.Inf(1)
	for _, f := range c.flows {
		if len(f.items) > 0 {
			first = min(first, f.tag)
		}
	}
	f := c.flows[it.Tenant]
	if int(it.Class) != class || f.items[0] != it || !near(f.tag, first) {
		return fmt.Errorf("%+v, of class %d with tag %v, before %v", it, class, f.tag, first)
	}
	m.now, c.now = c.tag, f.tag
	c.tag += max(it.Cost, 1) / m.b.Weights[class]
	f.tag += max(it.Cost, 1) / f.weight
	f.items = f.items[1:]
	return nil
}

func (m *model) settle(tenant string, class limit.Class, more float64) {
	c := &m.classes[class]
	f := c.flows[tenant]
	to := func(tag, now, weight float64, waits bool) float64 {
		tag = min(tag+more/weight, max(tag, now+most/weight))
		if waits {
			tag = max(tag, now)
		}
		return tag
	}
	f.tag = to(f.tag, c.now, f.weight, len(f.items) > 0)
	c.tag = to(c.tag, m.now, m.b.Weights[class], c.waits() > 0)
}

func (m *model) ahead(it *limit.Item) float64 {
	c := &m.classes[it.Class]
	weight := it.Weight
	if weight == 0 {
		weight = 1
	}
	classes, tenants, own, mine := 0.0, 0.0, 0.0, false
	for i := range m.classes {
		if limit.Class(i) == it.Class || m.classes[i].waits() > 0 {
			classes += m.b.Weights[i]
		}
	}
	for name, f := range c.flows {
		if len(f.items) == 0 {
			continue
		}
		tenants += f.weight
		if name == it.Tenant {
			mine = true
			for _, o := range f.items {
				own += o.Cost
			}
		}
	}
	if !mine {
		tenants += weight
	}
	share := m.b.Weights[it.Class] / classes * min(weight/tenants, 1)
	return min(m.sum(costOf), own/share) + it.Cost
}

// TestModel: who is served next, who is displaced and how long a wait is expected are what a plain
// rendering of the rules says, whatever comes, leaves and is corrected.
func TestModel(t *testing.T) {
	for seed := range uint64(40) {
		rnd := rand.New(rand.NewPCG(seed, 3))
		m := &model{b: limit.Bounds{Items: 1 + rnd.IntN(20), Bytes: 1000 + int64(rnd.IntN(3000)), Weights: [limit.Classes]float64{16, 4, 1}}}
		q := limit.NewQueue(m.b)
		weights := make([]float64, 6)
		fail := func(step int, what string, err error) {
			t.Helper()
			if err != nil {
				t.Fatalf("seed %d, step %d, %s: %v", seed, step, what, err)
			}
		}
		var all []*limit.Item
		for step := range 600 {
			if step%200 == 0 {
				for i := range weights {
					weights[i] = float64(rnd.IntN(4))
				}
			}
			tenant := rnd.IntN(len(weights))
			it := &limit.Item{Tenant: fmt.Sprint(tenant), Weight: weights[tenant], Class: limit.Class(rnd.IntN(limit.Classes)),
				Cost: rnd.Float64() * 1000, Bytes: int64(rnd.IntN(900))}
			switch k := rnd.IntN(20); {
			case k < 11:
				out, ok := q.Push(it)
				fail(step, "push", m.push(it, out, ok))
				all = append(all, it)
			case k < 17:
				next := q.Pop()
				if fail(step, "pop", m.pop(next)); next != nil && rnd.IntN(2) == 0 {
					more := (rnd.Float64() - 0.5) * 2000
					if rnd.IntN(10) == 0 {
						more *= most
					}
					q.Settle(next.Tenant, next.Class, more)
					m.settle(next.Tenant, next.Class, more)
				}
			case k < 19 && len(all) > 0:
				gone := all[rnd.IntN(len(all))]
				if f := m.classes[gone.Class].flows[gone.Tenant]; f != nil && slices.Contains(f.items, gone) {
					q.Remove(gone)
					f.items = slices.DeleteFunc(slices.Clone(f.items), func(o *limit.Item) bool { return o == gone })
				}
			default:
				m.b.Weights = [limit.Classes]float64{1 + rnd.Float64(), 1, rnd.Float64() + 0.1}
				q.Set(m.b)
			}
			if got, want := q.Ahead(it), m.ahead(it); !near(got, want) {
				t.Fatalf("seed %d, step %d: %v tokens are ahead, want %v", seed, step, got, want)
			}
			if float64(q.Len()) != m.sum(count) || float64(q.Bytes()) != m.sum(bytes) || q.LenOf(it.Class) != m.classes[it.Class].waits() {
				t.Fatalf("seed %d, step %d: %d wait, with %d bytes", seed, step, q.Len(), q.Bytes())
			}
		}
	}
}
