package unbroken

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/internal/fleet"
)

// Workers are one prefill worker and the decode workers IDs, and the router that they joined.
type Workers interface {
	Start(t testing.TB, id string)
	Kill(id string) // kill -9
	Stop(id string) // kill -STOP
	Continue(id string)
	Leave(id string) // kill
	Ended(id string) // waits for it
	Cut()            // resets the connections between the router and Wired
}

// IDs are the decode workers. A reset is for the last.
var IDs = []string{"decode-0", "decode-1", Wired}

const Wired = "decode-2"

// Asked returns the number of strikes and the seed that the environment asks for: name, and
// XPYD_UNBROKEN_SEED.
func Asked(t testing.TB, name string, otherwise int) (strikes int, seed uint64) {
	t.Helper()
	setting := func(name string, otherwise int) uint64 {
		n, err := strconv.ParseUint(cmp.Or(os.Getenv(name), strconv.Itoa(otherwise)), 10, 64)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		return n
	}
	return int(setting(name, otherwise)), setting("XPYD_UNBROKEN_SEED", 1)
}

// Strikes is a run of them.
type Strikes struct {
	Router   *cluster.Router
	Workers  Workers
	Client   *http.Client
	Patience time.Duration // until nothing is held
	Bound    bool          // all answers are bound to something, also to calls of tools; else some are

	answers, broken, wrong int
}

// Run draws strikes by seed. It fails t if a stream ended early or is not the same.
func (u *Strikes) Run(t *testing.T, strikes int, seed uint64) {
	t.Helper()
	for _, id := range IDs {
		u.Workers.Start(t, id)
	}
	u.Router.WaitServing(t, time.Minute, 1, len(IDs))
	began, kinds, seams := time.Now(), map[string]int{}, 0
	for n := 1; n <= strikes; n++ {
		r := rand.New(rand.NewPCG(seed, uint64(n)))
		for range 20 { // until one finds a stream
			done, more := u.round(t, r, n)
			seams += more
			for _, kind := range done {
				kinds[kind]++
			}
			if len(done) > 0 {
				break
			}
		}
		if n%10 == 0 || n == strikes {
			t.Logf("%d of %d strikes of seed %d in %.0f s, %v: %d answers, %d of them with a seam, %d ended early, %d not the same",
				n, strikes, seed, time.Since(began).Seconds(), kinds, u.answers, seams, u.broken, u.wrong)
		}
		if u.broken+u.wrong > 20 {
			t.Fatal("enough")
		}
	}
	if strikes >= 12 && seams == 0 {
		t.Error("no stream was taken over")
	}
}

// plan is a fault of the decode of the stream that gets an event after so many others.
type plan struct {
	kind   string
	after  int
	lasts  time.Duration // of a pause
	victim string        // once it is done
}

// kinds are what happens to a worker, by how often.
var kinds = []string{"kill", "kill", "reset", "reset", "stop", "pause", "drain", "role", "leave"}

// planned draws one fault, or two of different workers: some at once, so that moves are abandoned.
func planned(r *rand.Rand, events int) []plan {
	plans := make([]plan, 1+r.IntN(3)/2)
	for i := range plans {
		plans[i] = plan{kind: kinds[r.IntN(len(kinds))], after: r.IntN(max(events*3/4, 1)),
			lasts: time.Duration(100+r.IntN(1400)) * time.Millisecond}
	}
	if r.IntN(2) == 0 {
		plans[len(plans)-1].after = plans[0].after + r.IntN(3)
	}
	return plans
}

// round sends requests undisturbed, and then again under a strike of one fault or two. It returns
// what was done, and how many streams were taken over; nothing is done if the streams that a fault
// is for have ended.
func (u *Strikes) round(t *testing.T, r *rand.Rand, n int) (done []string, seams int) {
	t.Helper()
	asks := make([]Request, 8+r.IntN(8))
	for i := range asks {
		asks[i] = Draw(r, i > 0 && r.IntN(5) == 0)
		if u.Bound && !asks[i].Bound {
			asks[i].Bind(r, true)
		}
	}
	var mu sync.Mutex
	events := 0
	want := u.all(t, n, asks, "", func(string, int) {
		mu.Lock()
		defer mu.Unlock()
		events++
	})
	for i, s := range want {
		if s.Err != nil || s.Seams != 0 {
			t.Fatalf("strike %d: undisturbed: %v, %d seams in %s", n, s.Err, s.Seams, asks[i].Fields)
		}
	}
	plans, salt := planned(r, events), ""
	if r.IntN(2) == 0 { // no cache has the prompts
		salt = fmt.Sprintf(`,"cache_salt":"%d"`, n)
	}
	events = 0
	var under sync.WaitGroup
	got := u.all(t, n, asks, salt, func(decode string, _ int) {
		mu.Lock()
		defer mu.Unlock()
		events++
		if slices.ContainsFunc(plans, func(p plan) bool { return p.victim == decode }) {
			return
		}
		for i := range plans {
			if p := &plans[i]; events > p.after && p.victim == "" && (p.kind != "reset" || decode == Wired) {
				p.victim = decode
				u.do(t, p, &under)
				return
			}
		}
	})
	under.Wait()
	what := fmt.Sprintf("strike %d, %+v", n, plans)
	seams = u.judge(t, what, asks, want, got)
	for _, p := range plans {
		if p.victim == "" {
			continue
		}
		done = append(done, p.kind)
		switch p.kind {
		case "kill", "stop":
			u.Workers.Kill(p.victim)
			fallthrough
		case "leave":
			u.Workers.Ended(p.victim)
			u.Workers.Start(t, p.victim)
		case "drain":
			u.order(t, p.victim, "undrain", nil)
		case "role":
			u.order(t, p.victim, "role", map[string]any{"role": fleet.Decode})
		}
	}
	u.Router.WaitServing(t, 30*time.Second, 1, len(IDs))
	cluster.Wait(t, u.Patience, "ledgers empty after "+what, u.Router.Idle)
	return done, seams
}

// order has the router give an order.
func (u *Strikes) order(t *testing.T, id, what string, in any) {
	if err := u.Router.Call(http.MethodPost, "/admin/v1/instances/"+id+"/"+what, in, nil); err != nil {
		t.Errorf("%s %s: %v", what, id, err)
	}
}

// do makes the fault happen. A pause ends, and an order is over, when under has waited.
func (u *Strikes) do(t *testing.T, p *plan, under *sync.WaitGroup) {
	id, lasts := p.victim, p.lasts
	switch p.kind {
	case "kill":
		u.Workers.Kill(id)
	case "reset":
		u.Workers.Cut()
	case "stop":
		u.Workers.Stop(id)
	case "pause":
		u.Workers.Stop(id)
		under.Go(func() {
			time.Sleep(lasts) // the fault itself
			u.Workers.Continue(id)
		})
	case "leave":
		u.Workers.Leave(id)
	case "drain":
		under.Go(func() { u.order(t, id, "drain", map[string]any{"force": true}) })
	case "role":
		under.Go(func() { u.order(t, id, "role", map[string]any{"role": fleet.Prefill, "force": true}) })
	}
}

// judge compares the answers with the undisturbed ones.
func (u *Strikes) judge(t *testing.T, what string, asks []Request, want, got []*Answer) (seams int) {
	t.Helper()
	for i, s := range got {
		u.answers++
		seams += min(s.Seams, 1)
		if bad := s.Differs(want[i]); bad != "" {
			if s.Err != nil {
				u.broken++
			} else {
				u.wrong++
			}
			t.Errorf("%s: %s: by %s, %d seams, %s", what, asks[i].Fields, s.Decode, s.Seams, bad)
		}
	}
	return seams
}

// all sends all requests at once.
func (u *Strikes) all(t *testing.T, n int, asks []Request, salt string, met func(decode string, n int)) []*Answer {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	out := make([]*Answer, len(asks))
	var wg sync.WaitGroup
	for i, a := range asks {
		wg.Go(func() {
			out[i] = Tell(ctx, u.Client, u.Router.URL+a.Path, fmt.Sprintf("strike-%d-%d", n, i), "{"+a.Fields+salt+"}", met)
		})
	}
	wg.Wait()
	return out
}
