package limit_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/xpyd/xpyd/router/limit"
)

var bounds = limit.Bounds{Items: 100_000, Bytes: 1 << 40, Weights: [limit.Classes]float64{16, 4, 1}}

func push(t *testing.T, q *limit.Queue, it *limit.Item) {
	t.Helper()
	if out, ok := q.Push(it); !ok || len(out) > 0 {
		t.Fatalf("%+v: %v, %d displaced", *it, ok, len(out))
	}
}

// TestOneTenantIsFirstComeFirstServed: with nothing configured there is one
// tenant and one class, and the queue is an ordinary one.
func TestOneTenantIsFirstComeFirstServed(t *testing.T) {
	q := limit.NewQueue(bounds)
	for i := range 100 {
		push(t, q, &limit.Item{Class: limit.Normal, Cost: float64(100 - i), Bytes: int64(i)})
	}
	for i := range 100 {
		if it := q.Pop(); it == nil || it.Bytes != int64(i) {
			t.Fatalf("%d: %+v", i, it)
		}
	}
	if q.Pop() != nil || q.Len() != 0 || q.Bytes() != 0 {
		t.Error("not empty")
	}
}

// TestALongQueueStarvesNobody: one tenant has 1,000 long requests waiting;
// another's next is always served before the second of those.
func TestALongQueueStarvesNobody(t *testing.T) {
	q := limit.NewQueue(bounds)
	for range 1000 {
		push(t, q, &limit.Item{Tenant: "greedy", Class: limit.Normal, Cost: 100_000})
	}
	for range 400 {
		push(t, q, &limit.Item{Tenant: "modest", Class: limit.Normal, Cost: 100})
		for others := 0; ; others++ {
			if others > 1 {
				t.Fatal("it waits for more than one of the others")
			}
			if q.Pop().Tenant == "modest" {
				break
			}
		}
	}
}

// TestShares: over any stretch in which two tenants always have something
// waiting, what each got over its weight differs by at most the largest
// request of both (Goyal, Vin and Cheng, theorem 1).
func TestShares(t *testing.T) {
	for seed := range uint64(12) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		q := limit.NewQueue(bounds)
		const tenants, most = 5, 1000
		weight, waits, got := [tenants]float64{}, [tenants]int{}, [tenants]float64{}
		for i := range weight {
			weight[i] = float64(1 + rnd.IntN(8))
		}
		since := map[[2]int][2]float64{} // what both had when both began to wait
		check := func() {
			for i := range tenants {
				for j := range i {
					pair := [2]int{i, j}
					if waits[i] == 0 || waits[j] == 0 {
						delete(since, pair)
						continue
					}
					had, ok := since[pair]
					if !ok {
						since[pair] = [2]float64{got[i], got[j]}
						continue
					}
					a, b := (got[i]-had[0])/weight[i], (got[j]-had[1])/weight[j]
					if math.Abs(a-b) > most/weight[i]+most/weight[j]+1e-6 {
						t.Fatalf("seed %d: tenants %d and %d got %.0f and %.0f", seed, i, j, a, b)
					}
				}
			}
		}
		for range 5000 {
			if i := rnd.IntN(tenants); rnd.IntN(100) < 48 || q.Len() == 0 {
				push(t, q, &limit.Item{Tenant: fmt.Sprint(i), Weight: weight[i], Class: limit.Normal, Cost: 1 + float64(rnd.IntN(most))})
				waits[i]++
			} else {
				it := q.Pop()
				var i int
				fmt.Sscan(it.Tenant, &i)
				waits[i]--
				got[i] += it.Cost
			}
			check()
		}
	}
}

// TestClasses: what waits always is served by the classes' weights, however
// many tenants a class has; a class that had nothing does not save up.
func TestClasses(t *testing.T) {
	q := limit.NewQueue(bounds)
	for i := range 1000 {
		push(t, q, &limit.Item{Tenant: "a", Class: limit.High, Cost: 10})
		push(t, q, &limit.Item{Tenant: fmt.Sprint(i % 10), Class: limit.Normal, Cost: 10})
		push(t, q, &limit.Item{Tenant: fmt.Sprint(i), Class: limit.Low, Cost: 10})
	}
	var got [limit.Classes]int
	for range 210 {
		got[q.Pop().Class]++
	}
	if got != [limit.Classes]int{160, 40, 10} {
		t.Errorf("%v", got)
	}
	q = limit.NewQueue(bounds)
	for range 100 {
		push(t, q, &limit.Item{Class: limit.Normal, Cost: 10})
		push(t, q, &limit.Item{Class: limit.Low, Cost: 10})
	}
	for range 50 {
		q.Pop()
	}
	push(t, q, &limit.Item{Class: limit.High, Cost: 10})
	if it := q.Pop(); it.Class != limit.High {
		t.Errorf("%v before a newcomer of the highest class", it.Class)
	}
	for range 100 {
		push(t, q, &limit.Item{Class: limit.High, Cost: 1})
	}
	got = [limit.Classes]int{}
	for range 100 {
		got[q.Pop().Class]++
	}
	if got[limit.High] > 97 || got[limit.High] < 75 {
		t.Errorf("%v", got)
	}
}

// TestDisplacement: a tenant that fills the queue does not keep others out; one that has
// no less in it than the others is refused.
func TestDisplacement(t *testing.T) {
	b := bounds
	b.Items, b.Bytes = 10, 1000
	q := limit.NewQueue(b)
	for i := range 10 {
		push(t, q, &limit.Item{Tenant: "greedy", Class: limit.Normal, Cost: 1, Bytes: int64(i)})
	}
	if out, ok := q.Push(&limit.Item{Tenant: "greedy", Class: limit.Normal}); ok || len(out) != 0 {
		t.Error("one more than there is room for")
	}
	for i := range 5 {
		out, ok := q.Push(&limit.Item{Tenant: "modest", Class: limit.Normal, Cost: 1})
		if !ok || len(out) != 1 || out[0].Tenant != "greedy" || out[0].Bytes != int64(9-i) {
			t.Fatalf("%d: %v %+v", i, ok, out)
		}
	}
	if out, ok := q.Push(&limit.Item{Tenant: "modest", Class: limit.Normal}); ok || len(out) != 0 {
		t.Error("more than half")
	}
	// A low class has its part of the room, and no more.
	n := 0
	for range 10 {
		if _, ok := q.Push(&limit.Item{Tenant: "low", Class: limit.Low, Cost: 1}); ok {
			n++
		}
	}
	if n != 1 || q.LenOf(limit.Low) != 1 {
		t.Errorf("%d of the lowest class, %d wait", n, q.LenOf(limit.Low))
	}
	// Bytes.
	if _, ok := q.Push(&limit.Item{Tenant: "big", Class: limit.High, Bytes: 1001}); ok {
		t.Error("more bytes than there may be")
	}
	if out, ok := q.Push(&limit.Item{Tenant: "big", Class: limit.High, Bytes: 1000}); ok || len(out) != 0 || q.Len() != 10 {
		t.Errorf("%v, %d displaced in vain, %d wait", ok, len(out), q.Len())
	}
	before := q.Bytes()
	if out, ok := q.Push(&limit.Item{Tenant: "big", Class: limit.High, Bytes: 100}); !ok || len(out) != 1 || q.Bytes() != before+100-out[0].Bytes {
		t.Errorf("%v, %d displaced, %d bytes", ok, len(out), q.Bytes())
	}
	b.Items = 0
	q.Set(b)
	if _, ok := q.Push(&limit.Item{Tenant: "x", Class: limit.High}); ok {
		t.Error("no room at all")
	}
}

// TestBounds: whatever happens, the queue holds no more than it may, nothing is
// lost or served twice, and tenants are forgotten.
func TestBounds(t *testing.T) {
	for seed := range uint64(4) {
		rnd := rand.New(rand.NewPCG(seed, 2))
		b := bounds
		b.Items, b.Bytes = 50, 5000
		q := limit.NewQueue(b)
		in, bytes := map[*limit.Item]bool{}, int64(0)
		out := func(it *limit.Item) {
			delete(in, it)
			bytes -= it.Bytes
		}
		for range 10_000 {
			switch k := rnd.IntN(10); {
			case k < 6:
				it := &limit.Item{Tenant: fmt.Sprint(rnd.IntN(5000)), Weight: rnd.Float64() * 4, Class: limit.Class(rnd.IntN(limit.Classes)),
					Cost: rnd.Float64() * 1000, Bytes: int64(rnd.IntN(300))}
				displaced, ok := q.Push(it)
				for _, o := range displaced {
					if !in[o] {
						t.Fatal("displaced what did not wait")
					}
					out(o)
				}
				if ok {
					in[it] = true
					bytes += it.Bytes
				}
			case k < 8:
				if it := q.Pop(); it != nil {
					if !in[it] {
						t.Fatal("served what did not wait")
					}
					out(it)
					q.Settle(it.Tenant, it.Class, (rnd.Float64()-0.5)*2000)
				} else if len(in) > 0 {
					t.Fatal("nobody is next")
				}
			case k < 9:
				for it := range in {
					q.Remove(it)
					out(it)
					break
				}
			default:
				b.Weights = [limit.Classes]float64{1 + rnd.Float64(), 1, rnd.Float64() + 0.1}
				q.Set(b)
			}
			if q.Len() != len(in) || q.Bytes() != bytes || q.Len() > b.Items || bytes > b.Bytes {
				t.Fatalf("%d of %d, %d bytes of %d", q.Len(), len(in), q.Bytes(), bytes)
			}
			if n := q.Tenants(); n > len(in)+3*1024 {
				t.Fatalf("%d tenants are remembered", n)
			}
		}
		for range in {
			if q.Pop() == nil {
				t.Fatal("lost")
			}
		}
	}
}

// TestWrongCosts: a number without bounds, a client's or an engine's, keeps
// neither its class nor its tenant waiting for long.
func TestWrongCosts(t *testing.T) {
	f := func(wrong func(q *limit.Queue), to limit.Item) {
		t.Helper()
		q := limit.NewQueue(bounds)
		wrong(q)
		to.Cost = 1000
		push(t, q, &to)
		for others := 0; ; others++ {
			push(t, q, &limit.Item{Tenant: "other", Class: limit.Low, Cost: 1000})
			push(t, q, &limit.Item{Tenant: "other", Class: limit.Normal, Cost: 1000})
			if it := q.Pop(); it.Tenant != "other" {
				return
			}
			if others > 2500 { // 1 Mi tokens of each class
				t.Fatal("it starves")
			}
		}
	}
	settle := func(more float64) func(*limit.Queue) {
		return func(q *limit.Queue) {
			for range 100 {
				push(t, q, &limit.Item{Tenant: "a", Class: limit.Normal, Cost: 1000})
				q.Pop()
				push(t, q, &limit.Item{Tenant: "a", Class: limit.Normal, Cost: 1000})
				q.Settle("a", limit.Normal, more)
				q.Pop()
			}
		}
	}
	f(settle(4294967295), limit.Item{Tenant: "a", Class: limit.Normal})
	f(settle(1e300), limit.Item{Tenant: "a", Class: limit.Normal})
	f(func(q *limit.Queue) {
		push(t, q, &limit.Item{Tenant: "a", Class: limit.Normal, Cost: 1e12})
		q.Pop()
	}, limit.Item{Tenant: "a", Class: limit.Normal})
}

// TestSettle: a tenant that was charged too little waits longer the next time.
func TestSettle(t *testing.T) {
	q := limit.NewQueue(bounds)
	for range 10 {
		push(t, q, &limit.Item{Tenant: "a", Class: limit.Normal, Cost: 10})
		push(t, q, &limit.Item{Tenant: "b", Class: limit.Normal, Cost: 10})
	}
	q.Pop()
	q.Pop()
	q.Settle("a", limit.Normal, 45)
	q.Settle("nobody", limit.Normal, 45)
	for i := range 5 {
		if it := q.Pop(); it.Tenant != "b" && i < 4 {
			t.Errorf("%d: %s", i, it.Tenant)
		}
	}
}

// TestSettleExactly: a tenant's own standing is what is corrected, up and down.
func TestSettleExactly(t *testing.T) {
	for _, f := range []struct {
		more float64
		want int // of b's requests go before the next of a
	}{{0, 10}, {47, 15}, {-47, 5}, {-1000, 1}, {1e9, 30}} {
		q := limit.NewQueue(bounds)
		push(t, q, &limit.Item{Tenant: "a", Class: limit.Normal, Cost: 95})
		push(t, q, &limit.Item{Tenant: "a", Class: limit.Normal, Cost: 95})
		for range 30 {
			push(t, q, &limit.Item{Tenant: "b", Class: limit.Normal, Cost: 10})
		}
		if it := q.Pop(); it.Tenant != "a" {
			t.Fatalf("first is %s", it.Tenant)
		}
		q.Settle("a", limit.Normal, f.more)
		n := 0
		for ; n < 30 && q.Pop().Tenant == "b"; n++ {
		}
		if n != f.want {
			t.Errorf("after %v more %d of b's were served, want %d", f.more, n, f.want)
		}
	}
}

func BenchmarkQueue(b *testing.B) {
	for _, tenants := range []int{1, 10, 1000, 10_000} {
		b.Run(fmt.Sprint(tenants), func(b *testing.B) {
			q := limit.NewQueue(bounds)
			items := make([]*limit.Item, 2*tenants)
			for i := range items {
				items[i] = &limit.Item{Tenant: fmt.Sprint(i % tenants), Class: limit.Normal, Cost: float64(1 + i%7)}
				q.Push(items[i])
			}
			for b.Loop() {
				q.Push(q.Pop())
			}
		})
	}
}

// TestDisplaced: a tenant that takes as much as the largest one displaces nothing, and a
// request as large as the whole queue may displace everything in it.
func TestDisplaced(t *testing.T) {
	q := limit.NewQueue(limit.Bounds{Items: 3, Bytes: 100, Weights: bounds.Weights})
	push(t, q, &limit.Item{Tenant: "a", Class: limit.Normal})
	push(t, q, &limit.Item{Tenant: "a", Class: limit.Normal})
	push(t, q, &limit.Item{Tenant: "b", Class: limit.Normal})
	if out, ok := q.Push(&limit.Item{Tenant: "b", Class: limit.Normal}); ok || len(out) > 0 {
		t.Errorf("it would have had 2 of 3 as the other has: %v, %d displaced", ok, len(out))
	}
	q = limit.NewQueue(limit.Bounds{Items: 3, Bytes: 100, Weights: bounds.Weights})
	push(t, q, &limit.Item{Tenant: "a", Class: limit.Normal, Bytes: 60})
	if out, ok := q.Push(&limit.Item{Tenant: "b", Class: limit.High, Bytes: 100}); !ok || len(out) != 1 {
		t.Errorf("all of the queue, at a quarter of the price: %v, %d displaced", ok, len(out))
	}
}
