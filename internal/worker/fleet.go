package worker

import (
	"context"
	"errors"
	"net"
	"sync"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/fleet"
)

// membership is the worker's place in the fleet: it announces the worker and
// watches the others, so that a request cannot make us dial a stranger. With
// no NATS configured both are absent and the description is kept here.
type membership struct {
	conn      *fleet.Conn
	announcer *fleet.Announcer
	watcher   *fleet.Watcher

	mu    sync.Mutex
	alone fleet.Instance // used without NATS
}

func join(w *Worker) (*membership, error) {
	m := &membership{alone: w.instance()}
	if w.cfg.Fleet.URL == "" {
		return m, nil
	}
	f := w.cfg.Fleet
	conn, err := fleet.Connect(fleet.ConnConfig{URL: f.URL, Name: w.identity.ID, CredsFile: f.CredsFile,
		TLSCert: f.TLSCert, TLSKey: f.TLSKey, TLSCA: f.TLSCA, Insecure: f.Insecure, Log: w.log})
	if err != nil {
		return nil, &config.KeyError{Key: "fleet.url", Msg: err.Error()}
	}
	m.conn = conn
	if m.watcher, err = fleet.Watch(fleet.WatcherConfig{Conn: conn, Log: w.log, Registerer: w.registry}); err == nil {
		m.announcer, err = fleet.Announce(fleet.AnnouncerConfig{Conn: conn, Instance: m.alone, Load: w.currentLoad, Heartbeat: f.Heartbeat, Log: w.log})
	}
	if err != nil {
		return nil, errors.Join(err, m.close(context.Background()))
	}
	return m, nil
}

// knows says whether addr is the KV listener of a fleet member, or on the
// host of one.
func (m *membership) knows(addr string) bool {
	if m.watcher == nil {
		return false
	}
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return false
	}
	members := m.watcher.Snapshot().Members
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

func (m *membership) close(ctx context.Context) error {
	var errs []error
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
