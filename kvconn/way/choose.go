package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// Values of kv.transport.
const (
	transportAuto = "auto" // the fastest that works, for each peer
	transportTCP  = "tcp"
	transportSHM  = "shm"
	transportIPC  = "cudaipc"
	// Between GPUs that do not reach each other's memory.
	transportNCCL   = "nccl"
	transportPinned = "pinned"
)

// transports is all ways to a peer as one: an address that begins with a near
// transport's name and a colon is dialled there.
type transports struct {
	kvconn.Transport
	near []kvconn.Transport // nil ones: there is none
}

func (t transports) Dial(ctx context.Context, addr string) (net.Conn, error) {
	for _, near := range t.near {
		if near != nil && strings.HasPrefix(addr, near.Name()+":") {
			return near.Dial(ctx, addr)
		}
	}
	return t.Transport.Dial(ctx, addr)
}

// opener is what paths needs of kvconn.Receiver.
type opener interface {
	Open(ctx context.Context, addr string, peer kvconn.PeerID) (*kvconn.Session, error)
}

// paths chooses how decode reaches each prefill worker: by the near way, shared
// memory or from GPU to GPU, where both run under one user on one machine, the
// socket answers and the peer can write to our pool; else, of GPUs, by NCCL or through
// pinned memory; else over TCP, through host memory. It remembers what it chose and
// why nothing faster, for status, metrics and log.
type paths struct {
	recv    opener
	mode    string
	near    string      // the faster way of this worker's pool: shm or cudaipc
	machine string      // of this process; see machineID
	private string      // why our pool cannot be shared; "": it can
	staged  []stagedWay // those that the setting allows
	members func() []fleet.Member
	publish func(summary string)
	log     *slog.Logger
	gauge   *prometheus.GaugeVec

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup // faster ways being tried again; grows under mu, while not closed

	mu     sync.Mutex
	peers  map[string]path // by id; only of the fleet's members
	trying map[string]bool // by id: a faster way is being tried again
	closed bool
}

// path is how one peer is reached.
type path struct {
	epoch     uint64
	transport string
	reason    string        // why not the fastest way: a metric's label
	why       string        // why none of the faster ones, in words
	retry     time.Time     // when one that has failed is tried again; zero: none has
	wait      time.Duration // before that
}

// not adds a way that does not lead to the peer.
func (t *path) not(reason, why string) {
	if t.reason == "" {
		t.reason = reason
	} else {
		t.why += "; "
	}
	t.why += why
}

// How long a way that has failed is left alone, twice as long each time; then the next
// request has it tried again.
const (
	pathRetry     = 10 * time.Second
	pathRetryMost = 5 * time.Minute
)

// Reasons for not using the near way.
const (
	reasonSetting  = "setting"  // kv.transport is tcp
	reasonMemory   = "memory"   // our pool cannot be shared, or this process has no such way
	reasonStranger = "stranger" // not a member of the fleet
	reasonPeer     = "peer"     // it offers no such thing
	reasonMachine  = "machine"  // it is on another one
	reasonUser     = "user"     // it is another one's
	reasonFailed   = "failed"   // its socket does not answer
	reasonRefused  = "refused"  // it cannot write to our pool: GPUs without access to each other
)

// newPaths registers its gauge with reg. Close it.
func newPaths(recv opener, mode, near, private string, members func() []fleet.Member, publish func(string), log *slog.Logger, reg prometheus.Registerer) (*paths, error) {
	p := &paths{recv: recv, mode: mode, near: near, machine: machineID(), private: private, members: members, publish: publish, log: log, peers: map[string]path{}, trying: map[string]bool{},
		gauge: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "xpyd_worker_kv_peers",
			Help: "Workers that this one has collected KV from, by transport and by why not the fastest one, through shared memory or from GPU to GPU."}, []string{"transport", "reason"})}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	return p, reg.Register(p.gauge)
}

// Close ends what is being tried, and waits for it.
func (p *paths) Close() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.cancel()
	p.wg.Wait()
}

// Open implements decode.Opener. While a faster way that has failed is left alone, and
// while it is tried again, the one taken since is taken at once.
func (p *paths) Open(ctx context.Context, addr string, peer kvconn.PeerID) (*kvconn.Session, error) {
	m := p.member(addr, peer)
	old := p.recall(m)
	ways, from := p.ways(m), 0
	if old.transport != "" {
		if from = slices.IndexFunc(ways, func(w way) bool { return w.transport == old.transport }); from < 0 {
			from = len(ways)
		}
	}
	s, now, err := p.try(ctx, ways[from:], peer, old)
	if errors.Is(err, errNoWay) {
		if p.mode != transportAuto && p.mode != transportTCP {
			return nil, &kvconn.Error{Op: "open", Peer: peer, Phase: kvconn.PhaseDial, Outcome: ticket.Incompatible,
				Err: fmt.Errorf("kv.transport is %s here, which does not reach it: %s", p.mode, now.why)}
		}
		now.transport = transportTCP
		s, err = p.recv.Open(ctx, addr, peer)
	}
	if err != nil {
		return nil, err // the peer is in trouble, whatever the path
	}
	if now != old {
		p.note(m, now)
	} else if m != nil && !time.Now().Before(old.retry) {
		p.again(m, ways[:from], peer, old)
	}
	return s, nil
}

var errNoWay = errors.New("no way")

// try takes the first of ways that leads to the peer, and adds to what is known what it
// has learnt of those before it; errNoWay: none does.
func (p *paths) try(ctx context.Context, ways []way, peer kvconn.PeerID, now path) (*kvconn.Session, path, error) {
	wait := min(max(pathRetry, 2*now.wait), pathRetryMost)
	for _, w := range ways {
		if w.addr == "" {
			now.not(w.reason, w.why)
			continue
		}
		s, err := p.recv.Open(ctx, w.addr, peer)
		if err == nil {
			now.transport = w.transport
			return s, now, nil
		}
		if !unreachable(err) {
			return nil, now, err
		}
		reason := reasonFailed
		if kvconn.OutcomeOf(err, "") == ticket.Refused {
			reason = reasonRefused
		}
		now.not(reason, w.transport+": "+cause(err))
		now.wait, now.retry = wait, time.Now().Add(wait)
	}
	return nil, now, errNoWay
}

// again tries the ways to a member that are faster than the one taken, beside the requests
// that take it: a link between GPUs that cannot be made may need seconds to say so. One try
// a member is under way at a time; a session that it opens is there for the next request.
func (p *paths) again(m *fleet.Member, faster []way, peer kvconn.PeerID, old path) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.trying[m.ID] || p.peers[m.ID] != old {
		return
	}
	p.trying[m.ID] = true
	p.wg.Go(func() {
		_, now, err := p.try(p.ctx, faster, peer, path{wait: old.wait})
		switch {
		case errors.Is(err, errNoWay):
			now.transport = old.transport
		case err != nil: // the peer is in trouble, which says nothing of the way
			now = old
			now.wait = min(2*old.wait, pathRetryMost)
			now.retry = time.Now().Add(now.wait)
		}
		p.mu.Lock()
		delete(p.trying, m.ID)
		keep := !p.closed && (err == nil || p.peers[m.ID] == old) // else a request has found out more
		p.mu.Unlock()
		if keep {
			p.note(m, now)
		}
	})
}

// only says that one of the ways between GPUs is the only one allowed.
func (p *paths) only() bool { return p.mode == transportNCCL || p.mode == transportPinned }

// recall is how a member is reached since a faster way has failed; else it has no
// transport yet.
func (p *paths) recall(m *fleet.Member) path {
	if m == nil {
		return path{}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if old := p.peers[m.ID]; old.epoch == m.Epoch && !old.retry.IsZero() {
		return old
	}
	return path{}
}

// way is a way to a peer, or why it is none.
type way struct {
	transport string
	addr      string // "": see reason and why
	reason    string
	why       string
}

// ways are those to a peer that are faster than TCP, fastest first.
func (p *paths) ways(m *fleet.Member) []way {
	all := []way{p.nearTo(m)}
	for _, s := range p.staged {
		if m != nil {
			all = append(all, p.stagedTo(m, s))
		}
	}
	return all
}

// nearTo is the near way to a peer.
func (p *paths) nearTo(m *fleet.Member) way {
	not := func(reason, why string) way { return way{p.near, "", reason, why} }
	if p.mode == transportTCP || p.only() {
		return not(reasonSetting, "kv.transport is "+p.mode)
	}
	if p.private != "" {
		return not(reasonMemory, p.private)
	}
	if m == nil {
		return not(reasonStranger, "no member of this fleet")
	}
	addr := map[string]string{transportSHM: m.KVLocal, transportIPC: m.KVDevice}[p.near]
	if addr == "" || m.Machine == "" {
		return not(reasonPeer, "it does not offer "+p.near)
	}
	if reason, why := p.apart(m); reason != "" {
		return not(reason, why)
	}
	return way{transport: p.near, addr: addr}
}

// stagedTo is a way through memory between our GPU and a member's.
func (p *paths) stagedTo(m *fleet.Member, s stagedWay) way {
	not := func(reason, why string) way { return way{s.name, "", reason, s.name + ": " + why} }
	switch {
	case s.private != "":
		return not(reasonMemory, s.private)
	case m.KVDevice == "" && !p.only(), s.name == transportPinned && m.KVDevice == "", m.KVAddr == "":
		return not(reasonPeer, "it does not offer it")
	case s.name == transportNCCL:
		return way{transport: s.name, addr: transportNCCL + ":" + m.KVAddr}
	}
	if reason, why := p.apart(m); reason != "" {
		return not(reason, why)
	}
	return way{transport: s.name, addr: pinnedAddr(m.KVDevice)}
}

// apart says why no memory of this machine can be shared with a member; "": it can.
func (p *paths) apart(m *fleet.Member) (reason, why string) {
	ours, _, _ := strings.Cut(p.machine, "/")
	theirs, _, _ := strings.Cut(m.Machine, "/")
	switch {
	case m.Machine == p.machine && p.machine != "":
		return "", ""
	case ours != theirs || p.machine == "":
		return reasonMachine, "on another machine"
	}
	return reasonUser, "of another user"
}

// pinnedAddr is where a worker listens for the way through pinned memory: beside
// what it announces for its GPU.
func pinnedAddr(device string) string {
	return transportPinned + ":" + strings.TrimPrefix(device, transportIPC+":") + "-" + transportPinned
}

// unreachable tells a local socket that does not lead to the peer, or a peer
// that does not take our memory, from a peer that is in trouble.
func unreachable(err error) bool {
	var e *kvconn.Error
	return errors.As(err, &e) && (e.Phase == kvconn.PhaseDial && e.Outcome == ticket.Dead || e.Outcome == ticket.Refused)
}

// cause is the innermost text of a failed open: peer and phase stand beside it.
func cause(err error) string {
	var e *kvconn.Error
	if errors.As(err, &e) {
		return e.Err.Error()
	}
	return err.Error()
}

// member finds the announcement of a peer, by its id when that is known.
func (p *paths) member(addr string, peer kvconn.PeerID) *fleet.Member {
	members := p.members()
	for i := range members {
		m := &members[i]
		if peer.ID == "" && m.KVAddr == addr || peer.ID == m.ID && (peer.Epoch == 0 || peer.Epoch == m.Epoch) {
			return m
		}
	}
	return nil
}

// note remembers how a member is reached, and tells when that is new.
func (p *paths) note(m *fleet.Member, now path) {
	if m == nil {
		return
	}
	now.epoch = m.Epoch
	if now.retry.IsZero() {
		now.wait = 0
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	old, known := p.peers[m.ID]
	p.peers[m.ID] = now
	if known && old.transport == now.transport && old.why == now.why {
		return
	}
	members := p.members()
	for id := range p.peers {
		if !slices.ContainsFunc(members, func(m fleet.Member) bool { return m.ID == id }) {
			delete(p.peers, id)
		}
	}
	p.log.Info("kv path", "peer", m.ID, "transport", now.transport, "why_not_faster", now.why)
	p.gauge.Reset()
	for _, v := range p.peers {
		p.gauge.WithLabelValues(v.transport, v.reason).Inc()
	}
	p.publish(p.summary())
}

// maxSummary is what fits an announcement's field.
const maxSummary = 400

// summary says in a line how each peer is reached; needs mu.
func (p *paths) summary() string {
	ids := make([]string, 0, len(p.peers))
	for id := range p.peers {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	var b strings.Builder
	for i, id := range ids {
		v := p.peers[id]
		text := id + " " + v.transport
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

// machineID names the machine and the user of this process: only processes
// with the same one can share memory. "" when the system does not say.
func machineID() string {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return fmt.Sprintf("%s/%d", strings.TrimSpace(string(boot)), os.Geteuid())
}
