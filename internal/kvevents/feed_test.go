package kvevents_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/kvevents"
	"github.com/xpyd/xpyd/internal/zmtp"
)

// notes are what a feed's handler was told: "1" for a batch with hash 1,
// "reset" for a reset.
type notes struct {
	mu   sync.Mutex
	list []string
}

func (n *notes) Apply(b *kvevents.Batch) { n.add(fmt.Sprint(b.Events[0].Hashes[0])) }
func (n *notes) Reset(string)            { n.add("reset") }
func (n *notes) add(s string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.list = append(n.list, s)
}

func (n *notes) want(t *testing.T, want ...string) {
	t.Helper()
	end := time.Now().Add(time.Minute)
	for {
		n.mu.Lock()
		got := slices.Clone(n.list)
		n.mu.Unlock()
		if slices.Equal(got, want) {
			return
		}
		if time.Now().After(end) || len(got) > len(want) {
			t.Fatalf("got %v, want %v", got, want)
		}
		time.Sleep(time.Millisecond)
	}
}

func removed(hash uint64) *kvevents.Batch {
	return &kvevents.Batch{Events: []kvevents.Event{{Kind: kvevents.Removed, Hashes: []uint64{hash}}}}
}

// follow runs a feed until the test ends.
func follow(t *testing.T, endpoint, replay string) (*notes, *kvevents.Stats) {
	t.Helper()
	n := &notes{}
	f := kvevents.NewFeed(kvevents.FeedConfig{Endpoint: endpoint, Replay: replay, Topic: "kv", Handler: n})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { f.Run(ctx) })
	t.Cleanup(func() { cancel(); wg.Wait() })
	return n, f.Stats()
}

func publish(t *testing.T, cfg kvevents.PublisherConfig) *kvevents.Publisher {
	t.Helper()
	if cfg.Listen == "" {
		cfg.Listen = "127.0.0.1:0"
	}
	cfg.Topic = "kv@w"
	p, err := kvevents.Publish(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

func subscribed(t *testing.T, count func() int) {
	t.Helper()
	for end := time.Now().Add(time.Minute); count() == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("nobody subscribed")
		}
	}
}

// TestFeed: what was published before, what is, and what is lost on the way.
func TestFeed(t *testing.T) {
	p := publish(t, kvevents.PublisherConfig{Replay: "127.0.0.1:0"})
	p.Send(removed(1))
	p.Send(removed(2))
	n, stats := follow(t, p.Addr().String(), p.ReplayAddr().String())
	n.want(t, "1", "2")
	subscribed(t, p.Subscribers)
	p.Send(removed(3))
	n.want(t, "1", "2", "3")
	p.Lose()
	p.Send(removed(4))
	n.want(t, "1", "2", "3", "reset", "4")
	if stats.Gaps.Load() != 1 || stats.Resets.Load() != 1 || stats.Batches.Load() != 4 || !stats.Connected.Load() {
		t.Errorf("%+v", stats)
	}
}

// TestReconnect: the same publisher is known again, another one is not.
func TestReconnect(t *testing.T) {
	p := publish(t, kvevents.PublisherConfig{Replay: "127.0.0.1:0"})
	front, cut := proxy(t, p.Addr().String())
	p.Send(removed(1))
	n, _ := follow(t, front, p.ReplayAddr().String())
	n.want(t, "1")
	subscribed(t, p.Subscribers)
	cut()
	p.Send(removed(2))
	n.want(t, "1", "2")
	addr, replay := p.Addr().String(), p.ReplayAddr().String()
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	p = publish(t, kvevents.PublisherConfig{Listen: addr, Replay: replay})
	p.Send(removed(1)) // as many as before, but others
	p.Send(removed(9))
	n.want(t, "1", "2", "reset", "1", "9")
}

// rough is a publisher whose numbers and replay a test decides.
type rough struct {
	t   *testing.T
	pub *zmtp.Publisher
}

func newRough(t *testing.T) *rough {
	p, err := zmtp.ListenPublisher("127.0.0.1:0", zmtp.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return &rough{t, p}
}

func number(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }

func (r *rough) send(seq uint64) {
	r.pub.Publish([]byte("kv"), number(seq), kvevents.AppendArrays(nil, removed(seq)))
}

// replays answers as SGLang does, without a topic, from oldest to newest.
func (r *rough) replays(oldest, newest uint64) string {
	s, err := zmtp.ListenRouter("127.0.0.1:0", zmtp.Config{}, func(_ zmtp.Peer, f [][]byte, reply func(...[]byte) error) error {
		for seq := max(oldest, binary.BigEndian.Uint64(f[1])); seq <= newest; seq++ {
			if err := reply(nil, number(seq), kvevents.AppendArrays(nil, removed(seq))); err != nil {
				return err
			}
		}
		return reply(nil, number(1<<64-1), nil)
	})
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { s.Close() })
	return s.Addr().String()
}

func TestGaps(t *testing.T) {
	t.Run("mended", func(t *testing.T) {
		r := newRough(t)
		n, stats := follow(t, r.pub.Addr().String(), r.replays(0, 5))
		n.want(t, "0", "1", "2", "3", "4", "5")
		subscribed(t, r.pub.Subscribers)
		r.send(5) // known already
		r.send(6)
		n.want(t, "0", "1", "2", "3", "4", "5", "6")
		if stats.Resets.Load() != 0 {
			t.Error("started anew")
		}
	})
	t.Run("too old", func(t *testing.T) {
		r := newRough(t)
		n, _ := follow(t, r.pub.Addr().String(), r.replays(7, 8))
		n.want(t, "7", "8")
		subscribed(t, r.pub.Subscribers)
		r.send(9)
		r.send(12) // the replay has nothing newer than 8
		n.want(t, "7", "8", "9", "reset", "12")
	})
	t.Run("without replay", func(t *testing.T) {
		r := newRough(t)
		n, stats := follow(t, r.pub.Addr().String(), "")
		subscribed(t, r.pub.Subscribers)
		r.send(3)
		r.send(4)
		r.send(8)
		r.send(0) // the engine counts anew
		r.send(1)
		n.want(t, "3", "4", "reset", "8", "reset", "0", "1")
		if stats.Gaps.Load() != 1 || stats.Resets.Load() != 2 {
			t.Errorf("%d gaps, %d resets", stats.Gaps.Load(), stats.Resets.Load())
		}
	})
	t.Run("malformed", func(t *testing.T) {
		r := newRough(t)
		n, stats := follow(t, r.pub.Addr().String(), "")
		subscribed(t, r.pub.Subscribers)
		r.send(0)
		r.pub.Publish([]byte("kv"), number(1), []byte("\xc1"))
		r.send(2)
		n.want(t, "0", "reset", "2")
		if stats.Malformed.Load() != 1 {
			t.Error("not counted")
		}
	})
}
