// Package discover finds engines that do not know us: vLLM's P2pNccl connector registers over ZMQ,
// Kubernetes lists the pods of a service. It asks them what they are (Examine), adds them to the
// fleet, and removes them when they go silent or away. It keeps the refused ones, with the reason,
// for people.
package discover

import (
	"cmp"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
)

// Fleet is where engines are added to; *fleet.Watcher is one.
type Fleet interface {
	AddStatic(inst fleet.Instance, source fleet.Source) error
	Remove(id, reason string) bool
}

// Config says where to look.
type Config struct {
	// P2PListen is the ZMQ address, host:port, at which engines with vLLM's P2pNccl connector
	// register; "" listens nowhere.
	P2PListen string `key:"p2p_listen"`
	// P2PExpiry is after how much silence an engine is removed; it registers every 3 s.
	P2PExpiry time.Duration `key:"p2p_expiry"`
	// P2PAllow is networks, such as 10.0.0.0/8, whose addresses an engine may name. It may always
	// name the one that it registers from.
	P2PAllow []string `key:"p2p_allow"`

	Kubernetes Kubernetes `key:"kubernetes"`
}

// DefaultConfig looks nowhere.
func DefaultConfig() Config { return Config{P2PExpiry: 10 * time.Second} }

// Validate refuses what cannot work; the error's ConfigKey method names the key.
func (c Config) Validate() error {
	if c.P2PListen != "" {
		if _, _, err := net.SplitHostPort(c.P2PListen); err != nil {
			return config.Bad("p2p_listen", "%q is not host:port", c.P2PListen)
		}
	}
	if c.P2PExpiry < 3*time.Second {
		return config.Bad("p2p_expiry", "%v is below the 3s between two registrations", c.P2PExpiry)
	}
	for _, n := range c.P2PAllow {
		if _, err := netip.ParsePrefix(n); err != nil {
			return config.Bad("p2p_allow", "%q is no network such as 10.0.0.0/8", n)
		}
	}
	return c.Kubernetes.validate()
}

// Refusal is an engine that was found and not added.
type Refusal struct {
	From   string    `json:"from"` // zmq or kube
	Name   string    `json:"name"` // address or pod
	Reason string    `json:"reason"`
	At     time.Time `json:"at"`
}

func (r Refusal) String() string { return fmt.Sprintf("%s %s: %s", r.From, r.Name, r.Reason) }

// refusals keeps the newest one of each name for a while, within a bound.
type refusals struct {
	while time.Duration // set before anything is noted

	mu   sync.Mutex
	list map[string]Refusal
}

const maxRefusals = 256

// note reports whether the refusal is news.
func (r *refusals) note(f Refusal) bool {
	f.Reason = openai.Clip(f.Reason) // engines have their say in it
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.list == nil {
		r.list = map[string]Refusal{}
	}
	key := f.From + " " + f.Name
	old, known := r.list[key]
	if !known && len(r.list) >= maxRefusals {
		if r.prune(f.At); len(r.list) >= maxRefusals {
			return false
		}
	}
	r.list[key] = f
	return old.Reason != f.Reason
}

func (r *refusals) forget(from, name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.list, from+" "+name)
}

// prune forgets what is older than a while; r.mu is held.
func (r *refusals) prune(now time.Time) {
	maps.DeleteFunc(r.list, func(_ string, f Refusal) bool { return now.Sub(f.At) > r.while })
}

// all returns what is younger than a while, by name.
func (r *refusals) all(now time.Time) []Refusal {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.prune(now)
	out := make([]Refusal, 0, len(r.list))
	for _, f := range r.list {
		out = append(out, f)
	}
	slices.SortFunc(out, func(a, b Refusal) int { return cmp.Or(cmp.Compare(a.From, b.From), cmp.Compare(a.Name, b.Name)) })
	return out
}

// named makes an id of the fleet from an address or a pod's name.
func named(prefix, name string) string {
	id := prefix + strings.Map(func(c rune) rune {
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '.', c == '-', c == '_':
			return c
		}
		return '-'
	}, name)
	for strings.Contains(id, "..") {
		id = strings.ReplaceAll(id, "..", ".")
	}
	return strings.Trim(id[:min(len(id), 64)], ".")
}
