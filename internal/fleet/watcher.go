package fleet

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"
)

// WatcherConfig configures a Watcher; zero fields take their defaults.
type WatcherConfig struct {
	// Conn is the link to NATS. Without one, the only members are those of AddStatic.
	Conn *Conn

	Grace time.Duration // during which silence kills no member after the link is back; default 3 s

	// Probe asks a silent member whether it lives, before it is suspected; see ProbeHealth. If
	// nil, only NATS counts.
	Probe func(ctx context.Context, m *Instance) error

	// Revoked is the result of an earlier Revocations. A router's watcher Leads: it repeats
	// them to all others.
	Revoked []Revocation
	Leads   bool

	Log        *slog.Logger
	Registerer prometheus.Registerer
}

func orDefault[T comparable](v *T, def T) { *v = cmp.Or(*v, def) }

const (
	suspectAfter = time.Second          // of silence
	answerTime   = suspectAfter * 4 / 5 // a probe is answered by then, or not at all
	deadAfter    = 3 * time.Second      // of silence
	forgetAfter  = time.Minute          // a dead member is shown for so long
	maxMembers   = 4096                 // in the table
	echoInterval = 100 * time.Millisecond
	echoStep     = 500 * time.Millisecond // the longest stretch that one echo proves
	backlog      = 8192                   // messages between NATS and the watcher
	batch        = 256                    // messages between two snapshots
	echoPatience = 5 * time.Second        // until missing echoes are logged
	noResponders = "503"                  // a NATS status
	complaints   = 10 * time.Second       // between two log lines of a kind
	probesAtOnce = 64                     // a stopped member occupies one for answerTime
)

// Watcher keeps the fleet's snapshot. Its methods are safe for concurrent use. When one
// returns, its change is in the snapshot.
type Watcher struct {
	cfg     WatcherConfig
	log     *slog.Logger
	metrics *metrics
	start   time.Time
	token   string // last word of this watcher's own subjects

	snap  atomic.Pointer[Snapshot]
	query chan struct{} // ask everybody to announce itself
	quit  chan struct{}
	done  chan struct{}

	probing context.Context // ends the probes
	slots   chan struct{}   // one per running probe
	probes  sync.WaitGroup

	mu       sync.Mutex // taken after Conn.mu
	reg      *registry
	untold   []untold
	changed  chan struct{} // closed and replaced with each version
	refusals map[string]Refusal
	repeat   time.Time // when to repeat the revocations
	mute     time.Time // bad messages are not logged before
	muteEcho time.Time // missing echoes are not logged before

	closeOnce sync.Once
}

// Watch starts watching. The caller closes the Watcher before its Conn.
func Watch(cfg WatcherConfig) (*Watcher, error) {
	orDefault(&cfg.Grace, 3*time.Second)
	now := time.Now()
	w := &Watcher{
		cfg: cfg, log: logger(cfg.Log), start: now, token: rand.Text(),
		query: make(chan struct{}, 1), quit: make(chan struct{}), done: make(chan struct{}),
		changed: make(chan struct{}), refusals: map[string]Refusal{},
		reg:   newRegistry(cfg.Grace, maxMembers, now),
		slots: make(chan struct{}, probesAtOnce),
	}
	w.reg.revoked.merge(cfg.Revoked, now)
	w.snap.Store(w.reg.snapshot(now))
	var err error
	if w.metrics, err = newMetrics(cfg.Registerer, w); err != nil {
		return nil, fmt.Errorf("watch fleet: %w", err)
	}
	msgs := make(chan *nats.Msg, backlog)
	stop, err := w.subscribe(msgs)
	if err != nil {
		w.metrics.unregister()
		return nil, fmt.Errorf("watch fleet: %w", err)
	}
	var cancel context.CancelFunc
	w.probing, cancel = context.WithCancel(context.Background())
	go func() {
		defer close(w.done)
		defer w.metrics.unregister()
		defer stop()
		defer w.probes.Wait()
		defer cancel()
		w.watchLoop(msgs)
	}()
	return w, nil
}

// subscribe puts all subjects into one channel, because the witnessed clock relies on
// their order of publication.
func (w *Watcher) subscribe(msgs chan *nats.Msg) (stop func(), err error) {
	if w.cfg.Conn == nil {
		return func() {}, nil
	}
	var subs []*nats.Subscription
	unsubscribe := func() {
		for _, s := range subs {
			if err := s.Unsubscribe(); err != nil {
				w.log.Debug("unsubscribe", "subject", s.Subject, "err", err)
			}
		}
	}
	for _, subject := range []string{
		subjectAnnounce + ">", subjectHeartbeat + ">", subjectBye + ">",
		subjectReply + w.token, subjectEcho + w.token, subjectRevoked,
	} {
		s, err := w.cfg.Conn.nc.ChanSubscribe(subject, msgs)
		if err != nil {
			unsubscribe()
			return nil, fmt.Errorf("subscribe to %s: %w", subject, err)
		}
		subs = append(subs, s)
	}
	stopLink := w.cfg.Conn.listen(w.setLink)
	return func() { stopLink(); unsubscribe() }, nil
}

func (w *Watcher) setLink(l Link) {
	w.change(func(now time.Time) { w.reg.setLink(l, now) })
	if l.Up {
		signal(w.query)
	}
}

func (w *Watcher) watchLoop(msgs <-chan *nats.Msg) {
	tick := time.NewTicker(echoInterval)
	defer tick.Stop()
	for {
		select {
		case <-w.quit:
			return
		case <-w.query:
			w.ask(query{})
		case m := <-msgs:
			w.receive(m, msgs)
		case <-tick.C:
			w.change(w.tick)
			w.doubt()
			w.tellRevoked()
			w.publish(subjectEcho+w.token, "", encodeEcho(time.Since(w.start)))
		}
	}
}

// tick advances the registry's time; w.mu is held.
func (w *Watcher) tick(now time.Time) {
	w.reg.tick(now)
	if w.reg.stale {
		w.store(now)
	}
	w.checkEcho(now)
}

// doubt probes members that NATS does not hear.
func (w *Watcher) doubt() {
	if w.cfg.Probe == nil {
		return
	}
	w.mu.Lock()
	doubts := w.reg.doubts(time.Now(), cap(w.slots)-len(w.slots))
	w.mu.Unlock()
	for _, d := range doubts {
		w.slots <- struct{}{} // does not block: only this goroutine takes slots
		w.probes.Go(func() {
			defer func() { <-w.slots }()
			ctx, cancel := context.WithTimeout(w.probing, answerTime)
			defer cancel()
			err := w.cfg.Probe(ctx, &d.inst)
			if err != nil {
				w.log.Debug("no answer to a probe", "id", d.inst.ID, "err", err)
			}
			w.change(func(now time.Time) { w.reg.settle(&d, err == nil, now) })
		})
	}
}

// checkEcho logs now and then that the watcher's own messages do not come back, so that silence
// is not judged. w.mu is held.
func (w *Watcher) checkEcho(now time.Time) {
	if w.reg.link.Up && now.Sub(w.reg.proved) > echoPatience && now.After(w.muteEcho) {
		w.muteEcho = now.Add(complaints)
		w.log.Warn("no echo from nats, silent workers are not noticed; may this user publish and subscribe to xpyd.fleet.>?")
	}
}

// receive applies m and the messages waiting behind it, then publishes one snapshot.
func (w *Watcher) receive(m *nats.Msg, more <-chan *nats.Msg) {
	var asks []string
	w.change(func(now time.Time) {
		for range batch {
			if id := w.apply(m, now); id != "" {
				asks = append(asks, id)
			}
			select {
			case m = <-more:
			default:
				return
			}
		}
	})
	for _, id := range asks {
		w.ask(query{ID: id})
	}
}

// apply handles one message; w.mu is held.
func (w *Watcher) apply(m *nats.Msg, now time.Time) (ask string) {
	if len(m.Data) == 0 && m.Header.Get("Status") == noResponders {
		return "" // the server says that nobody heard our query
	}
	d, err := decode(m.Subject, m.Data)
	if err != nil {
		w.metrics.refused.Inc()
		if now.After(w.mute) {
			w.mute = now.Add(complaints)
			w.log.Warn("refused a fleet message", "subject", m.Subject, "err", err)
		}
		return ""
	}
	if d.kind == kindEcho {
		if sent := w.start.Add(d.echo); !sent.After(now) {
			w.reg.echo(sent)
		}
		return ""
	}
	return w.reg.apply(&d, now)
}

func (w *Watcher) ask(q query) {
	payload, err := json.Marshal(q)
	if err != nil {
		return
	}
	w.publish(subjectQuery, subjectReply+w.token, payload)
}

// publish drops the message while NATS is away. When the link is back, what matters is sent
// again.
func (w *Watcher) publish(subject, reply string, payload []byte) {
	if w.cfg.Conn == nil {
		return
	}
	if err := w.cfg.Conn.nc.PublishMsg(&nats.Msg{Subject: subject, Reply: reply, Data: payload}); err != nil {
		w.log.Debug("publish", "subject", subject, "err", err)
	}
}

// change runs f on the registry and publishes what it changed.
func (w *Watcher) change(f func(now time.Time)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	now, version := time.Now(), w.reg.version
	f(now)
	if w.reg.version != version {
		w.store(now)
		close(w.changed)
		w.changed = make(chan struct{})
		w.tellRefusals()
	}
	for _, e := range w.reg.events {
		if e.cause == causeJoin {
			w.repeat = time.Time{}
		}
		w.metrics.events.WithLabelValues(string(e.role), e.cause).Inc()
		w.untold = append(w.untold, untold{e, now})
	}
	w.reg.events = w.reg.events[:0]
	w.untold = slices.DeleteFunc(w.untold, func(u untold) bool { return w.tell(&u, now) })
}

func (w *Watcher) store(now time.Time) { w.snap.Store(w.reg.snapshot(now)) }

// untold is an event that is not logged yet.
type untold struct {
	event
	at time.Time
}

// tell logs e. It reports false if it is too early to choose the level, since a process's end
// may be seen before its goodbye. A suspect member gets no warning: it comes back, or dies.
func (w *Watcher) tell(e *untold, now time.Time) bool {
	level := slog.LevelWarn
	switch {
	case e.cause == causeTwice:
		if !w.cfg.Leads { // the router warns
			level = slog.LevelInfo
		}
	case e.cause == causeReport:
		left, settled := w.reg.left(&e.event, e.at, now)
		if !settled {
			return false
		}
		if left {
			level = slog.LevelInfo
		}
	case e.state == Live || e.state == Suspect || e.cause == causeBye || e.cause == causeForget:
		level = slog.LevelInfo
	case e.cause == causeReplace && !w.cfg.Leads: // restarted within a second; the router warned of the death
		level = slog.LevelInfo
	}
	args := []any{"id", e.id, "role", string(e.role), "epoch", e.epoch, "state", string(e.state), "cause", e.cause}
	if e.reason != "" {
		args = append(args, "reason", e.reason)
	}
	w.log.Log(context.Background(), level, "fleet", args...)
	return true
}

// tellRefusals logs each refusal when it begins or changes.
func (w *Watcher) tellRefusals() {
	now := map[string]Refusal{}
	for _, r := range w.snap.Load().Refusals() {
		if now[r.ID] = r; w.refusals[r.ID].Mismatch != r.Mismatch {
			w.log.Warn("incompatible member", "id", r.ID, "role", string(r.Role), "against", r.Against,
				"field", r.Mismatch.Field, "prefill", r.Mismatch.Prefill, "decode", r.Mismatch.Decode)
		}
	}
	w.refusals = now
}

// Snapshot is the fleet now; it never blocks.
func (w *Watcher) Snapshot() *Snapshot { return w.snap.Load() }

// Changed returns a channel that is closed at the next version. Call it before Snapshot.
func (w *Watcher) Changed() <-chan struct{} {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.changed
}

// Wait returns a snapshot newer than version or, if ctx ends first, the current one and ctx's
// error.
func (w *Watcher) Wait(ctx context.Context, version uint64) (*Snapshot, error) {
	for {
		changed := w.Changed()
		if s := w.Snapshot(); s.Version > version {
			return s, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return w.Snapshot(), ctx.Err()
		}
	}
}

// ReportDead is for the data path: the member of that epoch exited, reset or broke a
// connection. It is dead at once; only heartbeats well after that bring it back.
func (w *Watcher) ReportDead(id string, epoch uint64, reason string) {
	w.change(func(now time.Time) { w.reg.reportDead(id, epoch, reason, now) })
}

// ReportAlive is for the data path: the member of that epoch answered. It reports whether that
// counts; soon after ReportDead it does not.
func (w *Watcher) ReportAlive(id string, epoch uint64) (counts bool) {
	w.change(func(now time.Time) { counts = w.reg.reportAlive(id, epoch, now) })
	return counts
}

// ErrTaken is the reason why AddStatic refuses the ID of a live worker that announced itself.
var ErrTaken = errors.New("is a live worker of the fleet")

// AddStatic adds or replaces a member that does not announce itself. It refuses the id of a
// live member that does, unless the epoch is newer and the source is not Admin, and an id that
// was removed at this epoch.
func (w *Watcher) AddStatic(inst Instance, source Source) (err error) {
	if source == NATS || source == "" {
		return fmt.Errorf("add %s: source %q announces itself", clip(inst.ID), source)
	}
	if err := inst.Validate(); err != nil {
		return fmt.Errorf("add %s: %w", clip(inst.ID), err)
	}
	w.change(func(now time.Time) {
		rec := w.reg.members[inst.ID]
		switch {
		case w.reg.revoked.has(inst.ID):
			err = fmt.Errorf("add %s: the id is revoked", inst.ID)
		case rec != nil && rec.Source == NATS && source == Admin && !over(rec.State):
			err = fmt.Errorf("%s %w", inst.ID, ErrTaken)
		case rec != nil && rec.Source == NATS && inst.Epoch <= rec.Epoch && !over(rec.State):
			err = fmt.Errorf("add %s: the id is taken by a worker that announced itself", inst.ID)
		case w.reg.announce(&inst, source, now):
		case rec == nil:
			err = fmt.Errorf("add %s: the table of %d members is full", inst.ID, maxMembers)
		case rec.Epoch == inst.Epoch:
			err = fmt.Errorf("add %s: it was taken out at epoch %d (%s); only a newer one brings it back", inst.ID, rec.Epoch, rec.Reason)
		default:
			err = fmt.Errorf("add %s: epoch %d is known, which is newer than %d", inst.ID, rec.Epoch, inst.Epoch)
		}
	})
	return err
}

// Learn replaces was, a member that does not announce itself, by is, which knows more about it.
// Load, Draining and its state stay. It reports false, and changes nothing, if the member was
// removed or is no longer as in was.
func (w *Watcher) Learn(was, is Instance) (ok bool, err error) {
	if err := is.Validate(); err != nil {
		return false, fmt.Errorf("learn %s: %w", clip(is.ID), err)
	}
	w.change(func(time.Time) { ok = w.reg.learn(&was, &is) })
	return ok, nil
}

// Remove ends a member of any source until it starts anew. It reports whether there was one.
func (w *Watcher) Remove(id, reason string) (ok bool) {
	w.change(func(now time.Time) { ok = w.reg.remove(id, reason, now) })
	return ok
}

// Close stops watching and waits. The last snapshot stays.
func (w *Watcher) Close() {
	w.closeOnce.Do(func() { close(w.quit) })
	<-w.done
}
