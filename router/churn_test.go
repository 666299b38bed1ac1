package router_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	fake "github.com/xpyd/xpyd/internal/mock"
	"github.com/xpyd/xpyd/router"
	"github.com/xpyd/xpyd/router/pick"
	"github.com/xpyd/xpyd/router/sense"
)

// TestChurn is an hour of a bad day, compressed: engines of four dialects join,
// leave, drain, are killed and paused, and fail in every way, while clients
// send, leave and read slowly. No request outlives its deadline, no answer is
// wrong, and in the end every count, guard, goroutine and descriptor is back to
// where it was. XPYD_CHURN=10m makes it long (`make router-churn`), XPYD_CHURN_SEED
// another day.
func TestChurn(t *testing.T) {
	length, seed := 3*time.Second, uint64(1)
	if s := os.Getenv("XPYD_CHURN"); s != "" {
		d, err := time.ParseDuration(s)
		if err != nil {
			t.Fatal(err)
		}
		length = d
	}
	if s := os.Getenv("XPYD_CHURN_SEED"); s != "" {
		if _, err := fmt.Sscan(s, &seed); err != nil {
			t.Fatal(err)
		}
	}
	before := descriptors(t)
	t.Cleanup(func() { // after all else
		deadline := time.Now().Add(10 * time.Second)
		for descriptors(t) > before && time.Now().Before(deadline) {
			time.Sleep(5 * time.Millisecond)
		}
		if now := descriptors(t); now > before {
			t.Errorf("%d descriptors at the beginning, %d at the end", before, now)
		}
	})
	c := newChurn(t, seed)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() { c.disturb(stop) })
	for n := range 12 {
		rnd := rand.New(rand.NewPCG(seed, uint64(n+1)))
		wg.Go(func() { c.use(rnd, stop) })
	}
	samples := make(chan uint64, 1)
	wg.Go(func() { samples <- c.heap(stop) })
	wg.Go(func() { c.lag(stop) })
	time.AfterFunc(length, func() { close(stop) })
	wg.Wait()
	c.settle()
	c.report(seed, length, <-samples)
}

// churn is the fleet of a soak.
type churn struct {
	*rig
	rnd   *rand.Rand // of disturb
	units []*unit
	epoch uint64
	turns map[string]int // what disturb did

	status  [600]atomic.Int64
	left    atomic.Int64 // clients that left
	broken  atomic.Int64 // streams that ended with an error event
	longest atomic.Int64 // of a request, beyond its deadline
	stall   atomic.Int64 // longest time that the machine left this process waiting
}

// unit is one engine and its place in the fleet.
type unit struct {
	id      string
	cfg     fake.Config
	e       *fake.Engine // nil while it is down
	in      bool         // of the fleet
	drained bool
	steady  bool // is never taken away, so that the model stays known
}

// churnLife is each request's deadline.
const churnLife = 4 * time.Second

func newChurn(t *testing.T, seed uint64) *churn {
	label(t)
	c := &churn{rnd: rand.New(rand.NewPCG(seed, 0)), turns: map[string]int{}}
	var list []sense.Static
	for _, dialect := range []string{"vllm-nixl", "vllm-mooncake", "storage", "openai"} {
		for _, role := range []fleet.Role{fleet.Prefill, fleet.Decode} {
			if dialect == "openai" && role == fleet.Prefill {
				continue
			}
			for i := range 3 {
				u := &unit{id: fmt.Sprintf("%s-%s%d", dialect, role[:1], i), steady: i == 0, cfg: fake.Config{Listen: "127.0.0.1:0", Dialect: dialect, Role: string(role), Model: "m", Version: "1.0"}}
				c.units = append(c.units, u)
			}
		}
	}
	t.Cleanup(func() {
		for _, u := range c.units {
			if u.e != nil {
				if err := u.e.Close(); err != nil {
					t.Error(err)
				}
			}
		}
	})
	for _, u := range c.units {
		c.start(t, u)
	}
	c.rig = newRig(t, 0, 0, func(cfg *router.Config) {
		cfg.Static = list
		cfg.Limits.RequestTimeout, cfg.Limits.MaxInFlight, cfg.Limits.MaxQueue = churnLife, 64, 64
		cfg.FirstByteTimeout, cfg.DecodeSilence, cfg.ChunkTimeout, cfg.StallTimeout = time.Second, time.Second, time.Second, time.Second
		cfg.ProbeTimeout = time.Second
		cfg.Pick.Breaker.Open, cfg.Pick.Breaker.MaxOpen = 50*time.Millisecond, 500*time.Millisecond
		cfg.Pick.Ejection.Mode, cfg.Pick.Ejection.Interval, cfg.Pick.Ejection.Time, cfg.Pick.Ejection.MaxTime = pick.EjectAll, 200*time.Millisecond, 300*time.Millisecond, time.Second
		cfg.Hedge.Enabled, cfg.Hedge.Delay = true, 20*time.Millisecond
		cfg.Pick.SlowStart = 500 * time.Millisecond
	})
	for _, u := range c.units {
		c.join(u)
	}
	c.until("somebody to be ready", c.r.Ready)
	return c
}

func (c *churn) start(t *testing.T, u *unit) {
	e, err := fake.Start(u.cfg)
	if err != nil { // its port was taken meanwhile: it moves
		u.cfg.Listen = "127.0.0.1:0"
		if e, err = fake.Start(u.cfg); err != nil {
			t.Error(err)
			return
		}
	}
	u.e, u.cfg.Listen = e, e.Addr()
}

func (c *churn) join(u *unit) {
	c.epoch++
	inst := fleet.Instance{ID: u.id, Epoch: c.epoch, Role: fleet.Role(u.cfg.Role), URL: "http://" + u.cfg.Listen, Dialect: u.cfg.Dialect, Model: "m", Version: "1.0"}
	if u.e != nil {
		inst.Bootstrap, inst.EngineID = u.e.Addr(), u.e.ID()
	}
	if err := c.watcher.AddStatic(inst, fleet.Static); err != nil {
		c.t.Error(err)
	}
	u.in, u.drained = true, false
}

// faults are what engines suffer; most are well most of the time.
var churnFaults = []fake.Fault{{}, {}, {}, {}, {Status: 500}, {Status: 503}, {Status: 429}, {Status: 400}, {Refuse: true}, {Event: true}, {Cut: 1}, {Cut: 3}, {Freeze: 1}, {Hang: true},
	{Hang: true, Probes: true}, {Mute: true}, {NoParams: true}, {Status: 500, Probes: true}}

// disturb does something to some engine every few milliseconds.
func (c *churn) disturb(stop chan struct{}) {
	for {
		select {
		case <-stop:
			return
		case <-time.After(time.Duration(c.rnd.IntN(8)+1) * time.Millisecond):
		}
		u := c.units[c.rnd.IntN(len(c.units))]
		did := "fault"
		switch n := c.rnd.IntN(20); {
		case u.e == nil: // it was killed
			did = "restart"
			c.start(c.t, u)
			if c.rnd.IntN(2) == 0 || u.cfg.Role == "prefill" { // else its port alone tells
				c.join(u)
			}
		case n < 2 && !u.steady:
			did = "kill"
			if err := u.e.Close(); err != nil {
				c.t.Error(err)
			}
			u.e = nil
		case n < 4 && !u.steady && u.in:
			did = "leave"
			c.watcher.Remove(u.id, "churn")
			u.in = false
		case n < 8 && !u.in:
			did = "join"
			c.join(u)
		case n < 10 && u.in:
			verb := "drain"
			if u.drained {
				verb = "undrain"
			}
			did, u.drained = verb, !u.drained
			c.adminJSON("POST", "/admin/v1/instances/"+u.id+"/"+verb, "{}", nil)
		case n < 12:
			did = "renew"
			u.e.Renew()
		case n < 13:
			did = "report"
			if m := c.watcher.Snapshot().Get(u.id); m != nil {
				c.watcher.ReportDead(u.id, m.Epoch, "churn")
			}
		default:
			f := churnFaults[c.rnd.IntN(len(churnFaults))]
			if f.Hang {
				did = "pause"
			}
			u.e.SetFault(f)
		}
		c.turns[did]++
	}
}

// use is one client.
func (c *churn) use(rnd *rand.Rand, stop chan struct{}) {
	bodies := []string{askText, askLive, askLive, `{"model":"m","prompt":"Once upon","n":2,"max_tokens":5}`}
	for {
		select {
		case <-stop:
			return
		default:
		}
		leaves := rnd.IntN(4) == 0
		slow := rnd.IntN(8) == 0
		ctx, cancel := context.WithCancel(context.Background())
		if leaves {
			cancel()
			ctx, cancel = context.WithTimeout(context.Background(), time.Duration(rnd.IntN(30)+1)*time.Millisecond)
		}
		c.one(ctx, bodies[rnd.IntN(len(bodies))], leaves, slow, time.Duration(rnd.IntN(20))*time.Millisecond)
		cancel()
	}
}

// one sends one request and checks what comes.
func (c *churn) one(ctx context.Context, body string, leaves, slow bool, pause time.Duration) {
	start := time.Now()
	req, _ := http.NewRequestWithContext(ctx, "POST", c.url+"/v1/completions", strings.NewReader(body))
	resp, err := c.client.Do(req)
	if err != nil {
		if c.left.Add(1); !leaves {
			c.t.Errorf("%v", err)
		}
		return
	}
	defer resp.Body.Close()
	var text bytes.Buffer
	if slow {
		r := bufio.NewReader(resp.Body)
		line, _ := r.ReadBytes('\n')
		text.Write(line)
		<-time.After(pause)
		_, err = io.Copy(&text, r)
	} else {
		_, err = io.Copy(&text, resp.Body)
	}
	if late := time.Since(start) - churnLife; late > time.Duration(c.longest.Load()) {
		c.longest.Store(int64(late))
	}
	switch {
	case err != nil && leaves:
		c.left.Add(1)
		return
	case err != nil:
		c.t.Errorf("%d %q: %v", resp.StatusCode, text.String(), err)
		return
	}
	c.status[resp.StatusCode].Add(1)
	said := text.String()
	switch resp.StatusCode {
	case 200:
		if strings.Contains(said, `"error":`) {
			c.broken.Add(1)
			if !strings.HasSuffix(said, "\n\n") {
				c.t.Errorf("half an event: %q", said)
			}
			return
		}
		if got, _ := read(c.t, said); got != wantText(`"Once upon"`) {
			c.t.Errorf("a wrong answer of %s and %s: %q", resp.Header.Get("x-xpyd-prefill"), resp.Header.Get("x-xpyd-decode"), said)
		}
	case 400, 429, 502, 503, 504: // as the engines were told to, or for want of any
		apiError(c.t, said)
	case 500:
	default:
		c.t.Errorf("%d %s", resp.StatusCode, said)
	}
}

// lag measures how late timers fire: by so much a request may exceed its deadline on a
// busy machine.
func (c *churn) lag(stop chan struct{}) {
	const every = 5 * time.Millisecond
	for {
		start := time.Now()
		select {
		case <-stop:
			return
		case <-time.After(every):
		}
		if late := time.Since(start) - every; late > time.Duration(c.stall.Load()) {
			c.stall.Store(int64(late))
		}
	}
}

// heap is the heap's size halfway, to compare with the end.
func (c *churn) heap(stop chan struct{}) uint64 {
	<-stop
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// settle ends the disturbance and waits until all is well again.
func (c *churn) settle() {
	for _, u := range c.units {
		if u.e == nil {
			c.start(c.t, u)
		}
		u.e.SetFault(fake.Fault{})
		c.join(u) // a new epoch: drains and probes are of the old
	}
	c.allProbed(len(c.units))
	c.until("every guard to be closed, with some traffic", func() bool {
		if resp, text := c.post("/v1/completions", askLive); resp.StatusCode != 200 {
			c.t.Logf("%d %s", resp.StatusCode, text)
		}
		return len(c.breakers()) == 0
	})
	c.until("nothing left", c.idle)
	if late := time.Duration(c.longest.Load()); late > patience {
		c.t.Errorf("a request was %v over its deadline", late)
	}
	for _, name := range []string{"xpyd_router_requests_in_flight", "xpyd_router_queue_requests", "xpyd_router_legs_in_flight", "xpyd_router_breakers_open", "xpyd_router_workers_ejected"} {
		if v := c.gauge(name); v != 0 {
			c.t.Errorf("%s is %v", name, v)
		}
	}
	var list struct {
		Instances []struct {
			ID       string
			InFlight pick.Loads `json:"in_flight"`
		}
	}
	c.adminJSON("GET", "/admin/v1/instances", "", &list)
	for _, i := range list.Instances {
		if i.InFlight != (pick.Loads{}) {
			c.t.Errorf("%s still counts %+v", i.ID, i.InFlight)
		}
	}
}

func (g *rig) gauge(name string) float64 {
	families, err := g.reg.Gather()
	if err != nil {
		g.t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == name {
			return f.GetMetric()[0].GetGauge().GetValue()
		}
	}
	g.t.Fatalf("no gauge %s", name)
	return 0
}

// report logs what happened, as one line of JSON.
func (c *churn) report(seed uint64, length time.Duration, heap uint64) {
	status, total := map[string]int64{}, int64(0)
	for code := range c.status {
		if n := c.status[code].Load(); n > 0 {
			status[fmt.Sprint(code)] = n
			total += n
		}
	}
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	line, err := json.Marshal(map[string]any{
		"seed": seed, "length": length.String(), "answers": total, "status": status, "clients_left": c.left.Load(), "broken_streams": c.broken.Load(),
		"turns": c.turns, "latest_ms_over_deadline": max(c.longest.Load(), 0) / 1e6, "latest_timer_ms": c.stall.Load() / 1e6,
		"breakers_opened": c.metric(`xpyd_router_breaker_opened_total{role="prefill"}`) + c.metric(`xpyd_router_breaker_opened_total{role="decode"}`),
		"ejections":       c.metric(`xpyd_router_ejections_total{role="prefill"}`) + c.metric(`xpyd_router_ejections_total{role="decode"}`),
		"hedges_won":      c.metric(`xpyd_router_hedges_total{result="won"}`), "hedges_lost": c.metric(`xpyd_router_hedges_total{result="lost"}`),
		"retry_budget_exhausted": c.metric("xpyd_router_retry_budget_exhausted_total"),
		"heap_mb_under_load":     heap >> 20, "heap_mb_at_the_end": m.HeapAlloc >> 20, "goroutines_at_the_end": runtime.NumGoroutine(),
	})
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Logf("churn %s", line)
	if total == 0 || c.status[200].Load() == 0 {
		c.t.Error("nothing was answered")
	}
}

// descriptors counts the process's open ones; where there is no /proc to list
// them it is always 0, and all else is still checked.
func descriptors(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Logf("descriptors are not counted: %v", err)
		return 0
	}
	return len(list)
}
