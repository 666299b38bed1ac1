package worker

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/kvconn/way"
)

// membership is the worker's place in the fleet: it announces the worker and watches the others, so
// that a request cannot make us dial a stranger. Without NATS it only keeps the worker's
// description.
type membership struct {
	conn      *fleet.Conn
	announcer *fleet.Announcer
	watcher   *fleet.Watcher

	endFollow context.CancelFunc // of follow; nil before begin, and without a watcher
	following sync.WaitGroup

	mu    sync.Mutex
	alone fleet.Instance // used without NATS
}

func join(w *Worker, secrets *trust.Ring, dial fleet.Dial) (*membership, error) {
	m := &membership{alone: w.Instance()}
	if w.cfg.Fleet.URL == "" {
		return m, nil
	}
	f := w.cfg.Fleet
	conn, err := fleet.Connect(fleet.ConnConfig{URL: f.URL, Ring: secrets, Name: w.identity.ID, CredsFile: f.CredsFile,
		TLSCert: f.TLSCert, TLSKey: f.TLSKey, TLSCA: f.TLSCA, Insecure: f.Insecure, Dial: dial, Log: w.log})
	if err != nil {
		return nil, &config.KeyError{Key: "join", Msg: err.Error()}
	}
	m.conn = conn
	if m.watcher, err = fleet.Watch(fleet.WatcherConfig{Conn: conn, Probe: fleet.ProbeHealth(w.tls.Client(), dial), Log: w.log, Registerer: w.registry}); err == nil {
		m.announcer, err = fleet.Announce(fleet.AnnouncerConfig{Conn: conn, Instance: m.alone, Load: w.currentLoad, Heartbeat: f.Heartbeat, Log: w.log})
	}
	if err != nil {
		return nil, errors.Join(err, m.close(context.Background()))
	}
	return m, nil
}

// begin follows the fleet until close. w.fleet is set by then: what follow calls reads it.
func (m *membership) begin(w *Worker) {
	if m.watcher == nil {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	m.endFollow = cancel
	m.following.Go(func() { m.follow(ctx, w) })
}

// follow shuts out who is revoked, and forgets how workers that are gone were reached, until ctx
// ends.
func (m *membership) follow(ctx context.Context, w *Worker) {
	var last []string
	for version := uint64(0); ; {
		s, err := m.watcher.Wait(ctx, version)
		if err != nil {
			return
		}
		w.chooser.Keep(m.there)
		if version = s.Version; !slices.Equal(s.Revoked, last) {
			last = s.Revoked
			w.Revoke(last)
		}
	}
}

// members is the fleet as this worker sees it; empty without one.
func (m *membership) members() []fleet.Member {
	if m == nil || m.watcher == nil {
		return nil
	}
	return m.watcher.Snapshot().Members
}

// member returns the fleet's record of a worker; nil if there is none.
func (m *membership) member(id string) *fleet.Member {
	if m == nil || m.watcher == nil {
		return nil
	}
	return m.watcher.Snapshot().Get(id)
}

// there reports whether a run of a worker has not ended, as far as is known.
func (m *membership) there(id kvconn.PeerID) bool {
	p := m.member(id.ID)
	return p != nil && p.Epoch == id.Epoch && p.State != fleet.Dead && p.State != fleet.Gone
}

// reachedBy implements way.Config.Find.
func (m *membership) reachedBy(addr string, id kvconn.PeerID) (found way.Peer) {
	members := m.members()
	for i := range members {
		p := &members[i]
		if id.ID == "" && p.KVAddr == addr || id.ID == p.ID && (id.Epoch == 0 || id.Epoch == p.Epoch) {
			return way.Peer{PeerID: kvconn.PeerID{ID: p.ID, Epoch: p.Epoch}, Machine: p.Machine, Addrs: p.KVWays}
		}
	}
	return found
}

// knows reports whether addr is on the host of a fleet member's KV listener.
func (m *membership) knows(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return false
	}
	members := m.members()
	for i := range members {
		known, _, err := net.SplitHostPort(members[i].KVAddr)
		if err == nil && known == host {
			return true
		}
	}
	return false
}

func (m *membership) instance() (fleet.Instance, bool) {
	if m.announcer != nil {
		return m.announcer.Instance(), true
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.alone, m.alone.ID != ""
}

func (m *membership) update(f func(*fleet.Instance)) error {
	if m == nil {
		return nil
	}
	if m.announcer != nil {
		return m.announcer.Update(f)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	f(&m.alone)
	return nil
}

// rejoin moves to the NATS servers of url. An empty url changes nothing, and a worker in no fleet
// stays in none.
func (m *membership) rejoin(url string) error {
	if m.conn == nil || url == "" {
		return nil
	}
	return m.conn.Rejoin(url)
}

func (m *membership) close(ctx context.Context) error {
	var errs []error
	if m.endFollow != nil {
		m.endFollow()
		m.following.Wait()
	}
	if m.announcer != nil {
		errs = append(errs, m.announcer.Close(ctx))
	}
	if m.watcher != nil {
		m.watcher.Close()
	}
	if m.conn != nil {
		errs = append(errs, m.conn.Close(ctx))
	}
	return errors.Join(errs...)
}

// Revoke shuts out the workers with these ids, and only these: their sessions end, and no new ones
// are made, whoever names them. See kvconn.Server.Revoke.
func (w *Worker) Revoke(ids []string) {
	w.shutOut.Store(&ids)
	w.recv.Revoke(ids)
	w.server.Revoke(ids)
	if w.ring.Retire(ids) { // one of them is a secret that our join line still names
		if err := w.renew(); err != nil {
			w.log.Error("announce the secrets in force", "error", err)
		}
	}
	if slices.Contains(ids, w.identity.ID) {
		w.log.Warn("this worker is revoked: the fleet does not hear it and gives it nothing; `xpyd unrevoke` takes that back", "id", w.identity.ID)
	} else {
		w.log.Info("revoked", "ids", ids)
	}
}

func (w *Worker) revoked(id string) bool {
	ids := w.shutOut.Load()
	return ids != nil && slices.Contains(*ids, id)
}

func (w *Worker) refuseRevoked(id string) error {
	if w.revoked(id) {
		return failed(ticket.Incompatible, fmt.Errorf("%s is revoked", id))
	}
	return nil
}
