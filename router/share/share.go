package share

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/router/pick"
)

// Config configures what routers tell each other.
type Config struct {
	// Interval is the shortest time between two messages about changed load; 0 shares
	// nothing. In between, both routers may fill the same gap.
	Interval time.Duration `key:"interval"`
	// Expire is how long a silent router's messages count.
	Expire time.Duration `key:"expire"`
}

// DefaultConfig sends at most 50 messages a second.
func DefaultConfig() Config { return Config{Interval: 20 * time.Millisecond, Expire: 3 * time.Second} }

// Validate returns a *config.KeyError.
func (c Config) Validate() error {
	if c.Interval < 0 || c.Interval > time.Second {
		return config.Bad("interval", "%v is not within 0 and 1s", c.Interval)
	}
	return config.AtLeast("expire", c.Expire, 2*snapshotEvery)
}

const (
	snapshotEvery = time.Second
	hintsEvery    = 100 * time.Millisecond
	mostChanges   = 2048    // workers in one round of changes
	mostRecent    = 1 << 14 // blocks of prefixes that a new router is told
)

// Bus carries messages to all routers, perhaps including the sender. It may lose some;
// those of one sender keep their order.
type Bus interface {
	// Publish does not wait; an error says that nobody will get it.
	Publish(msg []byte) error
	// Subscribe calls f for each message, one at a time, until stop has returned. f may use
	// the message only during the call.
	Subscribe(f func(msg []byte)) (stop func(), err error)
}

// Picker is what is shared: *pick.Picker.
type Picker interface {
	Note(on bool)
	Changes(out []pick.WorkerLoad, all bool, most int) []pick.WorkerLoad
	Hints() (hints []pick.Hint, lost uint64)
	Recent(most int) []pick.Hint
	SetOthers(list []pick.WorkerLoad)
	AddHints(list []pick.Hint)
}

// Sharer is one router's part. Run does the work.
type Sharer struct {
	cfg    Config
	bus    Bus
	picker Picker
	log    *slog.Logger
	id     uint64
	wake   chan struct{} // a new router is there

	seq  uint64 // of the last message; this and the following belong to Run
	buf  []byte
	list []pick.WorkerLoad

	mu    sync.Mutex
	peers *peers
	owed  bool // a new router waits for a snapshot
	asks  bool // this router has yet to ask for prefixes
	asked bool // another router has asked for prefixes
	// For metrics: messages, and hashes of hints.
	sent, heard, unsent, lost uint64
}

// behind is set in the IDs of routers that are not preferred.
const behind = 1 << 63

// Prefer has this router come before those that are not preferred; see First. It is called before Run.
func (s *Sharer) Prefer() { s.id &^= behind }

// New makes a sharer; Run does the work.
func New(cfg Config, bus Bus, picker Picker, log *slog.Logger) *Sharer {
	return &Sharer{cfg: cfg, bus: bus, picker: picker, log: log, id: rand.Uint64() | behind, wake: make(chan struct{}, 1), peers: newPeers(cfg.Expire)}
}

// Ask has Run ask the others, once there are any, where the latest prefixes are. It is
// called when this router has workers to remember them for.
func (s *Sharer) Ask() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asks = true
}

// First reports whether this router has the lowest ID of all that it hears.
func (s *Sharer) First() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.peers.first(s.id, s.id)
}

// Run shares until ctx ends, and then says goodbye.
func (s *Sharer) Run(ctx context.Context) {
	if s.cfg.Interval == 0 {
		return
	}
	stop, err := s.bus.Subscribe(s.hear)
	if err != nil {
		s.log.Error("routers do not hear each other", "err", err)
		return
	}
	pause := time.NewTimer(0)
	defer pause.Stop()
	var full, hints time.Time
	for {
		select {
		case <-pause.C:
		case <-s.wake:
		case <-ctx.Done():
			stop()
			s.send(appendHead(s.buf[:0], kindBye, s.id, s.next()))
			s.picker.Note(false)
			return
		}
		now := time.Now()
		alone, owed := s.expirePeers(now)
		switch {
		case owed || now.Sub(full) >= snapshotEvery:
			full = now
			if alone {
				s.send(appendHead(s.buf[:0], kindHello, s.id, s.next()))
			} else {
				s.snapshot()
			}
		case !alone:
			s.changes()
		}
		asks, asked := s.questions(alone)
		if asks {
			s.send(appendHead(s.buf[:0], kindAsk, s.id, s.next()))
		}
		if asked {
			s.tell(s.picker.Recent(mostRecent))
		}
		if !alone && now.Sub(hints) >= hintsEvery {
			hints = now
			s.hints()
		}
		if alone {
			pause.Reset(snapshotEvery)
		} else {
			pause.Reset(s.cfg.Interval)
		}
	}
}

// questions reports whether to ask for prefixes now, and whether to tell of them.
func (s *Sharer) questions(alone bool) (asks, asked bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	asks, asked = s.asks && !alone, s.asked
	s.asks, s.asked = s.asks && alone, false
	return asks, asked
}

// expirePeers forgets silent routers, and reports whether this one is alone and whether a
// snapshot is owed.
func (s *Sharer) expirePeers(now time.Time) (alone, owed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := len(s.peers.byID)
	if touched := s.peers.tick(now); len(touched) > 0 {
		s.picker.SetOthers(touched)
	}
	if n := len(s.peers.byID); n < before {
		s.log.Warn("a router has fallen silent; its load no longer counts", "routers", n+1)
	}
	alone, owed = len(s.peers.byID) == 0, s.owed
	s.owed = false
	s.picker.Note(!alone)
	return alone, owed
}

// hear takes in what another router says.
func (s *Sharer) hear(b []byte) {
	m, err := decode(b)
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case err != nil:
		s.peers.counts.refused++
		return
	case m.from == s.id:
		return
	}
	s.heard++
	touched, isNew := s.peers.apply(&m, time.Now())
	if isNew {
		s.owed = true
		select {
		case s.wake <- struct{}{}:
		default:
		}
		s.log.Info("another router is here", "routers", len(s.peers.byID)+1)
	}
	if m.kind == kindAsk && s.peers.first(s.id, m.from) {
		s.asked = true
	}
	if len(touched) > 0 {
		s.picker.SetOthers(touched)
	}
	if len(m.hints) > 0 && s.peers.byID[m.from] != nil {
		s.picker.AddHints(m.hints)
	}
}

func (s *Sharer) next() uint64 {
	s.seq++
	return s.seq
}

func (s *Sharer) send(b []byte) {
	s.buf = b
	err := s.bus.Publish(b)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		s.unsent++
		return
	}
	s.sent++
}

// changes tells what has changed since the last time.
func (s *Sharer) changes() {
	s.list = s.picker.Changes(s.list[:0], false, mostChanges)
	b := s.buf[:0]
	for i := range s.list {
		if len(b) == 0 {
			b = appendHead(b, kindChanges, s.id, s.next())
		}
		if b = appendWorker(b, &s.list[i]); len(b) > maxMessage-maxWorker || i == len(s.list)-1 {
			s.send(b)
			b = b[:0]
		}
	}
}

// perPart is how many workers always fit in a message.
const perPart = (maxMessage - 64) / maxWorker

// snapshot tells all there is, in parts.
func (s *Sharer) snapshot() {
	s.list = s.picker.Changes(s.list[:0], true, maxWorkers)
	parts := max((len(s.list)+perPart-1)/perPart, 1)
	for part := range parts {
		b := appendHead(s.buf[:0], kindSnapshot, s.id, s.next())
		b = appendNumbers(b, part, parts)
		for i := part * perPart; i < min((part+1)*perPart, len(s.list)); i++ {
			b = appendWorker(b, &s.list[i])
		}
		s.send(b)
	}
}

// hints tells where new prefixes went.
func (s *Sharer) hints() {
	list, lost := s.picker.Hints()
	s.mu.Lock()
	s.lost = lost
	s.mu.Unlock()
	s.tell(list)
}

// tell sends hints, in as many messages as they take.
func (s *Sharer) tell(list []pick.Hint) {
	b := s.buf[:0]
	for i := range list {
		for hashes := list[i].Hashes; len(hashes) > 0; {
			h := list[i]
			h.Hashes = hashes[:min(len(hashes), maxHashes)]
			hashes = hashes[len(h.Hashes):]
			if size := 2*maxWorker + 8*len(h.Hashes); len(b) > 0 && len(b)+size > maxMessage {
				s.send(b)
				b = b[:0]
			}
			if len(b) == 0 {
				b = appendHead(b, kindHints, s.id, s.next())
			}
			b = appendHint(b, &h)
		}
	}
	if len(b) > 0 {
		s.send(b)
	}
}

// ID is how other routers know this one.
func (s *Sharer) ID() string { return idText(s.id) }

// List lists the other routers, by ID.
func (s *Sharer) List() []Peer {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.peers.list(time.Now())
}

// Collectors returns the metrics.
func (s *Sharer) Collectors() []prometheus.Collector {
	gauge := func(name, help string, f func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, s.locked(f))
	}
	count := func(name, help string, f func() float64) prometheus.Collector {
		return prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help}, s.locked(f))
	}
	return []prometheus.Collector{
		gauge("xpyd_router_peers", "Other routers of the fleet that are heard. If you run more, look at their links to NATS.", func() float64 { return float64(len(s.peers.byID)) }),
		gauge("xpyd_router_peers_silence_seconds", "Time since the most silent other router was heard. Over a second its load is known late; at share.expire it is forgotten.", func() float64 { return s.peers.silence(time.Now()).Seconds() }),
		count("xpyd_router_peers_expired_total", "Routers that fell silent without a goodbye.", func() float64 { return float64(s.peers.counts.expired) }),
		count("xpyd_router_share_sent_total", "Messages to other routers.", func() float64 { return float64(s.sent) }),
		count("xpyd_router_share_unsent_total", "Messages that NATS did not take because the link to it was down.", func() float64 { return float64(s.unsent) }),
		count("xpyd_router_share_received_total", "Messages from other routers.", func() float64 { return float64(s.heard) }),
		count("xpyd_router_share_gaps_total", "Messages from other routers that did not arrive; the next second repairs what they said of load.", func() float64 { return float64(s.peers.counts.gaps) }),
		count("xpyd_router_share_refused_total", "Messages from other routers that could not be used: of another version, repeated, or malformed.", func() float64 { return float64(s.peers.counts.refused) }),
		count("xpyd_router_share_hints_lost_total", "Blocks of prefixes that other routers were not told of, because there were too many.", func() float64 { return float64(s.lost) }),
	}
}

func (s *Sharer) locked(f func() float64) func() float64 {
	return func() float64 {
		s.mu.Lock()
		defer s.mu.Unlock()
		return f()
	}
}
