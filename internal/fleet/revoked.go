package fleet

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/xpyd/xpyd/internal/trust"
)

// Revocation is the newest decision on whether an id is shut out of the fleet. Every router
// keeps and repeats all of them. Of two about one id, the later counts.
type Revocation struct {
	ID   string `json:"id"`
	At   int64  `json:"at"`             // microseconds since 1970
	Back bool   `json:"back,omitempty"` // no longer shut out
}

const (
	maxRevocations = 128
	maxAhead       = 5 * time.Minute // of another router's clock
	repeatRevoked  = 5 * time.Second // for those who have not heard of them
)

// Errors of Revoke and Unrevoke.
var (
	ErrManyRevoked = fmt.Errorf("%d ids are revoked, which is the limit: replace the fleet's secret instead", maxRevocations)
	ErrNotRevoked  = errors.New("it is not revoked")
)

// revocations are all of them, by id.
type revocations map[string]Revocation

// has reports whether an id is shut out.
func (t revocations) has(id string) bool {
	r, ok := t[id]
	return ok && !r.Back
}

// merge adds those that are newer, and returns them.
func (t revocations) merge(list []Revocation, now time.Time) (news []Revocation) {
	for _, r := range list {
		old, known := t[r.ID]
		if ValidID(r.ID) != nil || r.At <= 0 || r.At > now.Add(maxAhead).UnixMicro() || known && (r.At < old.At || r.At == old.At && (r.Back || r == old)) {
			continue
		}
		if !known && len(t) >= maxRevocations && !t.room() {
			continue
		}
		t[r.ID] = r
		news = append(news, r)
	}
	return news
}

// room forgets the oldest one that no longer shuts out.
func (t revocations) room() bool {
	var oldest Revocation
	for _, r := range t {
		if r.Back && (oldest.ID == "" || r.At < oldest.At) {
			oldest = r
		}
	}
	delete(t, oldest.ID)
	return oldest.ID != ""
}

// list returns all of them, sorted by id.
func (t revocations) list() []Revocation {
	return slices.SortedFunc(maps.Values(t), func(a, b Revocation) int { return strings.Compare(a.ID, b.ID) })
}

// shutOut lists the ids that are shut out, ascending.
func (t revocations) shutOut() (ids []string) {
	for _, r := range t.list() {
		if !r.Back {
			ids = append(ids, r.ID)
		}
	}
	return ids
}

// revoke applies revocations. Members that are shut out end. Those that may come back are
// forgotten, so that their next sign of life is news.
func (r *registry) revoke(list []Revocation, now time.Time) (changed bool) {
	for _, n := range r.revoked.merge(list, now) {
		changed = true
		r.version++
		if secret, ok := strings.CutPrefix(n.ID, trust.SecretName); ok && !n.Back {
			r.retired(secret, now)
		}
		rec := r.members[n.ID]
		switch {
		case rec == nil:
		case n.Back && rec.Revoked && rec.Source == NATS:
			r.forget(rec)
		case n.Back && rec.Revoked: // does not announce itself: others look for it
			rec.Revoked = false
			r.end(rec, Dead, causeRevoked, "not revoked any more", now)
		case !n.Back:
			rec.Revoked = true
			r.end(rec, Gone, causeRevoked, "revoked", now)
		}
	}
	return changed
}

// revokedMessage is what routers repeat.
type revokedMessage struct {
	Revoked []Revocation `json:"revoked"`
}

func decodeRevoked(payload []byte) ([]Revocation, error) {
	var m revokedMessage
	if err := json.Unmarshal(payload, &m); err != nil {
		return nil, err
	}
	if len(m.Revoked) > maxRevocations {
		return nil, fmt.Errorf("%d revocations, at most %d allowed", len(m.Revoked), maxRevocations)
	}
	for _, r := range m.Revoked {
		if err := ValidID(r.ID); err != nil {
			return nil, err
		}
	}
	return m.Revoked, nil
}

// Revoke shuts an id out of the fleet, in all routers and workers: its announcements are ignored
// and its work ends. Its machine still knows the fleet's secret, and may return under another id.
func (w *Watcher) Revoke(id string) error { return w.revocation(id, false) }

// Unrevoke lets an id come back.
func (w *Watcher) Unrevoke(id string) error { return w.revocation(id, true) }

func (w *Watcher) revocation(id string, back bool) (err error) {
	if err := ValidID(id); err != nil {
		return err
	}
	w.change(func(now time.Time) {
		t := w.reg.revoked
		old, known := t[id]
		switch {
		case back && !t.has(id):
			err = ErrNotRevoked
		case !back && t.has(id):
			return
		default:
			at := now.UnixMicro()
			if known { // maybe by a router whose clock is ahead
				at = max(at, old.At+1)
			}
			if !w.reg.revoke([]Revocation{{ID: id, At: at, Back: back}}, now) {
				err = ErrManyRevoked
			}
			w.repeat = time.Time{}
		}
	})
	return err
}

// Revocations returns all of them, for the WatcherConfig.Revoked of the next start.
func (w *Watcher) Revocations() []Revocation {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.reg.revoked.list()
}

// tellRevoked repeats the revocations now and then, and for members that have just joined.
func (w *Watcher) tellRevoked() {
	w.mu.Lock()
	now, list := time.Now(), w.reg.revoked.list()
	due := w.cfg.Leads && len(list) > 0 && !now.Before(w.repeat)
	if due {
		w.repeat = now.Add(repeatRevoked)
	}
	w.mu.Unlock()
	if !due {
		return
	}
	if payload, err := json.Marshal(revokedMessage{list}); err == nil {
		w.publish(subjectRevoked, "", payload)
	}
}
