package tier

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// TestConfigs: each bound of the settings, just within and just outside.
func TestConfigs(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Config)
		ok     bool
	}{
		"as it is":            {func(*Config) {}, true},
		"through":             {func(c *Config) { c.Write = Through }, true},
		"back":                {func(c *Config) { c.Write = Back }, true},
		"selective":           {func(c *Config) { c.Write, c.WriteHits = Selective, 1 }, true},
		"selective, 0 hits":   {func(c *Config) { c.Write, c.WriteHits = Selective, 0 }, false},
		"another policy":      {func(c *Config) { c.Write = "x" }, false},
		"ttl":                 {func(c *Config) { c.TTL = -1 }, false},
		"quota":               {func(c *Config) { c.LoadQuota = -1 }, false},
		"no pins":             {func(c *Config) { c.PinShare = 0 }, true},
		"half of pins":        {func(c *Config) { c.PinShare = 0.5 }, true},
		"more of pins":        {func(c *Config) { c.PinShare = 0.51 }, false},
		"less than no pins":   {func(c *Config) { c.PinShare = -0.1 }, false},
		"all for a tenant":    {func(c *Config) { c.TenantShare = 1 }, true},
		"more than all":       {func(c *Config) { c.TenantShare = 1.1 }, false},
		"less than nothing":   {func(c *Config) { c.TenantShare = -0.1 }, false},
		"no time":             {func(c *Config) { c.LoadTimeout = 0 }, false},
		"a moment":            {func(c *Config) { c.LoadTimeout = 1 }, true},
		"least":               {func(c *Config) { c.MinLoadTokens = -1 }, false},
		"no blocks":           {func(c *Config) { c.LoadBlocks = 0 }, false},
		"one block":           {func(c *Config) { c.LoadBlocks = 1 }, true},
		"not a number, pins":  {func(c *Config) { c.PinShare = nan() }, false},
		"not a number, share": {func(c *Config) { c.TenantShare = nan() }, false},
	} {
		cfg := Config{LoadTimeout: time.Second, LoadBlocks: 8}
		if c.change(&cfg); (cfg.Validate() == nil) != c.ok {
			t.Errorf("%s: %v", name, cfg.Validate())
		}
	}
	if _, err := New(t.Context(), Config{}, nil, 1, nil, nil); err == nil {
		t.Error("tiers of a configuration that is not valid")
	}
	r := newRig(t, config(""))
	for name, c := range map[string]struct {
		change func(*PeersConfig)
		ok     bool
	}{
		"as it is":     {func(*PeersConfig) {}, true},
		"no time":      {func(c *PeersConfig) { c.LoadTimeout = 0 }, false},
		"least":        {func(c *PeersConfig) { c.MinLoadTokens = -1 }, false},
		"nothing":      {func(c *PeersConfig) { c.MinLoadTokens = 0 }, true},
		"no blocks":    {func(c *PeersConfig) { c.FetchBlocks = 0 }, false},
		"one block":    {func(c *PeersConfig) { c.FetchBlocks = 1 }, true},
		"none given":   {func(c *PeersConfig) { c.GiveBlocks = 0 }, false},
		"one given":    {func(c *PeersConfig) { c.GiveBlocks = 1 }, true},
		"fetch quota":  {func(c *PeersConfig) { c.FetchQuota = -1 }, false},
		"give quota":   {func(c *PeersConfig) { c.GiveQuota = -1 }, false},
		"empty blocks": {func(c *PeersConfig) { c.BlockBytes = 0 }, false},
	} {
		cfg := peersConfig()
		c.change(&cfg)
		if _, err := NewPeers(cfg, r.cache, nil, nil, r.tiers.log, prometheus.NewRegistry()); (err == nil) != c.ok {
			t.Errorf("peers, %s: %v", name, err)
		}
	}
}

func nan() float64 { var zero float64; return zero / zero }

// TestBucket: it holds a second's worth, or one thing that is larger, and what is given back.
func TestBucket(t *testing.T) {
	now := time.Unix(1e6, 0)
	b := bucket{rate: 100}
	take := func(after float64, n, bytes, want int) {
		t.Helper()
		now = now.Add(time.Duration(after * float64(time.Second)))
		if got := b.take(n, bytes, now); got != want {
			t.Errorf("%d of %d things of %d bytes, want %d", got, n, bytes, want)
		}
	}
	take(0, 3, 40, 2)    // 20 are left
	take(0, 1, 40, 0)    //
	take(0.2, 1, 40, 1)  // 0
	take(10, 9, 10, 9)   // 10: no more than a second's worth had come
	take(0, 1, 10, 1)    // 0
	b.credit(3, 10)      // 30
	take(0, 9, 10, 3)    // 0
	b.credit(20, 10)     // 100, and no more
	take(0, 20, 10, 10)  // 0
	take(1, 1, 250, 0)   // 100, and a thing of more bytes comes when there is enough
	take(1.5, 1, 250, 1) // 0
	b.credit(1, 250)     // 250
	take(0, 2, 250, 1)   // 0
	take(0.5, 0, 10, 0)
	take(0, -1, 10, 0)

	spend := func(after float64, bytes int64, want bool) {
		t.Helper()
		now = now.Add(time.Duration(after * float64(time.Second)))
		if got := b.spend(bytes, now); got != want {
			t.Errorf("%d bytes spent: %t", bytes, got)
		}
	}
	b = bucket{rate: 100}
	spend(0, 250, true) // it may overdraw
	spend(0, 1, false)
	spend(1.5, 1, false) // 0
	spend(0.1, 10, true)
	spend(0, 1, false)
	free := bucket{}
	if free.take(7, 1<<40, now) != 7 || !free.spend(1<<60, now) || !free.spend(1<<60, now) {
		t.Error("a bucket without a rate limits")
	}
	if free.credit(1, 1); free.have != 0 {
		t.Errorf("a bucket without a rate has %v", free.have)
	}
}

// TestAfford: a load is cut short, and counted, only if kv.load_quota has less than it wants.
func TestAfford(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := config("")
		cfg.LoadQuota = 4 * page // four units a second
		r := newRig(t, cfg)
		defer r.close()
		for _, c := range []struct {
			after     time.Duration
			want, got int
			short     float64 // loads, so far
		}{{0, 0, 0, 0}, {0, 3, 3, 0}, {0, 1, 1, 0}, {0, 0, 0, 0}, {0, 1, 0, 1}, {time.Second, 5, 4, 2}, {time.Second, 4, 4, 2}, {time.Second / 2, 9, 2, 3}} {
			time.Sleep(c.after)
			r.tiers.mu.Lock()
			got := r.tiers.afford(c.want)
			r.tiers.mu.Unlock()
			if short := r.value("no_quota_total", ""); got != c.got || short != c.short {
				t.Errorf("%+v: %d units, %v loads cut short", c, got, short)
			}
		}
	})
}

// TestFetchOutcomes: what the end of a fetch is counted as, what it says of the peer, and whether
// what did not move costs anything.
func TestFetchOutcomes(t *testing.T) {
	for _, c := range []struct {
		tokens   int
		err      error
		result   string
		failures int     // of the peer, that had failed once before
		left     float64 // of 10 bytes, for a fetch of 8 blocks of one
	}{
		{128, nil, "done", 0, 2},
		{64, nil, "done", 0, 6},
		{0, nil, "nothing", 1, 10},
		{0, ErrAbsent, "nothing", 1, 10},
		{0, ErrBusy, "no_room", 1, 10},
		{0, context.Canceled, "cancelled", 1, 2},
		{16, ErrCorrupt, "corrupt", 2, 2},
		{0, errDead, "failed", 2, 2},
		{32, errDead, "failed", 2, 2},
	} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, config(""))
			defer r.close()
			cfg := peersConfig()
			cfg.FetchQuota, cfg.FetchBlocks = 10, 8
			reg := prometheus.NewRegistry()
			p, err := NewPeers(cfg, r.cache, nil, nil, r.tiers.log, reg)
			if err != nil {
				t.Fatal(err)
			}
			fetch := func() *Fetch { return &Fetch{Peer: Peer{ID: "a", Epoch: 1}, Upto: 128, Least: 16} }
			over, ok := p.enter(fetch(), 0)
			if !ok {
				t.Fatal("not entered")
			}
			if _, second := p.enter(fetch(), 0); second {
				t.Error("twice as many blocks as there may be")
			}
			over(0, errDead)
			time.Sleep(guardFirst)
			over, ok = p.enter(fetch(), 0)
			if !ok {
				t.Fatal("not entered again")
			}
			if c.err != nil {
				err = fmt.Errorf("wrapped: %w", c.err)
			}
			before := reading(t, reg, c.result)
			over(c.tokens, err)
			if got := reading(t, reg, c.result) - before; got != 1 {
				t.Errorf("%d tokens, %v: %q is counted %v times", c.tokens, c.err, c.result, got)
			}
			n := 0
			if b := p.guards.m[guardKey{"a", 1}]; b != nil {
				if n = b.failures; b.trying {
					t.Errorf("%d tokens, %v: the peer is still being tried", c.tokens, c.err)
				}
			}
			if n != c.failures || p.taken != 0 || p.quota.have != c.left {
				t.Errorf("%d tokens, %v: %d failures, %d blocks taken, %v bytes left; want %d, 0, %v", c.tokens, c.err, n, p.taken, p.quota.have, c.failures, c.left)
			}
		})
	}
}

// reading is how many fetches had a result.
func reading(t *testing.T, reg *prometheus.Registry, result string) (n float64) {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == "xpyd_kvtier_peer_fetches_total" && len(m.GetLabel()) == 1 && m.GetLabel()[0].GetName() == "result" && m.GetLabel()[0].GetValue() == result {
				n += m.GetCounter().GetValue()
			}
		}
	}
	return n
}

// TestLeastFetch: as much as is worth a fetch is fetched, and less is not, whatever is here already.
func TestLeastFetch(t *testing.T) {
	cfg := peersConfig()
	cfg.MinLoadTokens = 48
	r, giver := newRig(t, config("")), newRig(t, config(""))
	peers, links := join(t, cfg, false, r, giver)
	long := prompt(1, 160)
	giver.run(long, 0)
	giver.quiet()
	f := func(upto, claimed, want int) {
		t.Helper()
		calls := links[0].calls
		n := peers[0].Load(t.Context(), "r", long, "", upto, []Peer{at(1, claimed)})
		if n != want || (links[0].calls > calls) != (want > 0) {
			t.Errorf("%d tokens of %d, said to have %d: %d came after %d fetches, want %d", upto, len(long), claimed, n, links[0].calls-calls, want)
		}
	}
	f(47, 160, 0)
	f(160, 47, 0)
	f(48, 160, 48)
	f(95, 160, 0) // 47 more than what is here
	f(160, 95, 0)
	f(96, 160, 48)
	f(1000, 1000, 64)
	if r.quiet(); peers[0].Stats().Fetching != 0 {
		t.Errorf("%+v", peers[0].Stats())
	}
}

// TestPinsKept: a pin is renewed, counts each name once, and ends when its time is over.
func TestPinsKept(t *testing.T) {
	p, now := newPins(), time.Unix(1e6, 0)
	p.most = 3
	key := func(n byte) (h [16]byte) { h[0] = n; return h }
	of := func(until int, keys ...byte) *pin {
		one := &pin{until: now.Add(time.Duration(until) * time.Second)}
		for _, k := range keys {
			one.keys = append(one.keys, key(k))
		}
		return one
	}
	f := func(what string, err error, names int, next int) {
		t.Helper()
		_, when := p.expired(now)
		if err != nil || p.count() != names || next > 0 && !when.Equal(now.Add(time.Duration(next)*time.Second)) || next == 0 && !when.IsZero() {
			t.Errorf("%s: %v, %d names, the next ends at %v", what, err, p.count(), when)
		}
	}
	f("none", nil, 0, 0)
	f("two names", p.add(of(20, 1, 2)), 2, 20)
	f("a beginning of it and one more", p.add(of(30, 1, 3)), 3, 20)
	if err := p.add(of(9, 1, 4)); !errors.Is(err, ErrPinned) || p.has(key(4)) || p.count() != 3 {
		t.Errorf("one name too many: %v, %d", err, p.count())
	}
	f("again", p.add(of(40, 1, 2)), 3, 30)
	if list := p.all(); len(list) != 2 || list[0].keys[1] != key(3) || list[1].keys[1] != key(2) {
		t.Errorf("%+v", list)
	}
	now = now.Add(30 * time.Second)
	over, next := p.expired(now)
	if len(over) != 1 || over[0].keys[1] != key(3) || p.has(key(3)) || !p.has(key(1)) || !next.Equal(now.Add(10*time.Second)) {
		t.Errorf("%+v are over, next %v", over, next)
	}
	if p.remove(key(1)) != nil || p.remove(key(2)) == nil || p.remove(key(2)) != nil || p.count() != 0 || p.has(key(1)) {
		t.Errorf("%d names are left", p.count())
	}
}
