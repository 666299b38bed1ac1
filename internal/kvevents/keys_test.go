package kvevents_test

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/kvevents"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/internal/zmtp"
)

const (
	one = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8"
	two = "IAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8"
)

func ring(t *testing.T, texts ...string) *trust.Ring {
	t.Helper()
	r, err := trust.NewRing(secrets(t, texts...)...)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func secrets(t *testing.T, texts ...string) (list []trust.Secret) {
	t.Helper()
	for _, text := range texts {
		s, err := trust.ParseSecret(text)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, s)
	}
	return list
}

func turn(t *testing.T, r *trust.Ring, texts ...string) {
	t.Helper()
	if err := r.Set(secrets(t, texts...)...); err != nil {
		t.Fatal(err)
	}
}

func soon(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !cond(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal(what)
		}
	}
}

// TestVectors: who derives other keys hears nothing.
func TestVectors(t *testing.T) {
	k, err := kvevents.SubscriberKeys(ring(t, one), "")
	if err != nil {
		t.Fatal(err)
	}
	for got, want := range map[string]string{
		hex.EncodeToString(k.Own.Bytes()):    "25cc21c8f4a9bdc2c3af60aa1fafb8e5c2352b6ead6987c6d7ec39367d8ac462",
		hex.EncodeToString(k.Server.Bytes()): "50e3a27a9f5699334339124733e2c44d899e79d2a374ccd3a84fb2df9c10b401",
	} {
		if got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
	if _, err := kvevents.SubscriberKeys(ring(t, one), "00000000"); !errors.Is(err, kvevents.ErrNoSecret) {
		t.Errorf("a stranger's secret: %v", err)
	}
	if _, err := kvevents.SubscriberKeys(nil, "00000000"); !errors.Is(err, kvevents.ErrNoSecret) {
		t.Errorf("without a secret: %v", err)
	}
}

// log counts the lines that hold a text.
type log struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *log) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(b)
}

func (l *log) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.buf.String(), text)
}

// subscribe runs a feed that shows what r and theirs come to.
func subscribe(t *testing.T, p *kvevents.Publisher, r *trust.Ring, theirs func() string) (*notes, *kvevents.Stats, *log) {
	t.Helper()
	n, l := &notes{}, &log{}
	cfg := kvevents.FeedConfig{Endpoint: p.Addr().String(), Replay: p.ReplayAddr().String(), Handler: n, Log: slog.New(slog.NewTextHandler(l, nil))}
	if theirs != nil {
		cfg.Keys = func() (*zmtp.Keys, error) { return kvevents.SubscriberKeys(r, theirs()) }
	}
	f := kvevents.NewFeed(cfg)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { f.Run(ctx) })
	t.Cleanup(func() { cancel(); wg.Wait() })
	return n, f.Stats(), l
}

// TestOnlyMembers: who holds the secret hears what is and what was published, from
// both sockets; nobody else does, and both ends say why, once.
func TestOnlyMembers(t *testing.T) {
	pubLog := &log{}
	p := publish(t, kvevents.PublisherConfig{Replay: "127.0.0.1:0", Ring: ring(t, one), Log: slog.New(slog.NewTextHandler(pubLog, nil))})
	p.Send(removed(1))
	n, stats, _ := subscribe(t, p, ring(t, one), func() string { return "" })
	n.want(t, "1")
	subscribed(t, p.Subscribers)
	p.Send(removed(2))
	n.want(t, "1", "2")
	if err := stats.Failure(); err != nil {
		t.Error(err)
	}
	for _, c := range []struct {
		name   string
		ring   *trust.Ring
		theirs func() string
		want   error
	}{
		{"without a key", nil, nil, zmtp.ErrMechanism},
		{"with another secret", ring(t, two), func() string { return "" }, zmtp.ErrRefused},
		{"without a common secret", ring(t, two), ring(t, one).IDs, kvevents.ErrNoSecret},
		{"without a secret", nil, ring(t, one).IDs, kvevents.ErrNoSecret},
	} {
		var tries atomic.Int32
		theirs := c.theirs
		if theirs != nil {
			theirs = func() string { tries.Add(1); return c.theirs() }
		}
		n, stats, l := subscribe(t, p, c.ring, theirs)
		soon(t, c.name+": no failure", func() bool {
			return errors.Is(stats.Failure(), c.want) && l.count("kv events refused") > 0 && (theirs == nil || tries.Load() > 2) // after 0.3 s
		})
		if err := stats.Failure(); !kvevents.Refused(err) || stats.Connected.Load() {
			t.Errorf("%s: %v", c.name, err)
		}
		if got := l.count("kv events refused"); got != 1 {
			t.Errorf("%s: said %d times", c.name, got)
		}
		n.want(t)
	}
	soon(t, "the publisher says nothing", func() bool { return pubLog.count("without the fleet's secret") > 0 })
	if got := pubLog.count("\n"); got != 1 {
		t.Errorf("the publisher has said %d things", got)
	}
	if p.Subscribers() != 1 {
		t.Error("a stranger subscribed")
	}
}

// TestRotation: secrets change under way. Who was refused comes in once both ends
// share one, who is in stays in, and nothing is started anew.
func TestRotation(t *testing.T) {
	theirs, ours := ring(t, one), ring(t, two)
	p := publish(t, kvevents.PublisherConfig{Replay: "127.0.0.1:0", Ring: theirs})
	p.Send(removed(1))
	first, firstStats, _ := subscribe(t, p, ring(t, one), func() string { return "" })
	first.want(t, "1")
	subscribed(t, p.Subscribers)
	n, stats, _ := subscribe(t, p, ours, theirs.IDs)
	soon(t, "not refused", func() bool { return kvevents.Refused(stats.Failure()) })
	turn(t, theirs, two, one)
	n.want(t, "1")
	soon(t, "not connected", stats.Connected.Load)
	turn(t, theirs, two)
	soon(t, "not subscribed", func() bool { return p.Subscribers() == 2 })
	p.Send(removed(2))
	n.want(t, "1", "2")
	first.want(t, "1", "2")
	if firstStats.Resets.Load() != 0 || stats.Failure() != nil {
		t.Errorf("%d resets, %v", firstStats.Resets.Load(), stats.Failure())
	}
}

// TestSaidSeldom: a publisher that sends nonsense does not fill the log.
func TestSaidSeldom(t *testing.T) {
	r, n, l := newRough(t), &notes{}, &log{}
	f := kvevents.NewFeed(kvevents.FeedConfig{Endpoint: r.pub.Addr().String(), Handler: n, Log: slog.New(slog.NewTextHandler(l, nil))})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { f.Run(ctx) })
	defer func() { cancel(); wg.Wait() }()
	subscribed(t, r.pub.Subscribers)
	for seq := range uint64(50) {
		r.pub.Publish([]byte("kv"), number(seq), []byte("\xc1"))
	}
	soon(t, "not all have come", func() bool { return f.Stats().Malformed.Load() == 50 })
	if got := l.count("start anew"); got != 1 {
		t.Errorf("said %d times", got)
	}
}
