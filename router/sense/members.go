// Package sense knows which workers there are and what they can do: which of them may get
// users' requests, what of a prompt they hold, and how engines are found.
package sense

import (
	"context"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/router/discover"
	"github.com/xpyd/xpyd/router/h1"
	"github.com/xpyd/xpyd/router/pick"
	"github.com/xpyd/xpyd/router/share"
)

// MembersDeps is what Members is given.
type MembersDeps struct {
	Fleet        *fleet.Watcher
	Log          *slog.Logger
	Picker       *pick.Picker
	Client       *h1.Client
	Ring         *trust.Ring // the fleet's secrets; nil: native workers are shown none
	MemberTLS    bool        // native workers are reached by TLS
	ProbeTimeout time.Duration
	Judge        time.Duration     // how often workers are compared
	Share        *share.Sharer     // nil without a bus
	HTTP         *http.Client      // asks engines what they are
	Ctx          context.Context   //nolint:containedctx // ends when everything must
	Spawn        func(func()) bool // runs what shutdown waits for; false if it is too late
}

// Members knows which of the fleet's members may get users' requests.
type Members struct {
	MembersDeps
	tokens  *trust.Tokens // for the fleet's workers
	created time.Time
	memberMetrics

	trier   Trier
	poke    chan struct{} // wakes probeLoop
	probeMu sync.Mutex
	known   map[probeKey]*probeState
	probed  atomic.Pointer[probed]

	p2p   *discover.P2P // nil if it is off
	found []finder

	mu     sync.Mutex
	knocks map[probeKey]bool // connection attempts of knock, by worker, without the role
	marked map[string]mark   // the workers that are drained from here on, before they announce it
	marks  uint64            // changes of marked

	leaving atomic.Pointer[map[string]*Leaving] // nil if nobody leaves

	staticMu sync.Mutex // one SetStatic at a time
	statics  map[string]Static
}

// NewMembers makes it; Start begins to probe.
func NewMembers(d MembersDeps) *Members {
	ms := &Members{MembersDeps: d, tokens: trust.NewTokens(d.Ring), created: time.Now(), memberMetrics: newMemberMetrics(),
		poke: make(chan struct{}, 1), known: map[probeKey]*probeState{},
		knocks: map[probeKey]bool{}, marked: map[string]mark{}, statics: map[string]Static{}}
	ms.probed.Store(&probed{change: make(chan struct{})})
	return ms
}

// HasPair reports whether some model has a pair. An engine that only embeds counts as one
// until a pair has generated something; then it would hide that all pairs are lost.
func (ms *Members) HasPair() bool {
	v := ms.View()
	return ms.Picker.Ready(v, func(model string) bool { return !ms.probed.Load().generated || !ms.OnlyEmbeds(v.Snapshot, model) })
}

// View is the fleet as users' requests may use it.
func (ms *Members) View() pick.View {
	ms.mu.Lock()
	marks := ms.marks
	ms.mu.Unlock()
	return pick.View{Snapshot: ms.Fleet.Snapshot(), Generation: ms.probed.Load().generation + marks, Now: time.Now(), Behind: true,
		Eligible: func(m *fleet.Member) bool { return ms.passed(m) && !ms.Drained(m) }}
}

// OnlyEmbeds reports whether all usable workers of a model only embed.
func (ms *Members) OnlyEmbeds(s *fleet.Snapshot, model string) bool {
	list, n := ms.Embedders(), 0
	if len(list) == 0 {
		return false
	}
	for m := range s.Usable(fleet.Decode) {
		if m.Model != model {
			continue
		}
		if n++; !slices.Contains(list, m.ID) {
			return false
		}
	}
	return n > 0
}

// Served lists the models that a pair can serve now, in order of their workers; known says
// of every model whether it is one of them.
func (ms *Members) Served() (list []openai.Model, known map[string]bool) {
	v := ms.View()
	known = ms.Picker.Models(v)
	for i := range v.Snapshot.Members {
		m := &v.Snapshot.Members[i]
		if !m.Usable() || !ms.Picker.Does(&m.Instance, fleet.Decode) || !known[m.Model] || !v.Eligible(m) {
			continue
		}
		if i := slices.IndexFunc(list, func(o openai.Model) bool { return o.ID == m.Model }); i >= 0 {
			list[i].MaxModelLen = min(list[i].MaxModelLen, m.MaxModelLen)
			continue
		}
		list = append(list, openai.Model{ID: m.Model, Created: ms.created.Unix(), MaxModelLen: m.MaxModelLen})
	}
	return list, known
}

// Start begins to probe by t, and to follow the fleet's guards and choices.
func (ms *Members) Start(t Trier) {
	ms.trier = t
	for _, f := range []func(){ms.probeLoop, ms.followPicks, ms.followGuards} {
		ms.Spawn(f)
	}
}

// Sweep follows the fleet: it forgets the drains of workers that left, has streams of those
// that announce one move, and has newcomers probed.
func (ms *Members) Sweep(s *fleet.Snapshot) {
	ms.forgetMarks(s)
	ms.mu.Lock()
	ms.findLeaving()
	ms.mu.Unlock()
	ms.Picker.Refresh(ms.View()) // also for marks that went
	ms.wakeProbes()
}

// DrainAsked reports whether a drain of that worker, asked for here, is in force.
func (ms *Members) DrainAsked(id string) bool {
	ms.mu.Lock()
	defer ms.mu.Unlock()
	_, ok := ms.marked[id]
	return ok
}

// Serves reports whether users' requests may go to m: it is live, has passed its probe and
// is not drained.
func (ms *Members) Serves(m *fleet.Member) bool {
	return m.Usable() && ms.passed(m) && !ms.Drained(m)
}

// Drained reports whether m was drained here.
func (ms *Members) Drained(m *fleet.Member) bool {
	ms.mu.Lock()
	defer ms.mu.Unlock()
	k, ok := ms.marked[m.ID]
	return ok && k.epoch == m.Epoch
}

// Mark remembers a drain. stays says that the worker's streams end there.
func (ms *Members) Mark(id string, epoch uint64, stays bool) {
	ms.setMark(func() { ms.marked[id] = mark{epoch, stays} })
}

// Unmark forgets a drain.
func (ms *Members) Unmark(id string) { ms.setMark(func() { delete(ms.marked, id) }) }

func (ms *Members) setMark(set func()) {
	ms.mu.Lock()
	set()
	ms.marks++
	ms.findLeaving()
	ms.mu.Unlock()
	ms.Picker.Refresh(ms.View())
}

// forgetMarks drops the drains of workers that left and of past epochs. A drain that its
// worker began its next epoch with goes on.
func (ms *Members) forgetMarks(s *fleet.Snapshot) {
	ms.mu.Lock()
	defer ms.mu.Unlock()
	for id, k := range ms.marked {
		switch m := s.Get(id); {
		case m != nil && m.Epoch == k.epoch && m.State != fleet.Gone:
		case m != nil && m.Epoch > k.epoch && m.Draining:
			ms.marked[id] = mark{m.Epoch, k.stays}
		default:
			delete(ms.marked, id)
			ms.marks++
		}
	}
}
