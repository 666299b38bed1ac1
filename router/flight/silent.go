package flight

import (
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router/dialect"
	"github.com/xpyd/xpyd/router/h1"
	"github.com/xpyd/xpyd/router/pick"
)

// A worker that stops (SIGSTOP, a network that is cut) breaks no connection. Silence on a stream
// alone is no sign: a step may take long. So a worker whose streams are silent is asked, and one
// that does not answer loses those that another pair can go on with.
//
// A timer for each stream would have to be set again with each event. Instead, a stream notes that
// it begins and ends to wait for its worker (leg.waits), and one goroutine looks at all of them.
const (
	listenEvery = 100 * time.Millisecond
	// The rest is in ticks of listenEvery. They do not pass while the router itself is stopped.
	silentAfter  = 10                         // on a stream whose worker does not answer: it is taken
	answerWithin = 4                          // a worker does not answer
	askAfter     = silentAfter - answerWithin // of silence on a stream: its worker is asked
	askEvery     = 3                          // as long as it goes on
	awakeEvery   = 10                         // without a stream, until a worker that did not answer does
)

var (
	errSilent   = errors.New("it is silent, and does not answer the router")
	errNoAnswer = errors.New("the time for an answer is over")
)

// silence is what is known of decode workers with silent streams.
type silence struct {
	s   *Service
	now int32 // ticks
	// ask asks a worker whether it is there, until the life ends.
	ask func(*h1.Life, *fleet.Instance) error
	// gone reports whether the fleet knows that a worker is not there.
	gone func(*fleet.Instance) bool
	// elsewhere reports whether there is a pair to go on with a worker's streams; mu is held.
	elsewhere func(*fleet.Instance) bool

	mu    sync.Mutex
	asked map[workerKey]*question
}

type workerKey struct {
	id    string
	epoch uint64
}

// question is the latest to a worker.
type question struct {
	inst *fleet.Instance
	at   int32
	life *h1.Life // nil: it is over
	mute bool     // the latest that is over was not answered
}

// Listen takes streams from workers that have stopped, and has some move from slow ones, until the
// router ends.
func (s *Service) Listen() {
	tick := time.NewTicker(listenEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			s.silence.listen()
			s.balanced(s.silence.now)
		case <-s.Ctx.Done():
			return
		}
	}
}

// listen is called with each tick.
func (n *silence) listen() {
	n.now++
	quiet := n.s.legs.quiet(n.now)
	n.mu.Lock()
	defer n.mu.Unlock()
	for k, legs := range quiet {
		if n.asked[k] == nil {
			n.asked[k] = &question{inst: legs[0].inst, at: n.now - askEvery}
		}
	}
	for k, w := range n.asked {
		if w.life != nil && n.now-w.at >= answerWithin {
			if !w.mute {
				n.s.Log.Warn("a decode worker does not answer, and its streams are silent", "id", k.id)
			}
			w.mute = true
			w.life.End(errNoAnswer)
			w.life = nil
		}
		if w.life == nil && (w.mute && n.gone(w.inst) || !w.mute && len(quiet[k]) == 0) {
			delete(n.asked, k)
			continue
		}
		every := int32(askEvery)
		if len(quiet[k]) == 0 {
			every = awakeEvery
		}
		if w.life == nil && n.now-w.at >= every {
			n.put(w)
		}
		if w.mute {
			n.takeFrom(w, quiet[k])
		}
	}
}

// put asks a worker; n.mu is held.
func (n *silence) put(w *question) {
	life := &h1.Life{}
	w.life, w.at = life, n.now
	if !n.s.Spawn(func() {
		defer life.Within(n.s.Ctx)()
		err := n.ask(life, w.inst)
		n.mu.Lock()
		defer n.mu.Unlock()
		if w.life != life { // too late
			return
		}
		w.life = nil
		w.mute = w.mute && err != nil // an error before its time says nothing
	}) {
		w.life = nil
	}
}

// takeFrom ends the legs that have been silent for long enough, if another pair could go on with
// them; else they wait. n.mu is held.
func (n *silence) takeFrom(w *question, legs []*leg) {
	legs = slices.DeleteFunc(legs, func(l *leg) bool { return n.now-l.still < silentAfter })
	if len(legs) == 0 || !n.elsewhere(w.inst) {
		return
	}
	for _, l := range legs {
		if end := func() { l.End(errSilent) }; !n.s.Spawn(end) { // closing TLS can take a while
			end()
		}
	}
}

func (s *Service) gone(inst *fleet.Instance) bool {
	m := s.fleet.Snapshot().Get(inst.ID)
	return m == nil || m.Epoch != inst.Epoch || m.State == fleet.Dead || m.State == fleet.Gone
}

func (s *Service) elsewhere(by *fleet.Instance) bool {
	now := s.fleet.Snapshot()
	free := func(m *fleet.Member, role fleet.Role) bool {
		w := s.silence.asked[workerKey{m.ID, m.Epoch}]
		return s.Picker.Does(&m.Instance, role) && s.Members.Serves(m) && (w == nil || !w.mute) && s.Picker.Guard(m.ID, m.Epoch).State == pick.Closed
	}
	for i := range now.Members {
		d := &now.Members[i]
		if d.ID == by.ID || !free(d, fleet.Decode) || !goesOn(&d.Instance, by) {
			continue
		}
		for j := range now.Members {
			if p := &now.Members[j]; free(p, fleet.Prefill) && fleet.Compatible(&p.Instance, &d.Instance) == nil {
				return true
			}
		}
	}
	return false
}

// goesOn reports whether m could go on with a stream of by.
func goesOn(m, by *fleet.Instance) bool {
	d := dialect.For(m.Dialect)
	return d != nil && (d.TakesOver || d.Replays) && m.Dialect == by.Dialect && m.Model == by.Model && m.ModelFingerprint == by.ModelFingerprint &&
		m.TokenizerFingerprint == by.TokenizerFingerprint && m.Numerics == by.Numerics && m.Parsers == by.Parsers
}

// mute reports whether a worker did not answer when it was asked last.
func (n *silence) mute(inst *fleet.Instance) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	w := n.asked[workerKey{inst.ID, inst.Epoch}]
	return w != nil && w.mute
}

// quiet notes which legs have gone on waiting, and returns those that have for askAfter, by worker.
func (r *legs) quiet(now int32) map[workerKey][]*leg {
	var out map[workerKey][]*leg
	r.mu.Lock()
	defer r.mu.Unlock()
	for l := range r.open {
		if n := l.waits.Load(); n != l.seen || n%2 == 0 {
			l.seen, l.still = n, now
		} else if now-l.still >= askAfter {
			if out == nil {
				out = map[workerKey][]*leg{}
			}
			k := workerKey{l.inst.ID, l.inst.Epoch}
			out[k] = append(out[k], l)
		}
	}
	return out
}
