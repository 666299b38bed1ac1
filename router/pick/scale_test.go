package pick_test

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/kvevents"
	"github.com/xpyd/xpyd/kvlayout"
	"github.com/xpyd/xpyd/router/index"
	"github.com/xpyd/xpyd/router/pick"
)

const (
	size    = 16 // tokens a block
	shared  = 64 // blocks of a system prompt
	own     = 64 // blocks of a conversation after it
	systems = 64 // different system prompts
	slice   = 2000
)

// token is the id at a place of a conversation.
func token(conversation, at int) uint32 {
	if at < shared*size {
		conversation = -1 - conversation%systems
	}
	x := uint64(conversation+1000)*0x9e3779b97f4a7c15 + uint64(at)*0xbf58476d1ce4e5b9
	x ^= x >> 31
	return uint32(x*0x94d049bb133111eb>>40) % 128_000
}

func tokensOf(buf []uint32, conversation, tokens int) []uint32 {
	buf = buf[:0]
	for at := range tokens {
		buf = append(buf, token(conversation, at))
	}
	return buf
}

// site is one fleet with its index, picker and churn.
type site struct {
	workers int
	index   *index.Index
	picker  *pick.Picker
	snap    atomic.Pointer[fleet.Snapshot]
	members []fleet.Member
	sources []*source
	next    int // conversation
	rnd     *rand.Rand
	version uint64
	away    int // members that drain

	perBlock  float64   // bytes of heap
	lat, wall []float64 // microseconds, of this round
}

// source is one worker's cache.
type source struct {
	*index.Source
	have  map[int]bool // system prompts
	convs []int        // oldest first
}

// hash is an engine's name of a block: of one worker's own making.
func (s *source) hash(id, block int) uint64 {
	return (uint64(id)<<16 | uint64(block)) * 0x9e3779b97f4a7c15
}

func newSite(workers int, blocks int64) *site {
	s := &site{workers: workers, index: index.New(blocks * 2 * index.BlockBytes), rnd: rand.New(rand.NewPCG(7, uint64(workers)))}
	cfg := pick.DefaultConfig()
	cfg.Policy, cfg.SlowStart = pick.KVEvents, 0
	s.picker = pick.New(cfg, rand.New(rand.NewPCG(1, 2)))
	for i := range workers {
		role := fleet.Prefill
		if i%2 == 1 {
			role = fleet.Decode
		}
		s.members = append(s.members, fleet.Member{State: fleet.Live, Instance: fleet.Instance{ID: fmt.Sprintf("w%05d", i), Epoch: 1, Role: role,
			Dialect: "native", Model: "m", Blocks: 1 << 20, MaxBatch: 256, Layout: kvlayout.Form{BlockTokens: size}, KVEvents: "h:1"}})
		s.sources = append(s.sources, s.newSource(i))
	}
	s.publish()
	buf := make([]uint32, 0, (shared+own)*size)
	for i := 0; s.index.Stats().Blocks < blocks; i = (i + 1) % workers {
		buf = s.talk(i, buf)
	}
	return s
}

func (s *site) newSource(i int) *source {
	m := &s.members[i]
	role := index.Prefill
	if m.Role == fleet.Decode {
		role = index.Decode
	}
	return &source{Source: s.index.Add(index.Key{ID: m.ID, Epoch: m.Epoch}, "m", role), have: map[int]bool{}}
}

// talk stores one more conversation on a worker.
func (s *site) talk(worker int, buf []uint32) []uint32 {
	src, conv := s.sources[worker], s.next
	s.next++
	buf = tokensOf(buf, conv, (shared+own)*size)
	sys := conv % systems
	ev := kvevents.Event{BlockSize: size, Tokens: buf}
	from := 0
	if src.have[sys] {
		from = shared
		ev.Parent, ev.HasParent, ev.Tokens = src.hash(-1-sys, shared-1), true, buf[shared*size:]
	}
	for b := from; b < shared+own; b++ {
		id := conv
		if b < shared {
			id = -1 - sys
		}
		ev.Hashes = append(ev.Hashes, src.hash(id, b))
	}
	src.have[sys] = true
	src.convs = append(src.convs, conv)
	src.Apply(&kvevents.Batch{Events: []kvevents.Event{ev}})
	return buf
}

// drop removes a worker's oldest conversation.
func (s *site) drop(worker int) {
	src := s.sources[worker]
	if len(src.convs) < 2 {
		return
	}
	ev := kvevents.Event{Kind: kvevents.Removed}
	for b := shared; b < shared+own; b++ {
		ev.Hashes = append(ev.Hashes, src.hash(src.convs[0], b))
	}
	src.convs = src.convs[1:]
	src.Apply(&kvevents.Batch{Events: []kvevents.Event{ev}})
}

func (s *site) publish() {
	s.version++
	snap := fleet.NewSnapshot(s.version, time.Time{}, slices.Clone(s.members))
	s.snap.Store(snap)
	s.picker.Refresh(pick.View{Snapshot: snap})
}

// churn changes the fleet and the caches, at the same rate for every fleet,
// until stop: 20 changes of membership and 200 conversations come and gone a
// second, and in a fleet where that is a small part of it one whole restart.
func (s *site) churn(stop <-chan struct{}) {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	var buf []uint32
	for n := 0; ; n++ {
		select {
		case <-stop:
			return
		case <-tick.C:
		}
		w := s.rnd.IntN(s.workers)
		buf = s.talk(w, buf)
		s.drop(w)
		if n%10 == 0 {
			if m := &s.members[s.rnd.IntN(s.workers)]; m.Draining {
				m.Draining = false
				s.away--
			} else if s.away < s.workers/8 {
				m.Draining = true
				s.away++
			}
			s.publish()
		}
		if n%200 == 0 && s.workers >= 1000 {
			i := s.rnd.IntN(s.workers)
			before := len(s.sources[i].convs)
			s.sources[i].Remove()
			s.members[i].Epoch++
			s.sources[i] = s.newSource(i)
			s.publish()
			for range before {
				buf = s.talk(i, buf)
			}
		}
	}
}

// threadTime is the processor time of this thread: a choice's own work, also
// on a machine that others use. Waits for locks are in the wall clock's times.
func threadTime() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts); err != nil {
		return 0
	}
	return time.Duration(ts.Nano())
}

// measure makes picks and notes how long each took.
func (s *site) measure(n int, rnd *rand.Rand, held *[]*pick.Choice) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var buf []uint32
	newest := s.next
	for range n {
		conv := newest - 1 - rnd.IntN(newest*9/10)
		buf = tokensOf(buf, conv, (shared+own)*size-rnd.IntN(own*size)) // from an early turn to the last
		buf = append(buf, tokensOf(nil, 1<<40+conv, 40)...)
		start, cpu := time.Now(), threadTime()
		req := pick.Request{Model: "m", Tokens: len(buf), Output: 200, Seqs: 1, Tokenized: true}
		for _, h := range s.index.Match(&index.Query{Model: "m", Tokens: buf}) {
			req.Warm = append(req.Warm, pick.Warm{ID: h.Key.ID, Epoch: h.Key.Epoch, Tokens: float64(h.Total())})
		}
		c, err := s.picker.Pick(pick.View{Snapshot: s.snap.Load(), Behind: true}, &req)
		s.lat = append(s.lat, float64((threadTime()-cpu).Nanoseconds())/1e3)
		s.wall = append(s.wall, float64(time.Since(start).Nanoseconds())/1e3)
		if err != nil {
			return err
		}
		*held = append(*held, c)
		if len(*held) > 256 { // so many run at once
			old := (*held)[0]
			*held = (*held)[1:]
			old.EndPrefill()
			old.EndDecode()
		}
	}
	return nil
}

func heapInUse() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// TestScale measures choices among XPYD_PICK_WORKERS workers and an exact index of
// XPYD_PICK_BLOCKS blocks, beside the same with 8 workers; both with churn, in turns, for
// XPYD_PICK_ROUNDS rounds. It prints a line of JSON for each fleet and round, which
// `go run ./scripts/bench pick` reads.
func TestScale(t *testing.T) {
	var blocks int64
	var workers, rounds int
	for name, to := range map[string]any{"XPYD_PICK_BLOCKS": &blocks, "XPYD_PICK_WORKERS": &workers, "XPYD_PICK_ROUNDS": &rounds} {
		if os.Getenv(name) == "" {
			t.Skip(name + " is not set")
		}
		if _, err := fmt.Sscan(os.Getenv(name), to); err != nil {
			t.Fatal(err)
		}
	}
	var sites []*site
	for _, n := range []int{workers, 8} {
		before := heapInUse()
		s := newSite(n, blocks)
		for _, src := range s.sources { // the generator's own
			src.convs = slices.Clip(src.convs)
		}
		s.perBlock = float64(heapInUse()-before) / float64(s.index.Stats().Blocks)
		sites = append(sites, s)
	}
	rnd := rand.New(rand.NewPCG(3, 4))
	held := make([][]*pick.Choice, len(sites))
	out := json.NewEncoder(os.Stdout)
	for round := range rounds + 1 {
		for range 20 {
			for i, s := range sites {
				stop := make(chan struct{})
				var wg sync.WaitGroup
				wg.Go(func() { s.churn(stop) })
				err := s.measure(slice, rnd, &held[i])
				close(stop)
				wg.Wait()
				if err != nil {
					t.Fatal(err)
				}
			}
		}
		for _, s := range sites {
			if round > 0 { // the first one warms up
				mean := 0.0
				for _, l := range s.lat {
					mean += l / float64(len(s.lat))
				}
				if err := out.Encode(map[string]any{"workers": s.workers, "round": round, "mean_us": mean, "p99_us": figures.Quantile(s.lat, 0.99),
					"wall_p50_us": figures.Median(s.wall), "wall_p99_us": figures.Quantile(s.wall, 0.99), "bytes_per_block": s.perBlock}); err != nil {
					t.Fatal(err)
				}
			}
			s.lat, s.wall = s.lat[:0], s.wall[:0]
		}
	}
}
