package share

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/router/pick"
)

// memory is a bus in this process.
type memory struct {
	mu   sync.Mutex
	subs map[int]func([]byte)
	n    int
	down bool
	drop func() bool // says which messages are lost
	sent int
	size int // bytes
}

func (m *memory) Publish(b []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.down {
		return errors.New("down")
	}
	m.sent++
	m.size += len(b)
	if m.drop != nil && m.drop() {
		return nil
	}
	for _, f := range m.subs {
		f(slices.Clone(b))
	}
	return nil
}

// change changes what is wrong with it.
func (m *memory) change(f func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f()
}

func (m *memory) Subscribe(f func([]byte)) (func(), error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.subs == nil {
		m.subs = map[int]func([]byte){}
	}
	m.n++
	id := m.n
	m.subs[id] = f
	return func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		delete(m.subs, id)
	}, nil
}

// fake is a picker: own is set by the test, others by the sharer.
type fake struct {
	mu      sync.Mutex
	on      bool
	own     map[name]pick.Loads
	changed map[name]bool
	others  map[name]pick.Loads
	out     []pick.Hint
	in      []pick.Hint
	recent  []pick.Hint
}

func newFake() *fake {
	return &fake{own: map[name]pick.Loads{}, changed: map[name]bool{}, others: map[name]pick.Loads{}}
}

func (f *fake) Note(on bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.on = on
}

func (f *fake) set(id string, legs int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.own[name{id, 1}] = pick.Loads{Legs: legs, Seqs: legs}
	f.changed[name{id, 1}] = f.on
}

func (f *fake) Changes(out []pick.WorkerLoad, all bool, most int) []pick.WorkerLoad {
	f.mu.Lock()
	defer f.mu.Unlock()
	for n, l := range f.own {
		if len(out) < most && (all && l.Legs > 0 || !all && f.changed[n]) {
			out = append(out, pick.WorkerLoad{ID: n.id, Epoch: n.epoch, Loads: l})
			if !all {
				delete(f.changed, n)
			}
		}
	}
	return out
}

func (f *fake) Hints() ([]pick.Hint, uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := f.out
	f.out = nil
	return out, 0
}

func (f *fake) Recent(most int) []pick.Hint { return f.recent }

func (f *fake) SetOthers(list []pick.WorkerLoad) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, w := range list {
		f.others[name{w.ID, w.Epoch}] = w.Loads
	}
}

func (f *fake) AddHints(list []pick.Hint) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.in = append(f.in, list...)
}

// has is f's own load on a worker.
func (f *fake) has(id string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.own[name{id, 1}].Legs
}

// sees is the others' load on a worker, as f knows it.
func (f *fake) sees(id string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.others[name{id, 1}].Legs
}

// start runs a sharer until stop.
func start(bus Bus, f *fake) (s *Sharer, stop func()) {
	s = New(DefaultConfig(), bus, f, slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.Run(ctx)
	}()
	return s, func() { cancel(); <-done }
}

// pass lets time pass, and waits for what is due then.
func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func TestShare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bus, a, b := &memory{}, newFake(), newFake()
		a.set("w0", 7) // before anybody listens
		sa, stopA := start(bus, a)
		pass(10 * time.Second)
		if bus.sent > 11 || bus.size > 20*bus.sent {
			t.Errorf("alone it sent %d messages of %d bytes", bus.sent, bus.size)
		}
		sb, stopB := start(bus, b)
		pass(100 * time.Millisecond)
		if sa.Peers() != 1 || sb.Peers() != 1 || b.sees("w0") != 7 {
			t.Fatalf("%d, %d peers; it sees %d", sa.Peers(), sb.Peers(), b.sees("w0"))
		}
		a.set("w1", 3)
		b.set("w1", 2)
		pass(25 * time.Millisecond)
		if b.sees("w1") != 3 || a.sees("w1") != 2 {
			t.Errorf("within an interval: %d, %d", b.sees("w1"), a.sees("w1"))
		}
		before := bus.sent
		for i := range 1000 { // a change each millisecond
			a.set("w1", i)
			pass(time.Millisecond)
		}
		if n := bus.sent - before; n > 60 {
			t.Errorf("%d messages in a second", n)
		}
		a.set("w1", 0)
		a.mu.Lock()
		a.out = []pick.Hint{{Prefill: "p", Decode: "d", PrefillEpoch: 1, Hashes: make([]uint64, 3000)}}
		a.mu.Unlock()
		pass(200 * time.Millisecond)
		n := 0
		for _, h := range b.in {
			n += len(h.Hashes)
		}
		if b.sees("w1") != 0 || n != 3000 || len(a.in) != 0 {
			t.Errorf("sees %d, got %d hashes, and %d back", b.sees("w1"), n, len(a.in))
		}
		stopA() // says goodbye
		if sb.Peers() != 0 || b.sees("w0") != 0 || sb.peers.counts.expired != 0 {
			t.Errorf("after a goodbye: %d peers, sees %d", sb.Peers(), b.sees("w0"))
		}
		stopB()
		if len(bus.subs) != 0 || a.on || b.on {
			t.Errorf("left behind: %d, %v, %v", len(bus.subs), a.on, b.on)
		}
	})
}

// TestFaultC21_NewRouterIsToldPrefixes: one of the routers that are there tells
// a newcomer that asks where prefixes are, even if it asked before it knew them.
func TestFaultC21_NewRouterIsToldPrefixes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bus := &memory{}
		for _, prefill := range []string{"p0", "p1", "p2"} {
			f := newFake()
			f.recent = []pick.Hint{{Prefill: prefill, Decode: "d", PrefillEpoch: 1, Hashes: make([]uint64, 2500)}}
			_, stop := start(bus, f)
			defer stop()
		}
		pass(2 * time.Second)
		bus.change(func() { bus.down = true })
		f := newFake()
		s, stop := start(bus, f)
		defer stop()
		s.Ask()
		pass(time.Second / 2) // the others still count each other in
		bus.change(func() { bus.down = false })
		pass(4 * time.Second)
		n := 0
		for _, h := range f.in {
			if n += len(h.Hashes); h.Prefill != f.in[0].Prefill {
				t.Errorf("from several: %s and %s", h.Prefill, f.in[0].Prefill)
			}
		}
		if n != 2500 {
			t.Errorf("the newcomer was told of %d blocks", n)
		}
	})
}

// TestSilence: the load of a router that dies, or whose link is cut, counts for Expire
// and no longer; when the link comes back, so does the load.
func TestSilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bus, a, b := &memory{}, newFake(), newFake()
		sa, stopA := start(bus, a)
		defer stopA()
		sb, stopB := start(bus, b)
		defer stopB()
		pass(time.Second)
		a.set("w", 5)
		pass(50 * time.Millisecond)
		bus.change(func() { bus.down = true })
		pass(1900 * time.Millisecond)
		if b.sees("w") != 5 {
			t.Errorf("a short silence: sees %d", b.sees("w"))
		}
		pass(1200 * time.Millisecond)
		if b.sees("w") != 0 || sb.Peers() != 0 || sb.peers.counts.expired != 1 || sa.peers.counts.expired != 1 {
			t.Errorf("a long one: sees %d, %d peers, %+v", b.sees("w"), sb.Peers(), sb.peers.counts)
		}
		bus.change(func() { bus.down = false })
		a.set("w", 6) // while it believes to be alone
		pass(1100 * time.Millisecond)
		if b.sees("w") != 6 {
			t.Errorf("afterwards: sees %d", b.sees("w"))
		}
	})
}

// TestLoss: whatever is lost, a second after the bus is good again each router
// knows exactly what the others have.
func TestLoss(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rnd, lossy := rand.New(rand.NewPCG(1, 2)), rand.New(rand.NewPCG(3, 4))
		bus := &memory{}
		var fakes []*fake
		for range 3 {
			f := newFake()
			_, stop := start(bus, f)
			defer stop()
			fakes = append(fakes, f)
		}
		worker := func() string { return []string{"a", "b", "c", "d"}[rnd.IntN(4)] }
		for range 20 {
			bus.change(func() { bus.drop = func() bool { return lossy.IntN(3) == 0 } })
			for range 100 {
				fakes[rnd.IntN(3)].set(worker(), rnd.IntN(4))
				pass(time.Duration(rnd.IntN(30)) * time.Millisecond)
			}
			bus.change(func() { bus.drop = nil })
			pass(1100 * time.Millisecond)
			for i, f := range fakes {
				for _, w := range []string{"a", "b", "c", "d"} {
					want := 0
					for j, g := range fakes {
						if j != i {
							want += g.has(w)
						}
					}
					if got := f.sees(w); got != want {
						t.Fatalf("router %d sees %d on %s, want %d", i, got, w, want)
					}
				}
			}
		}
	})
}

// TestManyWorkers: the load of thousands of workers is sent in parts, and workers that
// have gone are forgotten.
func TestManyWorkers(t *testing.T) {
	p := newPeers(3 * time.Second)
	now := time.Unix(0, 0)
	bus, f := &memory{}, newFake()
	s := New(DefaultConfig(), bus, f, slog.New(slog.DiscardHandler))
	var lost int
	if _, err := bus.Subscribe(func(b []byte) {
		m, err := decode(b)
		if err != nil {
			t.Fatal(err)
		}
		if lost--; lost == 0 {
			return
		}
		p.apply(&m, now)
	}); err != nil {
		t.Fatal(err)
	}
	for i := range 4000 {
		f.own[name{string(rune('a'+i%26)) + string(rune('a'+i/26%26)) + string(rune('a'+i/676)), 1}] = pick.Loads{Legs: 1}
	}
	s.snapshot()
	if len(p.totals) != 4000 || bus.sent < 2 {
		t.Errorf("%d workers in %d messages", len(p.totals), bus.sent)
	}
	for n := range f.own {
		if len(f.own) > 1000 {
			delete(f.own, n)
		}
	}
	lost = 2
	s.snapshot()
	if len(p.totals) != 4000 {
		t.Errorf("half a snapshot took %d away", 4000-len(p.totals))
	}
	s.snapshot()
	if len(p.totals) != 1000 {
		t.Errorf("%d workers, want 1000", len(p.totals))
	}
	p.tick(now.Add(3 * time.Second))
	if len(p.totals) != 0 || len(p.byID) != 0 {
		t.Errorf("%d workers are left", len(p.totals))
	}
}

// TestStrangers: the number of routers is bounded, and old messages are not
// taken for new ones.
func TestStrangers(t *testing.T) {
	p := newPeers(3 * time.Second)
	now := time.Unix(0, 0)
	for i := range uint64(100) {
		p.apply(&message{kind: kindHello, from: i, seq: 9}, now)
	}
	if len(p.byID) != maxPeers || p.counts.refused != 100-maxPeers {
		t.Errorf("%d peers, %+v", len(p.byID), p.counts)
	}
	w := []pick.WorkerLoad{{ID: "w", Epoch: 1, Loads: pick.Loads{Legs: 5}}}
	p.apply(&message{kind: kindChanges, from: 1, seq: 10, workers: w}, now)
	w = []pick.WorkerLoad{{ID: "w", Epoch: 1, Loads: pick.Loads{Legs: 1}}}
	p.apply(&message{kind: kindChanges, from: 1, seq: 10, workers: w}, now)
	p.apply(&message{kind: kindChanges, from: 1, seq: 3, workers: w}, now)
	if l := p.totals[name{"w", 1}]; l.Legs != 5 {
		t.Errorf("%+v", l)
	}
}

func FuzzDecode(f *testing.F) {
	head := func(kind byte) []byte { return appendHead(nil, kind, 7, 3) }
	worker := pick.WorkerLoad{ID: "decode-0", Epoch: 1795279060972119, Loads: pick.Loads{Legs: 2, Tokens: 3, Seqs: 300, KV: 5}}
	hint := pick.Hint{Prefill: "p", Decode: "d", PrefillEpoch: 1, Hashes: []uint64{1, 1 << 63}}
	f.Add(head(kindHello))
	f.Add(head(kindAsk))
	f.Add(head(kindBye))
	f.Add(appendWorker(head(kindChanges), &worker))
	f.Add(appendWorker(appendNumbers(head(kindSnapshot), 0, 1), &worker))
	f.Add(appendHint(head(kindHints), &hint))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := decode(b)
		if err != nil {
			return
		}
		out := appendHead(nil, m.kind, m.from, m.seq)
		if m.kind == kindSnapshot {
			out = appendNumbers(out, m.part, m.parts)
		}
		for i := range m.workers {
			out = appendWorker(out, &m.workers[i])
		}
		for i := range m.hints {
			out = appendHint(out, &m.hints[i])
		}
		again, err := decode(out)
		if err != nil || again.seq != m.seq || !slices.Equal(again.workers, m.workers) || len(again.hints) != len(m.hints) {
			t.Errorf("%x\nbecomes %x: %v", b, out, err)
		}
		p := newPeers(time.Second)
		p.apply(&m, time.Unix(0, 0))
	})
}

// TestPeersList: other routers are listed in the order of their ids.
func TestPeersList(t *testing.T) {
	now := time.Now()
	s := newPeers(time.Minute)
	w := func(id string, legs int) pick.WorkerLoad {
		return pick.WorkerLoad{ID: id, Epoch: 1, Loads: pick.Loads{Legs: legs, Seqs: 1}}
	}
	s.apply(&message{kind: kindHello, from: 0xb, seq: 1}, now.Add(-time.Second))
	s.apply(&message{kind: kindChanges, from: 0xa, seq: 1, workers: []pick.WorkerLoad{w("p", 2), w("d", 3), w("idle", 0)}}, now.Add(-20*time.Millisecond))
	want := []Peer{{"000000000000000a", 20, 5, 2}, {"000000000000000b", 1000, 0, 0}}
	if got := s.list(now); !slices.Equal(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
}

// Peers is how many other routers are heard.
func (s *Sharer) Peers() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.peers.byID)
}
