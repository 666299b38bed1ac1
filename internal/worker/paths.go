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
// socket answers and the peer can write to our pool; else over TCP, through host
// memory. It remembers what it chose and why, for status, metrics and log.
type paths struct {
	recv    opener
	mode    string
	near    string   // the faster way of this worker's pool: shm or cudaipc
	machine string   // of this process; see machineID
	private string   // why our pool cannot be shared; "": it can
	staged  []string // ways between GPUs that do not reach each other, fastest first
	members func() []fleet.Member
	publish func(summary string)
	log     *slog.Logger
	gauge   *prometheus.GaugeVec

	mu    sync.Mutex
	peers map[string]path // by id; only of the fleet's members
}

// path is how one peer is reached.
type path struct {
	epoch     uint64
	transport string
	reason    string    // why not the faster one: a metric's label
	why       string    // in words
	retry     time.Time // when the faster one is tried again
	// remembered says that it is what was chosen before.
	remembered bool
}

// pathRetry is how long a peer whose local socket did not answer is reached
// over TCP before the socket is tried again.
const pathRetry = 10 * time.Second

// Reasons for not using the near way.
const (
	reasonSetting  = "setting"  // kv.transport is tcp
	reasonMemory   = "memory"   // our pool cannot be shared
	reasonStranger = "stranger" // not a member of the fleet
	reasonPeer     = "peer"     // it offers no such thing
	reasonMachine  = "machine"  // it is on another one
	reasonUser     = "user"     // it is another one's
	reasonFailed   = "failed"   // its socket does not answer
	reasonRefused  = "refused"  // it cannot write to our pool: GPUs without access to each other
)

// newPaths registers its gauge with reg.
func newPaths(recv opener, mode, near, private string, members func() []fleet.Member, publish func(string), log *slog.Logger, reg prometheus.Registerer) (*paths, error) {
	p := &paths{recv: recv, mode: mode, near: near, machine: machineID(), private: private, members: members, publish: publish, log: log, peers: map[string]path{},
		gauge: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "xpyd_worker_kv_peers",
			Help: "Workers that this one has collected KV from, by transport and, over tcp, by why not the way through shared memory or from GPU to GPU."}, []string{"transport", "reason"})}
	return p, reg.Register(p.gauge)
}

// Open implements decode.Opener.
func (p *paths) Open(ctx context.Context, addr string, peer kvconn.PeerID) (*kvconn.Session, error) {
	m := p.member(addr, peer)
	local, next := p.local(m)
	if local != "" {
		s, err := p.recv.Open(ctx, local, peer)
		if err == nil {
			p.note(m, path{transport: p.near})
			return s, nil
		}
		if !unreachable(err) {
			return nil, err
		}
		next = path{transport: transportTCP, reason: reasonFailed, why: p.near + ": " + cause(err), retry: time.Now().Add(pathRetry)}
		if kvconn.OutcomeOf(err, "") == ticket.Refused {
			next.reason = reasonRefused
		}
	}
	if m != nil && m.KVDevice != "" && next.reason != reasonSetting || p.only() {
		s, tried, err := p.between(ctx, m, peer, next)
		if s != nil || err != nil {
			return s, err
		}
		next = tried
	}
	if p.mode == p.near || p.only() {
		return nil, &kvconn.Error{Op: "open", Peer: peer, Phase: kvconn.PhaseDial, Outcome: ticket.Incompatible,
			Err: fmt.Errorf("kv.transport is %s here, which does not reach it: %s", p.mode, next.why)}
	}
	s, err := p.recv.Open(ctx, addr, peer)
	if err == nil { // else the peer is in trouble, whatever the path
		p.note(m, next)
	}
	return s, err
}

// only says that one of the ways between GPUs is the only one allowed.
func (p *paths) only() bool { return p.mode == transportNCCL || p.mode == transportPinned }

// between tries the ways between GPUs that do not reach each other's memory; from
// the one that was remembered on, if there is one. With neither a session nor an
// error none of them leads there, for reasons that are added to why.
func (p *paths) between(ctx context.Context, m *fleet.Member, peer kvconn.PeerID, why path) (*kvconn.Session, path, error) {
	from := 0
	if !why.retry.IsZero() && why.transport != "" { // remembered, or just failed
		from = max(0, slices.Index(p.staged, why.transport))
		if why.remembered && why.transport == transportTCP {
			from = len(p.staged)
		}
	}
	for _, name := range p.staged[from:] {
		addr := ""
		switch {
		case m == nil:
			return nil, why, nil
		case name == transportNCCL && m.KVAddr != "":
			addr = transportNCCL + ":" + m.KVAddr
		case name == transportPinned && m.Machine == p.machine && m.Machine != "":
			addr = pinnedAddr(m.KVDevice)
		}
		if addr == "" {
			continue
		}
		s, err := p.recv.Open(ctx, addr, peer)
		if err == nil {
			why.transport = name
			p.note(m, why)
			return s, why, nil
		}
		if !unreachable(err) {
			return nil, why, err
		}
		if why.why != "" {
			why.why += "; "
		}
		why.why += name + ": " + cause(err)
		why.retry = time.Now().Add(pathRetry)
	}
	why.transport = transportTCP
	return nil, why, nil
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

// local returns the peer's local address, or the path that is taken instead: for
// a while the one that was found when a faster one did not lead there.
func (p *paths) local(m *fleet.Member) (addr string, instead path) {
	tcp := func(reason, why string) (string, path) {
		return "", path{transport: transportTCP, reason: reason, why: why}
	}
	near := ""
	if m != nil {
		near = map[string]string{transportSHM: m.KVLocal, transportIPC: m.KVDevice}[p.near]
		p.mu.Lock()
		old := p.peers[m.ID]
		p.mu.Unlock()
		if old.epoch == m.Epoch && time.Now().Before(old.retry) {
			old.remembered = true
			return "", old
		}
	}
	switch {
	case p.mode == transportTCP || p.only():
		return tcp(reasonSetting, "kv.transport is "+p.mode)
	case p.private != "":
		return tcp(reasonMemory, p.private)
	case m == nil:
		return tcp(reasonStranger, "no member of this fleet")
	case near == "" || m.Machine == "":
		return tcp(reasonPeer, "it does not offer "+p.near)
	case m.Machine != p.machine:
		ours, _, _ := strings.Cut(p.machine, "/")
		theirs, _, _ := strings.Cut(m.Machine, "/")
		if ours != theirs {
			return tcp(reasonMachine, "on another machine")
		}
		return tcp(reasonUser, "of another user")
	}
	return near, path{}
}

// note remembers how a member is reached, and tells when that is new.
func (p *paths) note(m *fleet.Member, now path) {
	if m == nil {
		return
	}
	now.epoch, now.remembered = m.Epoch, false
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
