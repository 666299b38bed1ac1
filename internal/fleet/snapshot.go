package fleet

import (
	"iter"
	"slices"
	"strings"
	"time"
)

// State says what a reader may do with a member.
type State string

// States. New work goes only to live and unheard members. A suspect one keeps its work;
// a dead or gone one has lost it.
const (
	Live    State = "live"
	Unheard State = "unheard" // not heard by NATS, but answers probes; role, load and drain are as last heard
	Suspect State = "suspect" // silent for longer than suspectAfter
	Dead    State = "dead"    // silent for longer than deadAfter, or reported
	Gone    State = "gone"    // said goodbye, or was removed
)

// Source says how a member became known.
type Source string

// Sources. Only members of source NATS send heartbeats and can die of silence. The others live
// until somebody reports them dead.
const (
	NATS   Source = "nats"
	Static Source = "static" // a list in the configuration
	Admin  Source = "admin"  // the admin API
	ZMQ    Source = "zmq"    // registration pings of vLLM's P2pNccl connector
	Kube   Source = "kube"   // Kubernetes EndpointSlices
)

// Member is one instance and what is known about its life.
type Member struct {
	Instance

	State  State     `json:"state"`
	Since  time.Time `json:"since"`            // when State began; a lapse does not begin Live anew
	Heard  time.Time `json:"heard"`            // the last sign of life
	Reason string    `json:"reason,omitempty"` // why it is not live
	Source Source    `json:"source"`

	Revoked  bool      `json:"revoked,omitempty"`  // gone because shut out; see Watcher.Revoke
	Lapses   int       `json:"lapses,omitempty"`   // times that it was suspect or unheard and came back
	Lapsed   time.Time `json:"lapsed,omitzero"`    // the end of the last
	Namesake string    `json:"namesake,omitempty"` // another process that has the ID too, and is not used
}

// Serves reports whether the member is known to be well.
func (m *Member) Serves() bool { return m.State == Live || m.State == Unheard }

// Usable reports whether the member may be given new work.
func (m *Member) Usable() bool { return m.Serves() && !m.Draining }

// Link is the state of a connection to NATS.
type Link struct {
	Up         bool      `json:"up"`
	Since      time.Time `json:"since"`
	Reconnects uint64    `json:"reconnects"`
}

// Snapshot is the fleet at one moment. It is immutable and may be kept.
type Snapshot struct {
	// Version rises with every change, except of Load and Heard.
	Version uint64    `json:"version"`
	At      time.Time `json:"at"`
	Link    Link      `json:"link"`
	Members []Member  `json:"members"`           // ascending by ID, also dead and gone ones
	Revoked []string  `json:"revoked,omitempty"` // ids that are shut out, ascending

	index map[string]int
}

// NewSnapshot makes a snapshot of members, which it takes over and sorts by ID.
func NewSnapshot(version uint64, at time.Time, members []Member) *Snapshot {
	slices.SortFunc(members, func(a, b Member) int { return strings.Compare(a.ID, b.ID) })
	index := make(map[string]int, len(members))
	for i := range members {
		index[members[i].ID] = i
	}
	return &Snapshot{Version: version, At: at, Members: members, index: index}
}

// Get returns the member of that id, or nil.
func (s *Snapshot) Get(id string) *Member {
	i, ok := s.index[id]
	if !ok {
		return nil
	}
	return &s.Members[i]
}

// Usable yields the members of a role that may be given new work, by ID.
func (s *Snapshot) Usable(role Role) iter.Seq[*Member] {
	return func(yield func(*Member) bool) {
		for i := range s.Members {
			if m := &s.Members[i]; m.Role == role && m.Usable() && !yield(m) {
				return
			}
		}
	}
}
