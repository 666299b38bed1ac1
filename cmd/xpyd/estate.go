package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/handover"
	"github.com/xpyd/xpyd/internal/supervise"
)

// Names of the descriptors that a new process gets.
const (
	handLock, handPublic, handAdmin, handNATS = "lock", "listen", "admin_listen", "fleet.listen"
)

// word is a message between a running `up` and the one that takes over. The first is an offer.
type word struct {
	Lacks  string   `json:"lacks,omitempty"`  // new: what it still waits for
	Failed string   `json:"failed,omitempty"` // new: why it ends
	Ready  []string `json:"ready,omitempty"`  // new: its workers, all of which serve
	Take   bool     `json:"take,omitempty"`   // old: NATS is yours
	Took   bool     `json:"took,omitempty"`   // new: so it is, and nothing is missing
	Yours  bool     `json:"yours,omitempty"`  // old: the folder and the clients are yours
	Left   string   `json:"left,omitempty"`   // old: what it still has
}

// offer tells a new process what it takes over.
type offer struct {
	Build   string    `json:"build"`
	Began   time.Time `json:"began"`
	Prefill int       `json:"prefill"` // workers of each role now
	Decode  int       `json:"decode"`
	Workers []ofFleet `json:"workers"` // that will end
	NATS    string    `json:"nats"`    // URL of the embedded server; "": it is another one's
	Made    bool      `json:"made"`    // the data folder was made, and is to be removed
}

// ofFleet names a worker in its fleet.
type ofFleet struct {
	ID    string `json:"id"`
	Epoch uint64 `json:"epoch"`
}

// estate is what an `up` takes over from a running one.
type estate struct {
	offer
	talk          *handover.Talk
	lock          *os.File
	public, admin net.Listener
	nats          *os.File // nil without an embedded server
	joined        *joining // the new front's
}

const offerWait = 10 * time.Second

// inherit receives the offer of the process that this one is to take over from; nil if there is none.
func inherit(place *handover.Place) (e *estate, err error) {
	if place.First() {
		return nil, nil
	}
	e = &estate{talk: place.Heir(), lock: place.File(handLock), nats: place.File(handNATS)}
	if err = e.talk.Receive(&e.offer, time.Now().Add(offerWait)); err != nil {
		return nil, fmt.Errorf("hear what the running process offers: %w", err)
	}
	if e.public, err = place.Listener(handPublic); err != nil {
		return nil, err
	}
	if e.admin, err = place.Listener(handAdmin); err != nil {
		return nil, err
	}
	if e.lock == nil || e.public == nil || e.NATS != "" && e.nats == nil {
		return nil, errors.New("the running process offers no lock, no listener or no NATS")
	}
	return e, nil
}

// has reports whether an id is that of a worker that will end.
func (e *estate) has(id string) bool {
	return e != nil && slices.ContainsFunc(e.Workers, func(w ofFleet) bool { return w.ID == id })
}

// knowOld is how long the old workers are waited for.
const knowOld = 2 * time.Second

// heir finds this process's place before cmd reads its settings, and tells the process that it is to
// take over from why it fails.
func heir(cmd *cobra.Command, place *handover.Place) {
	run := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		here, err := handover.Here()
		if err != nil {
			return err
		}
		*place = *here
		defer place.Close()
		if err = run(cmd, args); err != nil && !place.First() {
			_ = place.Heir().Send(&word{Failed: err.Error()}) // it may have ended
		}
		return err
	}
}

// avoid drains the old workers here, so that this router serves by its own. One that is not heard of
// is not there.
func (e *estate) avoid(ctx context.Context, f *front) error {
	if e == nil {
		return nil
	}
	limit, cancel := context.WithTimeout(ctx, knowOld)
	defer cancel()
	for s := f.watcher.Snapshot(); ; {
		lacks := false
		for _, w := range e.Workers {
			m := s.Get(w.ID)
			lacks = lacks || m == nil && w.Epoch != 0
		}
		if !lacks {
			break
		}
		var err error
		if s, err = f.watcher.Wait(limit, s.Version); err != nil {
			break
		}
	}
	for _, w := range e.Workers {
		f.router.Members.Mark(w.ID, w.Epoch, false)
	}
	return ctx.Err()
}

// serving waits until all workers of sup serve, and tells the old process what is missing.
func (e *estate) serving(ctx context.Context, f *front, sup *supervise.Supervisor) error {
	doing := useOf(f)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	told := ""
	for {
		lacks := ""
		var ids []string
		for _, s := range sup.Status() {
			ids = append(ids, s.Name)
			if _, use := doing(s); s.State != supervise.Ready {
				lacks = s.Name + ": " + string(s.State)
			} else if use != supervise.Working {
				lacks = s.Name + ": not probed yet"
				if m := f.watcher.Snapshot().Get(s.Name); m != nil {
					if _, why := f.router.Members.ProbeState(m); why != "" {
						lacks = s.Name + ": " + why
					}
				}
			}
			if s.Exit != nil {
				return startError(&s)
			}
		}
		if lacks == "" && f.router.Ready() {
			return e.talk.Send(&word{Ready: ids})
		}
		if lacks != told {
			told = lacks
			if err := e.talk.Send(&word{Lacks: lacks}); err != nil {
				return err
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// take makes f the folder's only front, once the old process says so. Before its last word this
// process may fail, and the old one goes on.
func (e *estate) take(ctx context.Context, f *front, cfg *RouterConfig) error {
	stop := context.AfterFunc(ctx, func() { e.talk.Close() })
	defer stop()
	if err := e.hear(func(w *word) bool { return w.Take }); err != nil {
		return err
	}
	if e.nats != nil {
		defer e.nats.Close()
		if err := f.wakeNATS(cfg, e.nats); err != nil {
			return err
		}
	}
	// Mostly the files stay as they are; the old process writes none of them now.
	if err := errors.Join(f.secret.publish(), f.tell(cfg)); err != nil {
		return err
	}
	if err := e.talk.Send(&word{Took: true}); err != nil {
		return err
	}
	if err := e.hear(func(w *word) bool { return w.Yours }); err != nil {
		return err
	}
	f.data.Take()
	f.serve(e.joined)
	return nil
}

// hear waits for a word of the old process, which gives up in time.
func (e *estate) hear(is func(*word) bool) error {
	var w word
	err := e.talk.Receive(&w, time.Time{})
	if err == nil && !is(&w) {
		err = fmt.Errorf("it says %+v", w)
	}
	if err != nil {
		return fmt.Errorf("wait for the running process: %w", err)
	}
	return nil
}

// follow shows what the old process still has, until it has ended.
func (e *estate) follow(u *upgrader) {
	u.tasks.Go(func() {
		stop := context.AfterFunc(u.ctx, func() { e.talk.Close() })
		defer stop()
		for {
			var w word
			if err := e.talk.Receive(&w, time.Time{}); err != nil {
				break
			}
			u.set(func(s *upgradeStatus) { s.Left = w.Left })
		}
		u.set(func(s *upgradeStatus) { s.Phase = phaseDone })
	})
}

// counts are the workers that an `up` begins with.
func (e *estate) counts(cfg *upConfig) {
	cfg.Prefill, cfg.Decode = max(e.Prefill, 1), max(e.Decode, 1)
}

// lend returns what a new process needs of this one. The caller closes all but the lock, on errors
// too.
func (f *front) lend() (files []handover.File, err error) {
	files = append(files, handover.File{Name: handLock, File: f.data.Lock()})
	public, admin := f.router.Listeners()
	lns := map[string]net.Listener{handPublic: public, handAdmin: admin}
	if f.nats != nil {
		lns[handNATS] = f.nats.Listener()
	}
	for name, ln := range lns {
		if ln == nil {
			continue
		}
		file, err := handover.Socket(ln)
		if err != nil {
			return files, fmt.Errorf("%s: %w", name, err)
		}
		files = append(files, handover.File{Name: name, File: file})
	}
	return files, nil
}

// restNATS ends the embedded server, if there is one; its socket stays with whom it was lent to.
func (f *front) restNATS() {
	if f.nats != nil {
		f.nats.Close()
		f.nats = nil
		f.revoker.host(nil)
		f.secret.host(nil)
	}
}

// wakeNATS starts the embedded server on a socket that there is.
func (f *front) wakeNATS(cfg *RouterConfig, socket *os.File) error {
	ln, err := net.FileListener(socket)
	if err != nil {
		return err
	}
	server := cfg.Fleet.server(f.secret.ring)
	server.Log, server.Listener = f.log, ln
	if f.nats, err = fleet.StartServer(server); err != nil {
		return err
	}
	f.revoker.host(f.nats)
	f.secret.host(f.nats)
	return nil
}

// give leaves the data folder to a new process.
func (f *front) give() {
	if f.endFollow != nil {
		f.endFollow()
		f.endFollow = nil
	}
	f.endKeep()
	f.endKeep = nil
	f.data.Give()
}
