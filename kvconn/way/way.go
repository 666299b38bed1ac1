// Package way is the choice among the ways by which KV comes from another worker.
//
// A way is a transport as a worker has it for its pool. Each transport describes itself
// as a Kind; the command hands a worker the kinds that it may have, fastest first and the
// network last, and nothing but that list names a transport. A Set is what has become of
// them in this process: it listens by each way and says what is announced to peers. A
// Chooser takes, for each peer, the fastest way that leads to it.
//
//	                     Kind ──Open──▶ Set ──Offer──▶ announcement, to peers
//	announcement of a peer ──reach──▶ Chooser ──Open──▶ kvconn.Session
package way

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
)

// Auto is the setting that allows every way.
const Auto = "auto"

// Kind describes a transport before there is a pool.
type Kind struct {
	Name  string // in settings, announcements and metrics
	Local bool   // it joins processes of one user on one machine
	// OverNetwork: its address is its name, a colon and the network's address, and its
	// listener also serves the network's callers. Its transport's Dial is given the whole
	// of that address, and its Listen the network's. Of others Listen is given "", and the
	// address of that listener begins with the name and a colon.
	OverNetwork bool
	MapsPool    bool // other processes map the pool, if it is in host memory
	// Suits reports whether it serves a backend's pool; nil: any. PoolIn says where such
	// pools are, for the error.
	Suits  func(kernels.Backend) bool
	PoolIn string
	// Open makes the transport, and describes the pool where peers can write to it. The
	// error says why this process has no such way.
	Open func(Pool) (kvconn.Transport, *kvconn.Shared, error)
}

// Pool is a worker's own.
type Pool struct {
	Backend kernels.Backend
}

// OnDevice describes the pool to peers' GPUs, by its ranks.
func (p Pool) OnDevice() (*kvconn.Shared, error) {
	return kvconn.DeviceRanks(p.Backend.Layout(), max(p.Backend.Info().Ranks, 1), p.Backend.Blocks())
}

// Network is the kind that has to come last in the list: it leads to every peer, at the
// address by which requests name it, and Listen is given the setting's address. A list has
// one; any other transport over the network is OverNetwork, on top of it.
func Network(t kvconn.Transport) Kind {
	return Kind{Name: t.Name(), Open: func(Pool) (kvconn.Transport, *kvconn.Shared, error) { return t, nil, nil }}
}

// Names are the values that the setting may have.
func Names(kinds []Kind) []string {
	names := []string{Auto}
	for _, k := range kinds {
		names = append(names, k.Name)
	}
	return names
}

// MapPool reports whether a pool in host memory should be one that others can map.
func MapPool(kinds []Kind, setting string) bool {
	return slices.ContainsFunc(kinds, func(k Kind) bool { return k.MapsPool && k.allowed(setting) })
}

func (k *Kind) allowed(setting string) bool { return setting == Auto || setting == k.Name }

// Set is the ways of one worker. It implements kvconn.Transport for all of them: an
// address that begins with a way's name and a colon is dialled by that way, which is
// given all of it.
type Set struct {
	setting string
	ways    []*way // those to choose from, fastest first
	barred  bool   // the setting leaves out a faster one
	network kvconn.Transport
	shared  *kvconn.Shared
	log     *slog.Logger
}

// way is one of a Set.
type way struct {
	Kind
	transport kvconn.Transport // nil: see lacks
	lacks     error
	network   bool // the last of its kinds
}

// Open opens the kinds that setting allows and that suit the pool. The last kind is the
// network's. An error is about the setting: it names a way that cannot be.
func Open(kinds []Kind, setting string, p Pool, log *slog.Logger) (*Set, error) {
	s := &Set{setting: setting, log: log}
	named := setting == Auto
	for i := range kinds {
		w := &way{Kind: kinds[i], network: i == len(kinds)-1}
		allowed := w.allowed(setting)
		switch suits := w.Suits == nil || w.Suits(p.Backend); {
		case !suits && setting == w.Name:
			return nil, fmt.Errorf("%s is not possible here: the pool of device %s is not in %s", w.Name, p.Backend.Info().Name, w.PoolIn)
		case !suits, !allowed && !w.network:
			s.barred = s.barred || suits && !named
			continue
		}
		named = named || allowed
		var shared *kvconn.Shared
		if w.transport, shared, w.lacks = w.Open(p); w.lacks != nil {
			if setting == w.Name {
				return nil, fmt.Errorf("%s is not possible here: %w", w.Name, w.lacks)
			}
			log.Warn("peers must use another way", "not", w.Name, "error", w.lacks)
			w.transport = nil
		} else if s.shared == nil {
			s.shared = shared
		}
		if w.network {
			s.network = w.transport
		}
		if allowed {
			s.ways = append(s.ways, w)
		}
	}
	if s.network == nil {
		return nil, errors.New("there is no transport over the network")
	}
	if len(s.ways) == 0 {
		return nil, fmt.Errorf("%q is none of %s", setting, strings.Join(Names(kinds), ", "))
	}
	return s, nil
}

// says names the setting, as a reason why a way is left out.
func (s *Set) says() string { return "kv.transport is " + s.setting }

// Shared describes the pool to peers that can write to it; nil: none can.
func (s *Set) Shared() *kvconn.Shared { return s.shared }

// Name implements kvconn.Transport.
func (s *Set) Name() string { return s.network.Name() }

// Dial implements kvconn.Transport.
func (s *Set) Dial(ctx context.Context, addr string) (net.Conn, error) {
	for _, w := range s.ways {
		if w.transport != nil && w.leads(addr) {
			return w.transport.Dial(ctx, addr)
		}
	}
	return s.network.Dial(ctx, addr)
}

// leads reports whether addr is one of this way's.
func (w *way) leads(addr string) bool { return strings.HasPrefix(addr, w.Name+":") }

// Listen listens at the network's address.
func (s *Set) Listen(addr string) (net.Listener, error) {
	for _, w := range s.ways {
		if w.OverNetwork && w.transport != nil {
			return w.transport.Listen(addr)
		}
	}
	return s.network.Listen(addr)
}

// Offer listens by the other ways, and returns where: way → address. network is where
// peers dial the network's listener. An error is about the setting, as Open's.
func (s *Set) Offer(network string) (listeners []net.Listener, addrs map[string]string, err error) {
	addrs = map[string]string{}
	for _, w := range s.ways {
		switch {
		case w.network || w.transport == nil:
		case w.OverNetwork:
			addrs[w.Name] = w.Name + ":" + network
		default:
			ln, err := w.transport.Listen("")
			switch {
			case err == nil:
				listeners, addrs[w.Name] = append(listeners, ln), ln.Addr().String()
			case s.setting == w.Name:
				return nil, nil, fmt.Errorf("%s: %w", w.Name, err) // it is the only one
			default:
				s.log.Warn("peers must use another way", "not", w.Name, "error", err)
			}
		}
	}
	return listeners, addrs, nil
}
