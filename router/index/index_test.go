package index_test

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/xpyd/xpyd/internal/kvevents"
	"github.com/xpyd/xpyd/router/index"
)

// stored is a batch that stores the blocks of tokens from a block on. Engine
// hashes are salt plus the block's number plus 1.
func stored(tokens []uint32, size, from int, salt uint64, edit ...func(*kvevents.Event)) *kvevents.Batch {
	ev := kvevents.Event{BlockSize: size}
	if from > 0 {
		ev.Parent, ev.HasParent = salt+uint64(from), true
	}
	for i := from; (i+1)*size <= len(tokens); i++ {
		ev.Hashes = append(ev.Hashes, salt+uint64(i)+1)
		ev.Tokens = append(ev.Tokens, tokens[i*size:(i+1)*size]...)
	}
	for _, e := range edit {
		e(&ev)
	}
	return &kvevents.Batch{Events: []kvevents.Event{ev}}
}

func removed(tier kvevents.Tier, hashes ...uint64) *kvevents.Batch {
	return &kvevents.Batch{Events: []kvevents.Event{{Kind: kvevents.Removed, Hashes: hashes, Tier: tier}}}
}

func prompt(n int, seed uint64) []uint32 {
	rnd := rand.New(rand.NewPCG(seed, 1))
	out := make([]uint32, n)
	for i := range out {
		out[i] = rnd.Uint32N(50_000)
	}
	return out
}

// matched is what each worker holds of a prompt.
func matched(x *index.Index, q index.Query) map[string][kvevents.Tiers]int {
	out := map[string][kvevents.Tiers]int{}
	for _, h := range x.Match(&q) {
		out[h.Key.ID] = h.Tokens
	}
	return out
}

func want(t *testing.T, x *index.Index, q index.Query, want map[string][kvevents.Tiers]int) {
	t.Helper()
	if got := matched(x, q); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

type held = map[string][kvevents.Tiers]int

func TestMatch(t *testing.T) {
	x := index.New(1 << 20)
	a := x.Add(index.Key{ID: "a"}, "m", index.Prefill)
	b := x.Add(index.Key{ID: "b"}, "m", index.Decode)
	p := prompt(100, 1)
	a.Apply(stored(p, 16, 0, 1000))
	b.Apply(stored(p[:32], 16, 0, 7))
	q := index.Query{Model: "m", Tokens: p}
	want(t, x, q, held{"a": {96}, "b": {32}})
	want(t, x, index.Query{Model: "other", Tokens: p}, held{})
	want(t, x, index.Query{Model: "m", LoRA: "l", Tokens: p}, held{})
	want(t, x, index.Query{Model: "m", Salt: "s", Tokens: p}, held{})
	want(t, x, index.Query{Model: "m", Tokens: p[1:]}, held{})
	want(t, x, index.Query{Model: "m", Tokens: p[:15]}, held{})

	b.Apply(stored(p[:64], 16, 2, 7)) // goes on where it was
	want(t, x, q, held{"a": {96}, "b": {64}})
	b.Apply(stored(p, 16, 5, 99)) // of a parent that nobody knows
	want(t, x, q, held{"a": {96}, "b": {64}})
	if s := x.Stats(); s.Orphans != 1 || s.Blocks != 10 || s.Sources != 2 {
		t.Errorf("%+v", s)
	}

	a.Apply(removed(kvevents.GPU, 1003)) // a gap: what is behind is of no use
	want(t, x, q, held{"a": {32}, "b": {64}})
	a.Apply(stored(p[:48], 16, 2, 1000))
	want(t, x, q, held{"a": {96}, "b": {64}})
	a.Apply(&kvevents.Batch{Events: []kvevents.Event{{Kind: kvevents.Cleared}}})
	want(t, x, q, held{"b": {64}})
	b.Remove()
	b.Apply(stored(p, 16, 0, 7)) // too late
	want(t, x, q, held{})
	a.Remove()
	if s := x.Stats(); s.Blocks != 0 || s.Sources != 0 {
		t.Errorf("%+v", s)
	}
}

func TestTiers(t *testing.T) {
	x := index.New(1 << 20)
	a := x.Add(index.Key{ID: "a"}, "m", index.Prefill)
	p := prompt(64, 1)
	q := index.Query{Model: "m", Tokens: p}
	in := func(tier kvevents.Tier) func(*kvevents.Event) { return func(e *kvevents.Event) { e.Tier = tier } }
	a.Apply(stored(p, 16, 0, 0))
	a.Apply(stored(p[:32], 16, 0, 0, in(kvevents.Host)))
	want(t, x, q, held{"a": {64}})
	a.Apply(removed(kvevents.GPU, 1, 2, 3))
	want(t, x, q, held{"a": {0, 32}})
	a.Apply(stored(p[:48], 16, 2, 0, in(kvevents.Disk)))
	want(t, x, q, held{"a": {16, 32, 16}})
	a.Apply(removed(kvevents.Host, 1))
	want(t, x, q, held{})
}

// TestSizes: engines of different block sizes in one fleet, and one with a
// page a token.
func TestSizes(t *testing.T) {
	x := index.New(1 << 20)
	p := prompt(200, 1)
	for _, size := range []int{1, 4, 16, 24, 32, 64} {
		s := x.Add(index.Key{ID: fmt.Sprint(size)}, "m", index.Decode)
		s.Apply(stored(p[:len(p)/2/size*size], size, 0, 5))
		s.Apply(stored(p, size, len(p)/2/size, 5)) // in two events
	}
	want(t, x, index.Query{Model: "m", Tokens: p}, held{"1": {192}, "4": {192}, "16": {192}, "24": {192}, "32": {192}, "64": {192}})
}

// TestExtra: blocks that differ in what else they depend on are kept apart.
func TestExtra(t *testing.T) {
	x := index.New(1 << 20)
	p := prompt(64, 1)
	extra := func(e ...uint64) func(*kvevents.Event) { return func(ev *kvevents.Event) { ev.Extra = e } }
	add := func(id string, edit func(*kvevents.Event)) {
		x.Add(index.Key{ID: id}, "m", index.Prefill).Apply(stored(p, 16, 0, 0, edit))
	}
	add("plain", func(*kvevents.Event) {})
	add("salt", extra(kvevents.SaltExtra("s"), 0, 0, 0))
	add("picture", extra(0, 77, 0, 0))
	add("lora", func(ev *kvevents.Event) { ev.LoRA = "l" })
	add("window", func(ev *kvevents.Event) { ev.Group, ev.Window = 1, true })
	want(t, x, index.Query{Model: "m", Tokens: p}, held{"plain": {64}, "picture": {16}})
	want(t, x, index.Query{Model: "m", Salt: "s", Tokens: p}, held{"salt": {64}})
	want(t, x, index.Query{Model: "m", LoRA: "l", Tokens: p}, held{"lora": {64}})
	if x.Stats().Foreign != 4 {
		t.Errorf("%+v", x.Stats())
	}
}

// TestMany: of many holders the deepest come first, of both roles.
func TestMany(t *testing.T) {
	x := index.New(1 << 22)
	p := prompt(160, 1)
	for i := range 600 {
		role := index.Prefill
		if i%2 == 1 {
			role = index.Decode
		}
		s := x.Add(index.Key{ID: fmt.Sprint(i)}, "m", role)
		n := 64
		if i == 13 || i == 200 {
			n = 160
		}
		s.Apply(stored(p[:n], 16, 0, uint64(i)<<32))
	}
	got := x.Match(&index.Query{Model: "m", Tokens: p})
	roles := map[index.Role]int{}
	for _, h := range got {
		roles[h.Role]++
		if deep := h.Key.ID == "13" || h.Key.ID == "200"; deep != (h.Total() == 160) || !deep && h.Total() != 64 {
			t.Errorf("%+v", h)
		}
	}
	if roles[index.Prefill] != 8 || roles[index.Decode] != 8 {
		t.Errorf("%v", roles)
	}
	if m := matched(x, index.Query{Model: "m", Tokens: p}); m["13"][0] != 160 || m["200"][0] != 160 {
		t.Error("the deepest are missing")
	}
}

// TestRoomForWhatIsStored: an event evicts others' blocks only for what it
// stores, and stores no more than its share.
func TestRoomForWhatIsStored(t *testing.T) {
	const budget = 1 << 20
	x := index.New(budget)
	a, b := x.Add(index.Key{ID: "a"}, "m", index.Prefill), x.Add(index.Key{ID: "b"}, "m", index.Prefill)
	p := prompt(160, 1)
	a.Apply(stored(p, 16, 0, 1000))
	many := make([]uint64, 2*budget/index.BlockBytes)
	for i := range many {
		many[i] = uint64(1<<20 + i)
	}
	for _, ev := range []kvevents.Event{
		{Tier: kvevents.Host, Hashes: many},     // copies of what is not known
		{Tier: kvevents.Host, Hashes: many[:8]}, // and few of them
		{BlockSize: 1, Hashes: many, Tokens: make([]uint32, len(many))},
		{BlockSize: 1, Hashes: many, Tokens: make([]uint32, len(many)), HasParent: true, Parent: 7}, // of an unknown one
	} {
		b.Apply(&kvevents.Batch{Events: []kvevents.Event{ev}})
	}
	want(t, x, index.Query{Model: "m", Tokens: p}, held{"a": {160}})
	if s := x.Stats(); s.Blocks != 10 || s.Evicted != 0 || s.Foreign+s.Orphans != uint64(3*len(many)+8) {
		t.Errorf("%+v", s)
	}
}

// TestBudget: memory stays within the budget; what prompts ask for stays.
func TestBudget(t *testing.T) {
	const budget = 1 << 20
	x := index.New(budget)
	var sources []*index.Source
	for i := range 50 {
		sources = append(sources, x.Add(index.Key{ID: fmt.Sprint(i)}, "m", index.Prefill))
	}
	hot := prompt(320, 1<<40)
	sources[0].Apply(stored(hot, 16, 0, 1<<40))
	for i := range 2000 {
		sources[i%50].Apply(stored(prompt(800, uint64(i)), 16, 0, uint64(i)<<20))
		x.Match(&index.Query{Model: "m", Tokens: hot}) // each time: victims are drawn, and one source may be for some times
		if s := x.Stats(); s.Blocks > budget/index.BlockBytes || s.Bytes > budget+1024*128 {
			t.Fatalf("%+v", s)
		}
	}
	if x.Stats().Evicted == 0 {
		t.Error("nothing was evicted")
	}
	want(t, x, index.Query{Model: "m", Tokens: hot}, held{"0": {320}})
}

// TestAgainstModel drives random events, and compares with a plain map of
// what each source holds.
func TestAgainstModel(t *testing.T) {
	rnd := rand.New(rand.NewPCG(5, 6))
	x := index.New(1 << 24)
	const size, blocks, families = 16, 12, 6
	prompts := make([][]uint32, families)
	for i := range prompts {
		prompts[i] = append(prompt(size*4, uint64(i/3)), prompt(size*(blocks-4), uint64(100+i))...)
	}
	type source struct {
		*index.Source
		id   string
		has  map[uint64]uint64 // engine hash → tiers
		salt uint64
	}
	var sources []*source
	name := 0
	// hash names a block: families share their first four.
	hash := func(s *source, family, block int) uint64 {
		if block < 4 {
			family = family / 3 * 3
		}
		return s.salt + uint64(family*100+block) + 1
	}
	for range 6000 {
		switch op := rnd.IntN(100); {
		case len(sources) < 40 && op < 5:
			s := &source{id: fmt.Sprint(name), has: map[uint64]uint64{}, salt: rnd.Uint64()}
			name++
			s.Source = x.Add(index.Key{ID: s.id}, "m", index.Prefill)
			sources = append(sources, s)
		case len(sources) == 0:
		case op < 7:
			i := rnd.IntN(len(sources))
			sources[i].Remove()
			sources = append(sources[:i], sources[i+1:]...)
		case op < 9:
			s := sources[rnd.IntN(len(sources))]
			s.Reset("")
			clear(s.has)
		case op < 60:
			s, f, tier := sources[rnd.IntN(len(sources))], rnd.IntN(families), rnd.IntN(3)
			from, to := 0, 1+rnd.IntN(blocks)
			for from < to-1 && rnd.IntN(2) == 0 && s.has[hash(s, f, from)] != 0 {
				from++
			}
			ev := kvevents.Event{BlockSize: size, Tier: kvevents.Tier(tier), Tokens: prompts[f][from*size : to*size]}
			if from > 0 {
				ev.Parent, ev.HasParent = hash(s, f, from-1), true
			}
			for b := from; b < to; b++ {
				ev.Hashes = append(ev.Hashes, hash(s, f, b))
				s.has[hash(s, f, b)] |= 1 << tier
			}
			s.Apply(&kvevents.Batch{Events: []kvevents.Event{ev}})
		default:
			s, tier := sources[rnd.IntN(len(sources))], rnd.IntN(3)
			h := hash(s, rnd.IntN(families), rnd.IntN(blocks))
			s.Apply(removed(kvevents.Tier(tier), h))
			if s.has[h] &^= 1 << tier; s.has[h] == 0 {
				delete(s.has, h)
			}
		}
		f := rnd.IntN(families)
		got := matched(x, index.Query{Model: "m", Tokens: prompts[f]})
		total, best, seen := 0, 0, 0
		for _, s := range sources {
			var tokens [kvevents.Tiers]int
			for b := range blocks {
				tiers := s.has[hash(s, f, b)]
				if tiers == 0 {
					break
				}
				for t := range kvevents.Tiers {
					if tiers>>t&1 != 0 {
						tokens[t] += size
						break
					}
				}
			}
			total += len(s.has)
			sum := tokens[0] + tokens[1] + tokens[2]
			if best = max(best, sum); got[s.id] != [kvevents.Tiers]int{} {
				seen = max(seen, sum)
				if got[s.id] != tokens {
					t.Fatalf("source %s: %v, want %v", s.id, got[s.id], tokens)
				}
			}
		}
		if n := x.Stats().Blocks; int(n) != total {
			t.Fatalf("%d blocks, want %d", n, total)
		}
		// With gaps the deepest may hide behind ones that look deeper.
		if len(sources) <= 8 && seen != best {
			t.Fatalf("best is %d, found %d", best, seen)
		}
	}
	for _, s := range sources {
		s.Remove()
	}
	if s := x.Stats(); s.Blocks != 0 || s.Sources != 0 {
		t.Errorf("%+v", s)
	}
}

// TestConcurrent is for the race detector.
func TestConcurrent(t *testing.T) {
	x := index.New(1 << 18)
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for round := range 20 {
				s := x.Add(index.Key{ID: fmt.Sprint(w), Epoch: uint64(round)}, "m", index.Prefill)
				for i := range 40 {
					s.Apply(stored(prompt(320, uint64(i)), 16, 0, uint64(i)<<20))
					s.Apply(removed(kvevents.GPU, uint64(i)<<20+3))
				}
				s.Remove()
			}
		})
	}
	wg.Go(func() {
		for i := range 2000 {
			x.Match(&index.Query{Model: "m", Tokens: prompt(320, uint64(i%40))})
			x.Stats()
		}
	})
	wg.Wait()
	if s := x.Stats(); s.Blocks != 0 || s.Sources != 0 {
		t.Errorf("%+v", s)
	}
}
