package flight

import (
	"cmp"
	"encoding/json"
	"maps"
	"slices"
	"time"
)

// ledger is what this process holds, for whom and since when. At rest
// requests is empty and the counts are zero.
type ledger struct {
	Process   string                     `json:"process"`
	At        time.Time                  `json:"at"`
	Requests  []*Info                    `json:"requests"`
	Legs      int                        `json:"legs"`
	Running   int                        `json:"running"` // admitted
	Waiting   int                        `json:"waiting"` // for admission
	ConnsBusy int                        `json:"upstream_conns_busy"`
	ConnsIdle int                        `json:"upstream_conns_idle"`
	Fleet     map[string]json.RawMessage `json:"fleet,omitempty"` // the workers' ledgers, or their errors
}

// Ledger says what is held.
func (s *Service) Ledger() *ledger {
	l := &ledger{Process: "router", At: time.Now(), Requests: []*Info{}, Legs: s.legs.count()}
	l.Running, l.Waiting = s.gate.counts()
	l.ConnsBusy, l.ConnsIdle = s.Client.Counts()
	for _, q := range s.running() {
		l.Requests = append(l.Requests, q.info())
	}
	slices.SortFunc(l.Requests, func(a, b *Info) int { return cmp.Or(a.Start.Compare(b.Start), cmp.Compare(a.ID, b.ID)) })
	return l
}

// running lists the requests that run.
func (s *Service) running() []*request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Keys(s.requests))
}
