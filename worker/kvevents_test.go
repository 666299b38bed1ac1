package worker_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/kvevents"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/internal/zmtp"
	"github.com/xpyd/xpyd/router/index"
	"github.com/xpyd/xpyd/worker"
)

// follow makes an index that hears of w's KV until the test ends.
func follow(t *testing.T, w *worker.Worker) *index.Index {
	x := index.New(1 << 20)
	inst := w.Instance()
	feed := kvevents.NewFeed(kvevents.FeedConfig{Endpoint: inst.KVEvents, Replay: inst.KVReplay,
		Handler: x.Add(index.Key{ID: inst.ID}, inst.Model, index.Decode)})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { feed.Run(ctx) })
	t.Cleanup(func() { cancel(); wg.Wait() })
	return x
}

// TestKVEvents: an index that follows a worker, from before or after, knows
// how much of a prompt it has; what a salt keeps apart is not told.
func TestKVEvents(t *testing.T) {
	w := start(t, nil)
	begin := func() func(want int, q index.Query) {
		x := follow(t, w)
		return func(want int, q index.Query) {
			t.Helper()
			soon(t, patience, func() error {
				total := 0
				for _, h := range x.Match(&q) {
					total += h.Total()
				}
				if total != want {
					return fmt.Errorf("%d tokens, want %d", total, want)
				}
				return nil
			})
		}
	}
	before := begin()
	ids := make([]uint32, 50)
	body := `{"max_tokens":1,"prompt":[`
	for i := range ids {
		ids[i] = uint32(100 + i)
		if i > 0 {
			body += ","
		}
		body += fmt.Sprint(ids[i])
	}
	complete(t, w, nil, body+"]}")
	q := index.Query{Model: w.Instance().Model, Tokens: ids}
	before(48, q)
	after := begin()
	after(48, q)
	complete(t, w, nil, body+`],"cache_salt":"secret"}`)
	complete(t, w, nil, `{"max_tokens":1,"prompt":[5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21],"cache_salt":"secret"}`)
	complete(t, w, nil, `{"max_tokens":1,"prompt":[7,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21]}`)
	before(16, index.Query{Model: q.Model, Tokens: []uint32{7, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20}})
	before(0, index.Query{Model: q.Model, Tokens: []uint32{5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20}})
}

// TestKVEventsOfTiers: an index that follows a worker knows which tier has a
// prompt, as it moves down, and after a restart once it has come up again.
func TestKVEventsOfTiers(t *testing.T) {
	dir := t.TempDir()
	begin := func() (*worker.Worker, func(prompt []uint32, want [kvevents.Tiers]int)) {
		w := start(t, func(c *worker.Config) {
			c.Blocks, c.KV.HostMemory, c.KV.SSDDir, c.KV.LoadTimeout = 8, 16*24<<10, filepath.Join(dir, "kv"), time.Minute
		})
		x := follow(t, w)
		return w, func(prompt []uint32, want [kvevents.Tiers]int) {
			t.Helper()
			soon(t, patience, func() error {
				var got [kvevents.Tiers]int
				for _, h := range x.Match(&index.Query{Model: w.Instance().Model, Tokens: prompt}) {
					got = h.Tokens
				}
				if got != want {
					return fmt.Errorf("by tier %v, want %v", got, want)
				}
				return nil
			})
		}
	}
	prompt := func(n int) (ids []uint32, body string) {
		for i := range 50 {
			ids = append(ids, uint32(100+7*n+i))
		}
		return ids, fmt.Sprintf(`{"max_tokens":1,"prompt":%s}`, strings.ReplaceAll(fmt.Sprint(ids), " ", ","))
	}
	w, knows := begin()
	ids, body := prompt(0)
	run := func(body string) {
		t.Helper()
		complete(t, w, nil, body)
		settle(t, w)
	}
	run(body)
	knows(ids, [kvevents.Tiers]int{48, 0, 0})
	for n := 1; n < 4; n++ { // the pool has room for two
		_, other := prompt(n)
		run(other)
	}
	knows(ids, [kvevents.Tiers]int{0, 48, 0})
	for n := 4; n < 12; n++ { // host memory for five
		_, other := prompt(n)
		run(other)
	}
	knows(ids, [kvevents.Tiers]int{0, 0, 48})
	run(body)
	knows(ids, [kvevents.Tiers]int{48, 0, 0})
	if err := w.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
	w, knows = begin()
	knows(ids, [kvevents.Tiers]int{})
	run(body) // from the SSD
	knows(ids, [kvevents.Tiers]int{48, 0, 0})
	for n := 21; n < 24; n++ {
		_, other := prompt(n)
		run(other)
	}
	knows(ids, [kvevents.Tiers]int{0, 48, 0})
}

// sink is a log that is looked into.
type sink struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (s *sink) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.buf.Write(b)
}

func (s *sink) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.buf.String()
}

// TestKVEventsForMembers: neither socket of a worker that has a secret tells a
// stranger anything, and each tells members all; kv_events.open undoes that, and
// beyond this machine says what it gives away.
func TestKVEventsForMembers(t *testing.T) {
	ring, err := trust.NewRing(trust.NewSecret())
	if err != nil {
		t.Fatal(err)
	}
	stranger := func(addr string, kind zmtp.Type) error {
		c, err := zmtp.Dial(t.Context(), addr, zmtp.Config{Type: kind})
		if err == nil {
			c.Close()
		}
		return err
	}
	for _, c := range []struct {
		name   string
		listen string
		open   bool
		ring   *trust.Ring
		want   error // a stranger's
		warns  bool
	}{
		{"closed", "127.0.0.1:0", false, ring, zmtp.ErrMechanism, false},
		{"closed, beyond this machine", "0.0.0.0:0", false, ring, zmtp.ErrMechanism, false},
		{"open", "127.0.0.1:0", true, ring, nil, false},
		{"open, beyond this machine", "0.0.0.0:0", true, ring, nil, true},
		{"trusting, beyond this machine", "0.0.0.0:0", false, nil, nil, true},
	} {
		var log sink
		w := start(t, func(cfg *worker.Config) {
			cfg.Advertise = "127.0.0.1"
			cfg.KVEvents.Listen, cfg.KVEvents.Replay, cfg.KVEvents.Open = c.listen, c.listen, c.open
		}, func(d *worker.Deps) {
			d.Ring, d.Log = c.ring, slog.New(slog.NewTextHandler(&log, nil))
		})
		inst := w.Instance()
		if inst.Secrets != c.ring.IDs() || inst.KVEventsOpen != c.open {
			t.Errorf("%s: announces secrets %q, open %t", c.name, inst.Secrets, inst.KVEventsOpen)
		}
		for addr, kind := range map[string]zmtp.Type{inst.KVEvents: zmtp.Sub, inst.KVReplay: zmtp.Dealer} {
			if err := stranger(addr, kind); !errors.Is(err, c.want) {
				t.Errorf("%s: a stranger's %s has %v, want %v", c.name, kind, err, c.want)
			}
		}
		if got := strings.Contains(log.String(), "token ids of every prompt"); got != c.warns {
			t.Errorf("%s: warns %t, want %t", c.name, got, c.warns)
		}
		if c.want == nil {
			continue
		}
		for addr, kind := range map[string]zmtp.Type{inst.KVEvents: zmtp.Sub, inst.KVReplay: zmtp.Dealer} {
			keys, err := kvevents.SubscriberKeys(ring, inst.Secrets)
			if err != nil {
				t.Fatal(err)
			}
			conn, err := zmtp.Dial(t.Context(), addr, zmtp.Config{Type: kind, Keys: keys})
			if err != nil {
				t.Errorf("%s: a member's %s: %v", c.name, kind, err)
				continue
			}
			conn.Close()
		}
	}
}
