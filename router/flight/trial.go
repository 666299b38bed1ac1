package flight

import (
	"slices"
	"sync"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
)

// A stream that has lost two workers may be what they died of. It is on trial where it goes on next:
// nobody else's stream is sent to that decode for as long, and no other suspect is on trial. If that
// worker is lost too, it was the stream, which ends. One that gets on is a stream like any other.
const (
	// trialSettles is how long after its second loss a stream waits: workers that are lost together
	// are known to be by then.
	trialSettles = time.Second
	trialTokens  = 16              // that it has got on
	trialWithin  = 5 * time.Second // it is over, since others wait
	trialsKept   = 16              // workers that were lost so
)

// trials sees to it that one suspect at a time is on trial.
type trials struct {
	place chan struct{} // has an element during a trial

	mu   sync.Mutex
	of   *request
	at   workerKey   // its decode
	lost []workerKey // decodes that were lost under a trial, oldest first
}

func newTrials() *trials { return &trials{place: make(chan struct{}, 1)} }

// begin waits until q may be on trial. It returns false if the request ends before.
func (t *trials) begin(q *request) bool {
	settled := time.NewTimer(time.Until(q.seam.broke.Add(trialSettles)))
	defer settled.Stop()
	q.setState(statePicking)
	select {
	case <-settled.C:
	case <-q.ctx.Done():
		return false
	}
	select {
	case t.place <- struct{}{}:
	case <-q.ctx.Done():
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.of = q
	return true
}

// sits notes which decode q is on trial at.
func (t *trials) sits(q *request, d *fleet.Instance) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.of == q {
		t.at = workerKey{d.ID, d.Epoch}
	}
}

// where is the decode that other streams are to keep from, "" if there is none.
func (t *trials) where() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.at.id
}

// end ends q's trial, if it is on trial still.
func (t *trials) end(q *request) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.of != q {
		return
	}
	t.of, t.at = nil, workerKey{}
	<-t.place
}

// blames reports whether the loss of a worker counts against q: not if somebody else was on trial
// there.
func (t *trials) blames(q *request, by *fleet.Instance) bool {
	k := workerKey{by.ID, by.Epoch}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.of != nil && t.at == k {
		if t.of != q {
			return false
		}
		t.lost = append(t.lost[max(0, len(t.lost)+1-trialsKept):], k)
	}
	return t.of == q || !slices.Contains(t.lost, k)
}

// lostBy notes that the stream lost a worker.
func (q *request) lostBy(by *fleet.Instance) {
	if !q.s.trials.blames(q, by) {
		return
	}
	q.seam.breaks++
	q.seam.broke = time.Now()
}

// onTrial has a suspect go on trial, once its turn has come. It returns false if the request ends
// before.
func (q *request) onTrial() bool {
	if q.seam.breaks < maxTakeovers || q.trial > 0 {
		return true
	}
	if !q.s.trials.begin(q) {
		return false
	}
	q.trial = trialTokens
	q.trialEnds = time.AfterFunc(trialWithin, func() { q.s.trials.end(q) })
	return true
}

// proceeds counts tokens that a stream on trial has got on.
func (q *request) proceeds(n int) {
	if q.trial -= n; q.trial <= 0 {
		q.acquit()
	}
}

// acquit ends a trial, if there is one.
func (q *request) acquit() {
	if q.trialEnds != nil {
		q.trialEnds.Stop()
		q.s.trials.end(q)
		q.trial, q.trialEnds = 0, nil
	}
}

// apart adds to avoided who is to be left to a suspect; for a suspect, all decodes but the one with
// the fewest streams.
func (q *request) apart(now *fleet.Snapshot, exclude, avoided []string) []string {
	if !q.resumes || q.trial == 0 {
		if at := q.s.trials.where(); at != "" {
			avoided = append(avoided[:len(avoided):len(avoided)], at)
		}
		return avoided
	}
	streams := q.s.legs.streams()
	var best *fleet.Member
	var all []string
	for i := range now.Members {
		m := &now.Members[i]
		if !q.s.Picker.Does(&m.Instance, fleet.Decode) || !q.s.Members.Serves(m) || slices.Contains(exclude, m.ID) || slices.Contains(avoided, m.ID) {
			continue
		}
		all = append(all, m.ID)
		if best == nil || streams[workerKey{m.ID, m.Epoch}] < streams[workerKey{best.ID, best.Epoch}] {
			best = m
		}
	}
	if best == nil {
		return avoided
	}
	return append(avoided[:len(avoided):len(avoided)], slices.DeleteFunc(all, func(id string) bool { return id == best.ID })...)
}

// streams counts the decode legs of each worker.
func (r *legs) streams() map[workerKey]int {
	out := map[workerKey]int{}
	r.mu.Lock()
	defer r.mu.Unlock()
	for l := range r.open {
		if l.role == fleet.Decode {
			out[workerKey{l.inst.ID, l.inst.Epoch}]++
		}
	}
	return out
}
