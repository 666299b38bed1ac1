package way

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// Opener is what a Chooser needs of kvconn.Receiver.
type Opener interface {
	Open(ctx context.Context, addr string, peer kvconn.PeerID) (*kvconn.Session, error)
}

// Config is what a Chooser needs of its worker.
type Config struct {
	Ways    *Set
	Recv    Opener
	Machine string // Machine's, of this process
	// Find returns what the peer of an id announces, or, where the id is empty, the one
	// whose network address is addr; the zero Peer: no such member of the fleet.
	Find     func(addr string, id kvconn.PeerID) Peer
	Publish  func(summary string) // how each peer is reached, in a line
	Log      *slog.Logger
	Register prometheus.Registerer
}

// Chooser takes the fastest way that leads to each peer, and remembers which, and why
// none faster, for status, metrics and log. A way that fails is left alone for a while
// that doubles; then the next request has it tried again.
type Chooser struct {
	cfg   Config
	gauge *prometheus.GaugeVec

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup // faster ways being tried again; grows under mu, while not closed

	mu     sync.Mutex
	taken  map[string]choice // by peer id; only of the fleet's members
	trying map[string]bool   // by peer id: a faster way is being tried again
	closed bool
}

// choice is how one peer is reached.
type choice struct {
	epoch  uint64
	way    string
	reason Reason        // why not the fastest way
	why    string        // why none of the faster ones, in words
	retry  time.Time     // when one that has failed is tried again; zero: none has
	wait   time.Duration // before that
}

// not adds a way that does not lead to the peer.
func (c *choice) not(reason Reason, why string) {
	if c.reason == "" {
		c.reason = reason
	} else {
		c.why += "; "
	}
	c.why += why
}

// A way that has failed is left alone for firstRetry, then twice as long each time, at
// most lastRetry.
const (
	firstRetry = 10 * time.Second
	lastRetry  = 5 * time.Minute
)

// NewChooser registers its gauge. Close it.
func NewChooser(cfg Config) (*Chooser, error) {
	c := &Chooser{cfg: cfg, taken: map[string]choice{}, trying: map[string]bool{},
		gauge: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "xpyd_worker_kv_peers",
			Help: "Workers from which this one collects KV, by transport and by the reason why no faster one is used."}, []string{"transport", "reason"})}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	return c, cfg.Register.Register(c.gauge)
}

// Close ends what is being tried, and waits for it.
func (c *Chooser) Close() {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.cancel()
	c.wg.Wait()
}

// Open implements decode.Opener. While a faster way that has failed is left alone, and
// while it is tried again, the one taken since is taken at once.
func (c *Chooser) Open(ctx context.Context, addr string, id kvconn.PeerID) (*kvconn.Session, error) {
	peer := c.cfg.Find(addr, id)
	ways, from := c.cfg.Ways.ways, 0
	old, known := c.recall(&peer)
	if known {
		from = slices.IndexFunc(ways, func(w *way) bool { return w.Name == old.way })
	}
	s, now, err := c.try(ctx, ways[from:], addr, id, &peer, old)
	if errors.Is(err, errNoWay) {
		return nil, &kvconn.Error{Op: "open", Peer: id, Phase: kvconn.PhaseDial, Outcome: ticket.Incompatible,
			Err: fmt.Errorf("kv.transport is %s here, which does not reach it: %s", c.cfg.Ways.setting, strings.TrimPrefix(now.why, c.cfg.Ways.says()+"; "))}
	}
	if err != nil {
		return nil, err
	}
	if now != old {
		c.note(&peer, now)
	} else if !time.Now().Before(old.retry) {
		c.again(ways[:from], addr, id, &peer, old)
	}
	return s, nil
}

var errNoWay = errors.New("no way")

// try takes the first of ways that leads to the peer, and adds to what is known why those
// before it do not; errNoWay: none does. Any other error says that the peer is in trouble,
// or this process, whatever the way.
func (c *Chooser) try(ctx context.Context, ways []*way, addr string, id kvconn.PeerID, peer *Peer, now choice) (*kvconn.Session, choice, error) {
	wait := min(max(firstRetry, 2*now.wait), lastRetry)
	for _, w := range ways {
		at, reason, why := addr, Reason(""), ""
		if !w.network {
			at, reason, why = c.reach(w, peer)
		}
		if reason != "" {
			now.not(reason, w.Name+": "+why)
			continue
		}
		s, err := c.cfg.Recv.Open(ctx, at, id)
		if err == nil {
			now.way = w.Name
			return s, now, nil
		}
		if w.network || !unreachable(err) {
			return nil, now, err
		}
		reason = Failed
		if kvconn.OutcomeOf(err, "") == ticket.Refused {
			reason = Refused
		}
		now.not(reason, w.Name+": "+cause(err))
		now.wait, now.retry = wait, time.Now().Add(wait)
	}
	return nil, now, errNoWay
}

// again tries the ways to a peer that are faster than the one taken, beside the requests
// that take it: a link between GPUs that cannot be made may need seconds to say so. One try
// a peer is under way at a time; a session that it opens is there for the next request.
func (c *Chooser) again(faster []*way, addr string, id kvconn.PeerID, peer *Peer, old choice) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || c.trying[peer.ID] || c.taken[peer.ID] != old {
		return
	}
	c.trying[peer.ID] = true
	c.wg.Go(func() {
		_, now, err := c.try(c.ctx, faster, addr, id, peer, c.fresh(old.wait))
		switch {
		case errors.Is(err, errNoWay):
			now.way = old.way
		case err != nil: // the peer is in trouble, which says nothing of the way
			now = old
			now.wait = min(2*old.wait, lastRetry)
			now.retry = time.Now().Add(now.wait)
		}
		c.mu.Lock()
		delete(c.trying, peer.ID)
		keep := !c.closed && (err == nil || c.taken[peer.ID] == old) // else a request has found out more
		c.mu.Unlock()
		if keep {
			c.note(peer, now)
		}
	})
}

// fresh is what is known of a peer before any way is tried.
func (c *Chooser) fresh(wait time.Duration) choice {
	now := choice{wait: wait}
	if s := c.cfg.Ways; s.barred {
		now.not(Setting, s.says())
	}
	return now
}

// recall returns how a peer is reached since a faster way has failed; known is false when
// all ways are to be tried.
func (c *Chooser) recall(peer *Peer) (old choice, known bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if old := c.taken[peer.ID]; old.epoch == peer.Epoch && !old.retry.IsZero() {
		return old, true
	}
	return c.fresh(0), false
}

// unreachable reports whether an error is about the way, a socket that does not lead to the
// peer or a peer that does not take our memory, rather than about the peer.
func unreachable(err error) bool {
	e, ok := errors.AsType[*kvconn.Error](err)
	return ok && (e.Phase == kvconn.PhaseDial && e.Outcome == ticket.Dead || e.Outcome == ticket.Refused)
}

// cause is the innermost text of a failed open: peer and phase are shown beside it.
func cause(err error) string {
	if e, ok := errors.AsType[*kvconn.Error](err); ok {
		err = e.Err
	}
	return err.Error()
}

// note remembers how a member of the fleet is reached, and publishes it when that is new.
func (c *Chooser) note(peer *Peer, now choice) {
	if peer.ID == "" {
		return
	}
	now.epoch = peer.Epoch
	if now.retry.IsZero() {
		now.wait = 0
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	old, known := c.taken[peer.ID]
	c.taken[peer.ID] = now
	if known && old.way == now.way && old.why == now.why {
		return
	}
	c.cfg.Log.Info("kv path", "peer", peer.ID, "transport", now.way, "why_not_faster", now.why)
	c.publish()
}

// Keep forgets the peers that are not there any more.
func (c *Chooser) Keep(there func(kvconn.PeerID) bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := len(c.taken)
	maps.DeleteFunc(c.taken, func(id string, v choice) bool { return !there(kvconn.PeerID{ID: id, Epoch: v.epoch}) })
	if len(c.taken) < n {
		c.publish()
	}
}

// publish says how each peer is reached. c.mu is held.
func (c *Chooser) publish() {
	c.gauge.Reset()
	for _, v := range c.taken {
		c.gauge.WithLabelValues(v.way, string(v.reason)).Inc()
	}
	c.cfg.Publish(c.summary())
}

// maxSummary bounds the summary, in bytes: it is a field of the announcement.
const maxSummary = 400

// summary says in a line how each peer is reached. c.mu is held.
func (c *Chooser) summary() string {
	ids := slices.Sorted(maps.Keys(c.taken))
	var b strings.Builder
	for i, id := range ids {
		v := c.taken[id]
		text := id + " " + v.way
		if v.why != "" {
			text += " (" + strings.Map(printable, v.why) + ")"
		}
		if b.Len()+len(text) > maxSummary {
			fmt.Fprintf(&b, ", and %d more", len(ids)-i)
			break
		}
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString(text)
	}
	return b.String()
}

func printable(r rune) rune {
	if r < ' ' || r > '~' {
		return '?'
	}
	return r
}
