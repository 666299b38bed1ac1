// Package sense knows who is there and what they can: which members of the fleet
// may get users' requests, what of a prompt they hold, and how engines are found.
package sense

import (
	"context"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/router/discover"
	"github.com/xpyd/xpyd/router/h1"
	"github.com/xpyd/xpyd/router/pick"
	"github.com/xpyd/xpyd/router/share"
)

// Fleet is what the router needs of who is there; *fleet.Watcher has it.
type Fleet interface {
	// Snapshot is the fleet now.
	Snapshot() *fleet.Snapshot
	// Changed returns a channel that closes when a newer version is there.
	Changed() <-chan struct{}
	// ReportDead says that the data path found a worker gone.
	ReportDead(id string, epoch uint64, reason string)
}

// Reviver is a Fleet whose members need not announce themselves: such a one
// that died is alive again when it takes connections.
type Reviver interface {
	ReportAlive(id string, epoch uint64) bool
}

// Learner is a Fleet that takes in what an engine says of itself. It says false
// when the member is not what was read any more.
type Learner interface {
	Learn(was, is fleet.Instance) (ok bool, err error)
}

// Editor is a Fleet that the admin API can add to and remove from.
type Editor interface {
	AddStatic(inst fleet.Instance, source fleet.Source) error
	Remove(id, reason string) bool
}

// MembersDeps is what Members is given.
type MembersDeps struct {
	Fleet        Fleet
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
	Spawn        func(func()) bool // runs what shutdown waits for; false when it is too late
}

// Members knows which of the fleet's members may get users' requests.
type Members struct {
	MembersDeps
	tokens  *trust.Tokens // for the fleet's workers
	probes  *prober
	found   discovery
	created time.Time
	memberMetrics

	mu     sync.Mutex
	knocks map[string]bool // connection attempts of knock, by worker
	marked map[string]mark // drains that were asked for here
	marks  uint64          // changes of marked

	staticMu sync.Mutex // one SetStatic at a time
	statics  map[string]Static
}

// NewMembers makes it; Start begins to probe.
func NewMembers(d MembersDeps) *Members {
	ms := &Members{MembersDeps: d, tokens: trust.NewTokens(d.Ring), created: time.Now(),
		memberMetrics: newMemberMetrics(), knocks: map[string]bool{}, marked: map[string]mark{}, statics: map[string]Static{}}
	ms.probes = newProber(ms)
	return ms
}

// HasPair reports whether some model has a pair. An engine that embeds and does not
// generate counts as one until a pair has generated something: it would hide
// that all those are lost.
func (ms *Members) HasPair() bool {
	v := ms.View()
	return ms.Picker.Ready(v, func(model string) bool { return !ms.probes.haveGenerated() || !ms.OnlyEmbeds(v.Snapshot, model) })
}

// View is the fleet as users' requests may use it.
func (ms *Members) View() pick.View {
	ms.mu.Lock()
	marks := ms.marks
	ms.mu.Unlock()
	return pick.View{Snapshot: ms.Fleet.Snapshot(), Generation: ms.probes.generation() + marks, Now: time.Now(), Behind: true,
		Eligible: func(m *fleet.Member) bool { return ms.probes.passed(m) && !ms.Drained(m) }}
}

// OnlyEmbeds reports whether all usable workers of a model are such.
func (ms *Members) OnlyEmbeds(s *fleet.Snapshot, model string) bool {
	list, n := ms.probes.embedders(), 0
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

// Served lists the models that some pair can serve now, in order of their
// workers, and says of all that are known whether they are such.
func (ms *Members) Served() (list []openai.Model, known map[string]bool) {
	v := ms.View()
	known = ms.Picker.Models(v)
next:
	for m := range v.Snapshot.Usable(fleet.Decode) {
		if !known[m.Model] || !v.Eligible(m) {
			continue
		}
		for i := range list {
			if list[i].ID == m.Model {
				list[i].MaxModelLen = min(list[i].MaxModelLen, m.MaxModelLen)
				continue next
			}
		}
		list = append(list, openai.Model{ID: m.Model, Created: ms.created.Unix(), MaxModelLen: m.MaxModelLen})
	}
	return list, known
}

// Start begins to probe by t, and to follow the fleet's guards and choices.
func (ms *Members) Start(t Trier) {
	ms.probes.try = t
	for _, f := range []func(){ms.probes.loop, ms.followPicks, ms.followGuards} {
		ms.Spawn(f)
	}
}

// Probed returns a channel that closes when more workers have passed their probe.
func (ms *Members) Probed() <-chan struct{} { return ms.probes.changed() }

// Embedders are the workers that passed and generate nothing; mostly nil.
func (ms *Members) Embedders() []string { return ms.probes.embedders() }

// ProbeState is what the admin API shows of m: passed, or the last error.
func (ms *Members) ProbeState(m *fleet.Member) (ok bool, err string) { return ms.probes.state(m) }

// Refusals are the engines that were found lately and not added.
func (ms *Members) Refusals() []discover.Refusal { return ms.found.refusals() }

// Sweep follows the fleet: it forgets the drains of who has left, and has
// newcomers probed.
func (ms *Members) Sweep(s *fleet.Snapshot) {
	ms.forgetMarks(s)
	ms.Picker.Refresh(ms.View()) // also for marks that went
	ms.probes.wake()
}

// Close ends discovery.
func (ms *Members) Close() error {
	ms.HTTP.CloseIdleConnections()
	return ms.found.close()
}

// mark is a drain asked for here. It holds from that moment on, before the
// worker announces it.
type mark struct {
	epoch uint64
}

// DrainAsked reports whether a drain of that worker, asked for here, is in force.
func (ms *Members) DrainAsked(id string) bool {
	ms.mu.Lock()
	defer ms.mu.Unlock()
	_, ok := ms.marked[id]
	return ok
}

// Serves reports whether users' requests may go to m: it is live, has passed its
// probe and is not drained.
func (ms *Members) Serves(m *fleet.Member) bool {
	return m.Usable() && ms.probes.passed(m) && !ms.Drained(m)
}

// Drained reports whether m was drained here.
func (ms *Members) Drained(m *fleet.Member) bool {
	ms.mu.Lock()
	defer ms.mu.Unlock()
	k, ok := ms.marked[m.ID]
	return ok && k.epoch == m.Epoch
}

// SetMark remembers a drain, or forgets it.
func (ms *Members) SetMark(id string, epoch uint64, on bool) {
	ms.mu.Lock()
	if on {
		ms.marked[id] = mark{epoch}
	} else {
		delete(ms.marked, id)
	}
	ms.marks++
	ms.mu.Unlock()
	ms.Picker.Refresh(ms.View())
}

// forgetMarks drops the drains of workers that have left, and of epochs that are
// over. One that its worker began its next epoch with goes on.
func (ms *Members) forgetMarks(s *fleet.Snapshot) {
	ms.mu.Lock()
	defer ms.mu.Unlock()
	for id, k := range ms.marked {
		switch m := s.Get(id); {
		case m != nil && m.Epoch == k.epoch && m.State != fleet.Gone:
		case m != nil && m.Epoch > k.epoch && m.Draining:
			ms.marked[id] = mark{m.Epoch}
		default:
			delete(ms.marked, id)
			ms.marks++
		}
	}
}
