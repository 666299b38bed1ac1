package fleet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
)

// NewEpoch returns a worker's epoch for this start: microseconds since 1970, which rise over
// restarts and fit the 53 bits of JSON readers.
func NewEpoch() uint64 { return uint64(time.Now().UnixMicro()) }

// AnnouncerConfig configures an Announcer.
type AnnouncerConfig struct {
	Conn     *Conn    // required
	Instance Instance // required; its epoch must not be zero
	// Load is called for every heartbeat and must not block; nil sends the instance's own.
	Load      func() Load
	Heartbeat time.Duration // default 250 ms, at most MaxHeartbeat
	Log       *slog.Logger
}

// MaxHeartbeat is the longest time between heartbeats: one may be late, and the worker is still no
// suspect.
const MaxHeartbeat = suspectAfter / 2

// DefaultHeartbeat is how often a worker says that it is there, and its load.
const DefaultHeartbeat = 250 * time.Millisecond

const (
	reannounce   = 5 * time.Second // makes up for lost messages
	queryBacklog = 64
	goodbyeTime  = 10 * time.Second
)

// Announcer announces a worker, sends its heartbeats and answers queries until it is closed.
type Announcer struct {
	cfg    AnnouncerConfig
	log    *slog.Logger
	wake   chan struct{} // an announcement is due
	quit   chan struct{}
	done   chan struct{}
	paused atomic.Bool // set by tests to model a stopped process

	mu   sync.Mutex
	inst Instance

	closeOnce sync.Once
	closeErr  error
}

// Announce makes the instance known, again whenever NATS is back. The caller closes the
// Announcer before its Conn.
func Announce(cfg AnnouncerConfig) (*Announcer, error) {
	if cfg.Heartbeat == 0 {
		cfg.Heartbeat = DefaultHeartbeat
	}
	if cfg.Heartbeat < 0 || cfg.Heartbeat > MaxHeartbeat {
		return nil, fmt.Errorf("announce: heartbeat %v is not in 0..%v", cfg.Heartbeat, MaxHeartbeat)
	}
	if cfg.Instance.Epoch == 0 {
		return nil, errors.New("announce: epoch is zero")
	}
	if err := cfg.Instance.Validate(); err != nil {
		return nil, fmt.Errorf("announce: %w", err)
	}
	a := &Announcer{
		cfg:  cfg,
		log:  logger(cfg.Log),
		wake: make(chan struct{}, 1),
		quit: make(chan struct{}),
		done: make(chan struct{}),
		inst: cfg.Instance,
	}
	queries := make(chan *nats.Msg, queryBacklog)
	sub, err := cfg.Conn.nc.ChanSubscribe(subjectQuery, queries)
	if err != nil {
		return nil, fmt.Errorf("announce: subscribe: %w", err)
	}
	stop := cfg.Conn.listen(func(l Link) {
		if l.Up {
			signal(a.wake)
		}
	})
	go func() {
		defer close(a.done)
		defer stop()
		a.announceLoop(queries)
		if err := sub.Unsubscribe(); err != nil {
			a.log.Debug("unsubscribe from queries", "err", err)
		}
	}()
	return a, nil
}

// Instance returns what is announced, with the current load.
func (a *Announcer) Instance() Instance {
	a.mu.Lock()
	inst := a.inst
	a.mu.Unlock()
	if a.cfg.Load != nil {
		inst.Load = a.cfg.Load()
	}
	return inst
}

// Update changes the instance and announces it at once. It refuses an invalid instance,
// and changes of id or epoch.
func (a *Announcer) Update(change func(*Instance)) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	next := a.inst
	change(&next)
	if next.ID != a.inst.ID || next.Epoch != a.inst.Epoch {
		return errors.New("update: id and epoch are fixed")
	}
	if err := next.Validate(); err != nil {
		return fmt.Errorf("update: %w", err)
	}
	a.inst = next
	signal(a.wake)
	return nil
}

// signal wakes the reader of a channel with room for one, unless it is awake.
func signal(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

func (a *Announcer) announceLoop(queries <-chan *nats.Msg) {
	// A random phase, so that workers that started together do not beat together.
	beat := time.NewTimer(rand.N(a.cfg.Heartbeat))
	defer beat.Stop()
	again := time.NewTicker(reannounce)
	defer again.Stop()
	for {
		select {
		case <-a.quit:
			return
		case m := <-queries:
			a.answerQuery(m)
		case <-a.wake:
			a.announce()
		case <-again.C:
			a.announce()
		case <-beat.C:
			beat.Reset(a.cfg.Heartbeat)
			a.publish(subjectHeartbeat, a.beat())
		}
	}
}

func (a *Announcer) beat() beat {
	i := a.Instance()
	return beat{ID: i.ID, Epoch: i.Epoch, Role: i.Role, Draining: i.Draining, WaitOnly: i.WaitOnly, Load: i.Load}
}

func (a *Announcer) announce() { a.publish(subjectAnnounce, a.Instance()) }

// publish sends v on the worker's own subject.
func (a *Announcer) publish(prefix string, v any) { a.send(prefix+a.cfg.Instance.ID, v) }

// send fails while NATS is away. When the link is back, the worker is announced again.
func (a *Announcer) send(subject string, v any) {
	if a.paused.Load() {
		return
	}
	payload, err := json.Marshal(v)
	if err == nil {
		err = a.cfg.Conn.nc.Publish(subject, payload)
	}
	if err != nil {
		a.log.Debug("publish", "subject", subject, "err", err)
	}
}

func (a *Announcer) answerQuery(m *nats.Msg) {
	if len(m.Data) > maxMessageBytes {
		return
	}
	var q query
	if len(m.Data) > 0 && json.Unmarshal(m.Data, &q) != nil {
		return
	}
	switch {
	case q.ID != "" && q.ID != a.cfg.Instance.ID:
	case m.Reply != "":
		a.send(m.Reply, a.Instance())
	default:
		a.announce()
	}
}

// Close says goodbye and waits until the server has it, ctx ends or goodbyeTime is over.
// Later calls return the same error.
func (a *Announcer) Close(ctx context.Context) error {
	a.closeOnce.Do(func() {
		close(a.quit)
		<-a.done
		if !a.cfg.Conn.Link().Up || a.paused.Load() {
			return
		}
		ctx, cancel := context.WithTimeout(ctx, goodbyeTime) // nats refuses one without a deadline
		defer cancel()
		a.publish(subjectBye, a.beat())
		if err := a.cfg.Conn.nc.FlushWithContext(ctx); err != nil {
			a.closeErr = fmt.Errorf("say goodbye: %w", err)
		}
	})
	return a.closeErr
}
