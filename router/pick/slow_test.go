package pick_test

import (
	"container/heap"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router/pick"
)

// TestSlowStart: a newcomer's share rises with time.
func TestSlowStart(t *testing.T) {
	for _, policy := range []string{pick.LeastLoaded, pick.Prefix, pick.Random} {
		cfg := pick.DefaultConfig()
		cfg.Policy = policy
		p := pick.New(cfg, rand.New(rand.NewPCG(1, 2)))
		start := time.Unix(1000, 0)
		view := pick.View{Snapshot: fleetOf(4, 1), Now: start}
		p.Refresh(view)
		share := func(at time.Duration) float64 {
			view.Snapshot = fleet.NewSnapshot(2, time.Time{}, append(fleetOf(4, 1).Members, member("new", fleet.Prefill)))
			view.Now = start.Add(time.Hour + at)
			got, n := 0, 400
			var held []*pick.Choice
			for range n {
				c, err := p.Pick(view, &pick.Request{Model: "m", Tokens: 100})
				if err != nil {
					t.Fatal(err)
				}
				if c.Prefill.ID == "new" {
					got++
				}
				if held = append(held, c); len(held) > 50 {
					end(held[0])
					held = held[1:]
				}
			}
			for _, c := range held {
				end(c)
			}
			return float64(got) / float64(n)
		}
		early, mid, late := share(100*time.Millisecond), share(5*time.Second), share(20*time.Second)
		if early > 0.08 || mid <= early || mid > 0.16 || late < 0.15 {
			t.Errorf("%s: shares %.2f, %.2f, %.2f", policy, early, mid, late)
		}
	}
}

// joining is what a worker that joins a fleet of one pair gets.
type joining struct {
	first          int // requests that others got between its coming and its first
	early, all     int // that it got in its first second, of all
	most           int // that it had at once in that second
	late, allLater int // that it got in the seconds 15 to 20, of all
}

// join lets a worker join while clients send one request after another, each of
// which takes 100 ms of simulated time.
func join(t *testing.T, policy string, role fleet.Role, clients int) (out joining) {
	t.Helper()
	cfg := pick.DefaultConfig()
	cfg.Policy = policy
	p := pick.New(cfg, rand.New(rand.NewPCG(1, 2)))
	const came, took = 3600.0, 0.1
	now, held, todo := came-1, 0, events{}
	out.first = -1
	old, grown := fleetOf(1, 1), fleet.NewSnapshot(2, time.Time{}, append(fleetOf(1, 1).Members, member("new", role)))
	at := func() time.Time { return time.Unix(0, 0).Add(time.Duration(now * 1e9)) }
	p.Refresh(pick.View{Snapshot: old, Now: time.Unix(0, 0)})
	waited := 0
	send := func() {
		view := pick.View{Snapshot: old, Now: at()}
		if now >= came {
			view.Snapshot = grown
		}
		c, err := p.Pick(view, &pick.Request{Model: "m", Tokens: 100, Output: 20})
		if err != nil {
			t.Fatal(err)
		}
		mine := c.Prefill.ID == "new" || c.Decode.ID == "new"
		switch since := now - came; {
		case since < 0:
		case since < 1:
			out.all++
			if mine {
				out.early++
			}
		case since >= 15:
			out.allLater++
			if mine {
				out.late++
			}
		}
		switch {
		case mine:
			if out.first < 0 {
				out.first = waited
			}
			if held++; now < came+1 {
				out.most = max(out.most, held)
			}
		case now >= came:
			waited++
		}
		heap.Push(&todo, event{now + took, func() {
			if end(c); mine {
				held--
			}
		}})
	}
	for i := range clients {
		var again func()
		again = func() {
			send()
			heap.Push(&todo, event{now + took*1.001, again})
		}
		heap.Push(&todo, event{came - 1 + took*float64(i)/float64(clients), again})
	}
	for now < came+20 {
		e := heap.Pop(&todo).(event)
		now = e.at
		e.do()
	}
	return out
}

// TestNewcomerFirst: whatever the load, a worker that joins gets its first
// request at once, but one at a time while it is new, and in the end its half.
func TestNewcomerFirst(t *testing.T) {
	for _, policy := range []string{pick.Prefix, pick.KVEvents, pick.PredictedTTFT, pick.LeastLoaded, pick.LeastTokens, pick.PowerOfTwo, pick.Random} {
		for _, role := range []fleet.Role{fleet.Prefill, fleet.Decode} {
			for _, clients := range []int{1, 2, 4, 64} {
				got := join(t, policy, role, clients)
				switch {
				case got.first < 0 || got.first > 2:
					t.Errorf("%s, %s, %d clients: %d requests went elsewhere before its first", policy, role, clients, got.first)
				case got.early > got.all/4+2 || clients <= 4 && got.most > 1 && policy != pick.Random:
					t.Errorf("%s, %s, %d clients: a flood: %d of %d, %d at once", policy, role, clients, got.early, got.all, got.most)
				case got.late < got.allLater*2/5 || got.late > got.allLater*3/5:
					t.Errorf("%s, %s, %d clients: %d of %d once it is old", policy, role, clients, got.late, got.allLater)
				}
			}
		}
	}
}
