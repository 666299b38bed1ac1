package tier

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/kernels"
)

// link collects from other rigs as kvconn does: unit by unit, each verified,
// and what has come before a fault stays.
type link struct {
	to    *rig
	peers map[string]*Peers // of the others, by id
	pools map[string]*rig
	fault func() string // of the next fetch: "", "wrong", "short", "dead", "lie"

	mu    sync.Mutex
	calls int
	block chan struct{} // when set, a fetch waits for it
}

var errDead = errors.New("the peer is gone")

func (l *link) Collect(ctx context.Context, f *Fetch) (int, error) {
	l.mu.Lock()
	l.calls++
	block := l.block
	l.mu.Unlock()
	if block != nil {
		select {
		case <-block:
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
	fault := ""
	if l.fault != nil {
		fault = l.fault()
	}
	giver, from := l.peers[f.Peer.ID], l.pools[f.Peer.ID]
	if giver == nil || fault == "dead" {
		return 0, errDead
	}
	c := l.to.cache
	unit := c.UnitTokens()
	chain := c.NewChain(f.Salt)
	chain.Extend(f.Tokens[:f.Upto])
	upto := f.Upto / unit * unit
	have := c.Reach(&chain, upto)
	if f.Peer.URL != "" && fault != "lie" {
		var units []kvcache.Hash
		for at := have + unit; at <= upto; at += unit {
			units = append(units, chain.Name(at))
		}
		asked, err := ParseReach(AppendReach(nil, units))
		if len(units) > 0 && (err != nil || !slices.Equal(asked, units)) {
			return 0, fmt.Errorf("reach: %v", err)
		}
		n, err := ParseReached(AppendReached(nil, giver.Reach(asked)), len(units))
		if err != nil {
			return 0, err
		}
		upto = have + n*unit
	}
	upto = min(upto, have+f.Blocks*c.BlockTokens()/unit*unit)
	if upto-have < f.Least {
		return 0, nil
	}
	theirs, release, err := giver.Give(ctx, &Asked{Peer: "test", Trusted: true, Tokens: f.Tokens[:upto], Salt: f.Salt, Bytes: 1})
	if err != nil {
		return 0, fmt.Errorf("%w: %w", ErrBusy, err)
	}
	defer release()
	table, have, err := c.Borrow(&chain, upto, f.Blocks, f.Owner)
	if err != nil {
		return 0, fmt.Errorf("%w: %w", ErrBusy, err)
	}
	defer c.ReleaseAll(f.Owner)
	layout, good := l.to.pool.layout, have/c.BlockTokens()
	for i := good; i < len(table); i++ {
		if fault == "short" && i == len(table)-1 {
			err = errDead
			break
		}
		rows, sums, want := make([]byte, layout.Resolve()[0].BlockBytes()), make([]uint64, layout.Resolve()[0].Heads), make([]uint64, layout.Resolve()[0].Heads)
		ok := true
		for layer := range layout.Layers() {
			from.pool.Gather(layer, theirs[i], 0, layout.BlockTokens, rows)
			from.pool.Digest(layer, theirs[i], want)
			if fault == "wrong" && i%2 == 1 {
				rows[3] ^= 4
			}
			kernels.DigestRows(&layout.Resolve()[layer], i*layout.BlockTokens, layout.BlockTokens, rows, sums)
			ok = ok && slices.Equal(sums, want)
			l.to.pool.Scatter(layer, table[i], 0, layout.BlockTokens, rows)
			l.to.pool.SetDigest(layer, table[i], layout.BlockTokens, sums)
		}
		if !ok {
			err = ErrCorrupt
			break
		}
		good = i + 1
	}
	n := c.InsertChain(&chain, f.Tokens[:good*c.BlockTokens()], table[:good], have) - have
	return n, err
}

func peersConfig() PeersConfig {
	return PeersConfig{LoadTimeout: patience, MinLoadTokens: 16, FetchBlocks: 48, GiveBlocks: 48, BlockBytes: 1}
}

// join makes peers of rigs: each can fetch from all others.
func join(t *testing.T, cfg PeersConfig, bare bool, rigs ...*rig) ([]*Peers, []*link) {
	t.Helper()
	peers, links := make([]*Peers, len(rigs)), make([]*link, len(rigs))
	for i, r := range rigs {
		links[i] = &link{to: r, peers: map[string]*Peers{}, pools: map[string]*rig{}}
		tiers, reg := r.tiers, prometheus.Registerer(r.reg)
		if bare {
			tiers, reg = nil, prometheus.NewRegistry()
		}
		var err error
		if peers[i], err = NewPeers(cfg, r.cache, tiers, links[i], slog.New(slog.DiscardHandler), reg); err != nil {
			t.Fatal(err)
		}
	}
	for i := range rigs {
		for j := range rigs {
			if i != j {
				id := fmt.Sprint(j)
				links[i].peers[id], links[i].pools[id] = peers[j], rigs[j]
			}
		}
	}
	return peers, links
}

// at is rig n as a peer.
func at(n, tokens int) Peer { return Peer{ID: fmt.Sprint(n), URL: "x", Tokens: tokens} }

// TestPeers: a fetch brings what a peer has, from its pool and from the tiers
// under it; it is made once for all who want the same, not at all when it is
// not worth it, and from the next one when the first has failed.
func TestPeers(t *testing.T) {
	r, giver, other := newRig(t, config("")), newRig(t, config("")), newRig(t, config(""))
	peers, links := join(t, peersConfig(), false, r, giver, other)
	long := prompt(1, 16*10)
	if _, err := giver.compute(long, "", "run"); err != nil {
		t.Fatal(err)
	}
	giver.quiet()
	giver.cache.Clear() // host memory has it
	if n := peers[0].Load(t.Context(), "r", long, "", len(long), []Peer{at(9, 160), at(1, 160)}); n != 160 {
		t.Fatalf("%d tokens", n)
	}
	r.run(long, 160)
	if calls := links[0].calls; calls != 2 || len(peers[0].Stats().Shut) != 1 {
		t.Errorf("%d fetches, %+v", calls, peers[0].Stats())
	}
	for _, list := range [][]Peer{nil, {at(1, 160)}, {at(1, 15)}, {at(9, 400)}} {
		if n := peers[0].Load(t.Context(), "r", long, "", len(long), list); n != 0 || links[0].calls != 2 {
			t.Errorf("%v: %d tokens, %d fetches", list, n, links[0].calls)
		}
	}
	if n := peers[0].Load(t.Context(), "r", long, "salt", len(long), []Peer{at(1, 160)}); n != 0 {
		t.Errorf("%d tokens under another salt", n)
	}
	if s := peers[0].Stats(); s.Fetching != 0 || peers[1].Stats().Giving != 0 {
		t.Errorf("%+v %+v", s, peers[1].Stats())
	}
	if v, n := r.value("loaded_units_total", "peer"), r.value("loaded_tokens_total", ""); v != 10 || n != 160 {
		t.Errorf("%v units, %v tokens", v, n)
	}

	// 50 at a time, one fetch.
	if _, err := other.compute(prompt(200, 64), "", "run"); err != nil {
		t.Fatal(err)
	}
	links[0].block, links[0].calls = make(chan struct{}), 0
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() { peers[0].Load(t.Context(), "r", prompt(200, 64), "", 64, []Peer{at(2, 64)}) })
	}
	close(links[0].block)
	wg.Wait()
	r.run(prompt(200, 64), 64)
	if links[0].calls != 1 {
		t.Errorf("%d fetches for 50 requests", links[0].calls)
	}
}

// TestFollow: what a stream has at a peer comes in pieces, a single unit too; what has come stays, and
// it ends where the peer has no more or fails.
func TestFollow(t *testing.T) {
	r, giver := newRig(t, config("")), newRig(t, config(""))
	cfg := peersConfig()
	cfg.MinLoadTokens, cfg.BlockBytes = 64, pieceBytes/2
	peers, links := join(t, cfg, true, r, giver)
	stream := prompt(1, 16*7+5)
	follow := func(tokens, want, calls int) {
		t.Helper()
		links[0].calls = 0
		if n := peers[0].Follow(t.Context(), "r", stream[:tokens], "", []Peer{at(1, 1<<20)}); n != want || links[0].calls != calls {
			t.Errorf("of %d tokens %d came in %d fetches, want %d in %d", tokens, n, links[0].calls, want, calls)
		}
	}
	if _, err := giver.compute(stream[:16*5], "", "run"); err != nil {
		t.Fatal(err)
	}
	follow(15, 0, 0)
	follow(16*3+2, 48, 2)
	follow(16*4, 16, 1)
	follow(16*4+1, 0, 0)
	follow(len(stream), 16, 2) // the peer says that it has no more
	if _, err := giver.compute(stream, "", "run"); err != nil {
		t.Fatal(err)
	}
	follow(len(stream), 32, 1)
	r.run(stream, 16*7)

	second := prompt(500, 16*6)
	if _, err := giver.compute(second, "", "run"); err != nil {
		t.Fatal(err)
	}
	stream = second
	links[0].fault = func() string {
		if links[0].calls == 2 {
			return "wrong"
		}
		return ""
	}
	follow(len(stream), 48, 2) // the first piece, and one unit of the second
	links[0].fault = nil
	follow(len(stream), 0, 0) // it is left alone for a while
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if n := peers[0].Follow(ctx, "r", stream, "", []Peer{at(1, 1<<20)}); n != 0 {
		t.Errorf("%d tokens after its end", n)
	}
	if s := peers[0].Stats(); s.Fetching != 0 || peers[1].Stats().Giving != 0 {
		t.Errorf("%+v %+v", s, peers[1].Stats())
	}
}

// TestPeersBounds: what may be fetched and given at a time, and to whom.
func TestPeersBounds(t *testing.T) {
	r, giver := newRig(t, config("")), newRig(t, config(""))
	cfg := peersConfig()
	cfg.FetchBlocks, cfg.GiveBlocks, cfg.GiveQuota = 4, 8, 1
	peers, _ := join(t, cfg, true, r, giver)
	long := prompt(1, 160)
	if _, err := giver.compute(long, "", "run"); err != nil {
		t.Fatal(err)
	}
	giver.quiet() // its saver holds blocks too
	if n := peers[0].Load(t.Context(), "r", long, "", 160, []Peer{at(1, 160)}); n != 64 {
		t.Errorf("%d tokens in 4 blocks", n)
	}
	f := func(name string, a Asked, want error) {
		t.Helper()
		a.Tokens = long[:len(a.Tokens)]
		blocks, release, err := peers[1].Give(t.Context(), &a)
		if !errors.Is(err, want) || (err == nil) != (blocks != nil) {
			t.Errorf("%s: %v, %v", name, blocks, err)
		}
		if release != nil {
			release()
		}
	}
	tokens := func(n int) []int32 { return long[:n] }
	f("absent", Asked{Tokens: tokens(32), Bytes: 1 << 40, Salt: "s", Trusted: true}, ErrAbsent) // costs nothing
	f("within the quota", Asked{Tokens: tokens(32), Bytes: 1 << 40}, nil)
	f("quota", Asked{Tokens: tokens(32), Bytes: 1}, ErrEnough)
	peers[1].giveaway.rate = 0
	f("whole", Asked{Tokens: tokens(32)}, nil)
	f("blocks", Asked{Tokens: tokens(144)}, ErrEnough)
	f("no unit", Asked{Tokens: tokens(20)}, ErrAbsent)
	f("nothing", Asked{Tokens: tokens(0)}, ErrAbsent)
	f("a salt", Asked{Tokens: tokens(32), Salt: "s"}, ErrAbsent)
	f("a salt that is absent", Asked{Tokens: tokens(32), Salt: "s", Trusted: true}, ErrAbsent)
	if held := giver.cache.Holders(); len(held) > 0 || peers[1].Stats().Giving != 0 {
		t.Errorf("held: %+v", held)
	}
	blocks, release, err := peers[1].Give(t.Context(), &Asked{Peer: "p", Tokens: tokens(96)})
	if err != nil || len(blocks) != 6 {
		t.Fatal(blocks, err)
	}
	if held := giver.cache.Holders(); len(held) != 1 || !strings.HasSuffix(held[0].Owner, " to p") {
		t.Errorf("%+v", held)
	}
	f("blocks that are held", Asked{Tokens: tokens(48)}, ErrEnough)
	release()
}

// TestGuards: a peer that failed is left alone, longer each time; then one
// fetch tries it.
func TestGuards(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var g guards
		a := guardKey{"a", 1}
		fail := func() {
			t.Helper()
			done, ok := g.enter(a, time.Now())
			if !ok {
				t.Fatal("shut")
			}
			done(false, errDead, time.Now())
		}
		shut := func() bool {
			done, ok := g.enter(a, time.Now())
			if ok {
				done(true, nil, time.Now())
			}
			return !ok
		}
		for _, pause := range []time.Duration{1, 2, 4, 8, 16, 30, 30} {
			fail()
			time.Sleep(pause*time.Second - time.Nanosecond)
			if !shut() {
				t.Fatalf("open before %ds are over", pause)
			}
			time.Sleep(time.Nanosecond)
		}
		done, ok := g.enter(a, time.Now())
		if _, second := g.enter(a, time.Now()); !ok || second {
			t.Errorf("tried %t, twice %t", ok, second)
		}
		if _, ok := g.enter(guardKey{"a", 2}, time.Now()); !ok {
			t.Error("another run is shut too")
		}
		done(true, nil, time.Now())
		if shut() || len(g.shut(time.Now())) != 0 {
			t.Error("still shut")
		}
		both := [2]func(bool, error, time.Time){}
		for i := range both { // at the same time
			both[i], _ = g.enter(a, time.Now())
		}
		for _, done := range both {
			done(false, errDead, time.Now())
		}
		if s := g.shut(time.Now()); s[a].failures != 1 {
			t.Errorf("%+v", s)
		}
		for i := range 2 * guardsMost { // bounded
			done, _ := g.enter(guardKey{"x", uint64(i)}, time.Now())
			done(false, errDead, time.Now())
		}
		if len(g.m) > guardsMost {
			t.Errorf("%d peers are remembered", len(g.m))
		}
	})
}

// TestGuardsNeutral: what says nothing about a peer, such as a request that leaves or a
// lack of room, does not change its guard, and the next fetch may try.
func TestGuardsNeutral(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var g guards
		a := guardKey{"a", 1}
		enter := func() func(bool, error, time.Time) {
			t.Helper()
			over, ok := g.enter(a, time.Now())
			if !ok {
				t.Fatal("shut")
			}
			return over
		}
		enter()(false, nil, time.Now())
		first, second := enter(), enter() // at the same time: one fails, the other's client leaves
		first(false, errDead, time.Now())
		second(false, nil, time.Now())
		if g.open(a, time.Now()) {
			t.Error("open right after a failure")
		}
		for range 3 {
			time.Sleep(guardFirst)
			enter()(false, nil, time.Now())
		}
		if b := g.m[a]; b == nil || b.failures != 1 || b.trying {
			t.Errorf("%+v, want one failure remembered", b)
		}
		enter()(false, errDead, time.Now())
		time.Sleep(2*guardFirst - 1)
		if g.open(a, time.Now()) {
			t.Error("the second failure in a row counted as a first")
		}
		time.Sleep(time.Nanosecond)
		enter()(true, nil, time.Now())
		if len(g.m) != 0 {
			t.Error("what came did not end it")
		}
	})
}

// TestPeersNoRoom: a lack of blocks here does not count against the peer, and what was
// not fetched costs no quota.
func TestPeersNoRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := config("")
		cfg.LoadQuota = 10 // one fetch: blocks count as a byte each
		r, giver := newRig(t, cfg), newRig(t, config(""))
		defer r.close()
		defer giver.close()
		peers, links := join(t, peersConfig(), false, r, giver)
		p, fault := peers[0], "dead"
		links[0].fault = func() string { return fault }
		giver.run(prompt(1, 160), 0)
		fetch := func(want int) {
			t.Helper()
			if n := p.Load(t.Context(), "r", prompt(1, 160), "", 160, []Peer{at(1, 160)}); n != want {
				t.Errorf("%d tokens, want %d", n, want)
			}
		}
		fetch(0)
		b := p.guards.m[guardKey{"1", 0}]
		time.Sleep(guardFirst - 1)
		fetch(0) // left alone
		time.Sleep(time.Nanosecond)
		r.tiers.settle(1 << 20) // other loads have all blocks
		fetch(0)
		r.tiers.settle(-1 << 20)
		if p.guards.m[guardKey{"1", 0}] != b || b.failures != 1 || b.trying || links[0].calls != 1 {
			t.Errorf("%+v after %d fetches", b, links[0].calls)
		}
		fault = ""
		fetch(160)
		if len(p.guards.m) != 0 {
			t.Error("what came did not end it")
		}
	})
}

// TestGiveNoRoom: blocks that are held anyway are given even if somebody waits for
// blocks; if more would have to be held, the peer is told that there is no room, not that
// nothing is here.
func TestGiveNoRoom(t *testing.T) {
	for _, where := range []string{"pool", "host"} {
		t.Run(where, func(t *testing.T) {
			r := newRig(t, config(""))
			peers, _ := join(t, peersConfig(), false, r)
			tokens := prompt(1, 160)
			r.run(tokens, 0)
			r.quiet()
			chain := r.cache.NewChain("")
			chain.Extend(tokens)
			owner := "a ticket"
			ids, _ := r.cache.HoldChain(&chain, 160, owner)
			if _, err := r.cache.Alloc(50, "running"); err != nil || ids == nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			over := make(chan struct{})
			go func() {
				defer close(over)
				_, _, _ = r.cache.ReserveWait(ctx, &kvcache.Chain{}, 0, 30, "waits")
			}()
			soon(t, "somebody waits", func() bool { return r.cache.Stats().Waiters == 1 })
			give := func() error {
				_, release, err := peers[0].Give(t.Context(), &Asked{Peer: "x", Tokens: tokens, Bytes: 1})
				if err == nil {
					release()
				}
				return err
			}
			if err := give(); err != nil {
				t.Errorf("all blocks are held already: %v", err)
			}
			if where == "pool" {
				r.cache.Release(ids[1:], owner)
			} else {
				r.cache.Release(ids, owner)
				r.cache.Clear()
			}
			if err := give(); !errors.Is(err, ErrEnough) || r.value("peer_refused_total", "room") != 1 {
				t.Errorf("no room to hold them: %v", err)
			}
			r.host.Clear()
			if where == "host" {
				if err := give(); !errors.Is(err, ErrAbsent) {
					t.Errorf("it is nowhere: %v", err)
				}
			}
			cancel()
			<-over
			r.cache.ReleaseAll("running")
			r.cache.ReleaseAll(owner)
		})
	}
}

// TestRandomPeers does 10,000 random things with three workers that fetch from each other
// and do harm. After each one all books are consistent, nothing is held, and every
// indexed row is what its tokens make.
func TestRandomPeers(t *testing.T) {
	if bulk {
		return // what peers send does not pass through the mover
	}
	t.Parallel()
	gen := rand.New(rand.NewPCG(8, 8))
	cfg := config("")
	cfg.HostBytes, cfg.LoadBlocks = 24*page, 32
	rigs := []*rig{newRig(t, cfg), newRig(t, cfg), newRig(t, cfg)}
	pc := peersConfig()
	peers, links := join(t, pc, false, rigs...)
	faults := []string{"", "", "", "", "wrong", "short", "dead", "lie"}
	seen, fetched := map[string]int{}, 0
	for _, l := range links {
		l.fault = func() string {
			f := faults[gen.IntN(len(faults))]
			seen[f]++
			return f
		}
	}
	for i := range rounds() {
		who := gen.IntN(len(rigs))
		r := rigs[who]
		tokens := prompt(gen.IntN(64), 16*(1+gen.IntN(8)))
		salt := []string{"", "", "another"}[gen.IntN(3)]
		switch op := gen.IntN(16); op {
		case 0:
			r.cache.Clear()
		case 1:
			r.host.Clear()
		case 2:
			ids, err := r.cache.Alloc(1+gen.IntN(64), "storm")
			if err == nil {
				r.cache.Release(ids, "storm")
			}
		case 3:
			peers[who].guards.mu.Lock()
			clear(peers[who].guards.m) // time goes by
			peers[who].guards.mu.Unlock()
		case 4, 5, 6, 7, 8, 9:
			list := []Peer{at(0, 16*gen.IntN(9)), at(1, 16*gen.IntN(9)), at(2, 16*gen.IntN(9))}
			list = slices.Delete(list, who, who+1)
			n := peers[who].Load(t.Context(), "r", tokens, salt, len(tokens), list)
			fetched += n
			chain := r.cache.NewChain(salt)
			chain.Extend(tokens)
			if reach := r.cache.Reach(&chain, len(tokens)); n > reach {
				t.Fatalf("operation %d: %d tokens fetched, %d there", i, n, reach)
			}
			fallthrough
		default:
			if _, err := r.compute(tokens, salt, "run"); err != nil && !errors.Is(err, kvcache.ErrNoSpace) {
				t.Fatalf("operation %d: %v", i, err)
			}
		}
		for j, r := range rigs {
			err := errors.Join(r.cache.Check(), r.host.Check(nil))
			for _, h := range r.cache.Holders() {
				if h.Owner != saveOwner { // the saver's own turn
					err = errors.Join(err, fmt.Errorf("held: %+v", h))
				}
			}
			if s := peers[j].Stats(); s.Fetching != 0 || s.Giving != 0 {
				err = errors.Join(err, fmt.Errorf("%+v", s))
			}
			if err != nil {
				t.Fatalf("operation %d, worker %d: %v", i, j, err)
			}
		}
	}
	t.Log("faults", seen, "tokens fetched", fetched)
	if len(seen) != 5 || fetched < rounds()/2 {
		t.Error("the test tests little")
	}
}

// TestShutPeers: peers that failed are listed by name while they are left alone.
func TestShutPeers(t *testing.T) {
	var none *Peers
	if none.Stats() != nil {
		t.Error("of no peers")
	}
	p, now := &Peers{}, time.Now()
	for _, id := range []string{"c", "a", "d", "b"} {
		p.guards.done(guardKey{id, 7}, false, errors.New("broke "+id), now)
	}
	p.guards.done(guardKey{"d", 7}, true, nil, now)
	s := p.Stats()
	if len(s.Shut) != 3 {
		t.Fatalf("%+v", s)
	}
	for i, id := range []string{"a", "b", "c"} {
		if x := s.Shut[i]; x.ID != id || x.Epoch != 7 || x.Failures != 1 || !x.Until.After(now) || x.LastError != "broke "+id {
			t.Errorf("%+v", x)
		}
	}
}
