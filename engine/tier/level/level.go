// Package level says what a level of the KV tiers is: a place below the device pool
// that keeps units. engine/tier decides what goes where; engine/tier/host, ssd and
// shared are levels.
//
// The first level is Memory: records that the pool is read from and written to. The
// others are read into it, and saved from it. What only some levels can do is an
// interface of its own: Memory, Remote, Keeper, Aborter.
package level

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/kernels"
)

// Unit is what is kept: kvcache.UnitTokens tokens of one prompt.
type Unit struct {
	Key, Parent kvcache.Hash
	Root        kvcache.Hash // of its chain: one for each cache salt
	Pos         int          // tokens before it
	Tokens      []int32      // its own, while it comes; nil when they are not at hand
	Born        time.Time    // when it came into the tiers
	Priority    int8         // the highest of the requests that had stored or found it when it came
}

// Tenant is who a unit belongs to: the first bytes of its root, which records carry.
func (u *Unit) Tenant() uint32 { return binary.LittleEndian.Uint32(u.Root[:]) }

// Level keeps units. Its methods may be called from many goroutines; Load, Save and
// what Clear returns may wait for a device or a network, the others do not.
type Level interface {
	// Name is the level's label in metrics and reports.
	Name() string
	// Has reports whether the level knows that it has a unit, not too old; whether it
	// can be loaded now is the breaker's to say. A Remote knows nothing without being asked.
	Has(key kvcache.Hash) bool
	// Born is when a unit that the level has came into the tiers; zero: it has none.
	Born(key kvcache.Hash) time.Time
	// Load reads units, at most Limits.Burst, into their records and calls got once for
	// each, in order, as they come: with the time that the unit came into the tiers, or
	// ErrCorrupt, which the caller counts, or another error, which the level has counted.
	// The header is checked here, the rows by the caller.
	Load(ctx context.Context, reads []Read, got func(i int, born time.Time, err error))
	// Save keeps a unit whose record is rec, unless it is there. An error has been
	// counted and logged; ErrLeftOut is the caller's to count.
	Save(ctx context.Context, u Unit, rec []byte) (saved bool, err error)
	// Forget forgets a unit: it is not found any more.
	Forget(key kvcache.Hash)
	// Clear forgets every unit. erase, unless nil, deletes what a process that starts
	// anew would find.
	Clear() (erase func() error)
	// Breaker is shut for callers while the level is to be left alone; nil: it never is.
	Breaker() *Breaker
	Limits() Limits
	// Stats is how the level stands. With ages it looks at every unit.
	Stats(ages bool) Stats
	// Describe and Collect are the level's own metrics.
	prometheus.Collector
	// Close ends the level; nothing may be under way but what Abort has given up.
	Close(ctx context.Context) error
}

// Read is a unit to be loaded.
type Read struct {
	Key kvcache.Hash
	Pos int
	Rec []byte // where to, Shape.Record bytes
}

// Errors of a level's Load and Save.
var (
	ErrGone    = errors.New("no such unit")
	ErrCorrupt = errors.New("not the unit's record")
	ErrLeftOut = errors.New("left out for now")
)

// Limits bound what callers have under way in a level.
type Limits struct {
	Loads   int // calls of Load, and of Ask
	Burst   int // units of one Load
	Writers int // calls of Save; 0: nothing is saved
}

// Memory is a level whose records lie in this process's memory, where the pool's
// blocks are copied from and to.
type Memory interface {
	Level
	// Take returns a slot to fill with a new unit. Nil: the unit is here already, or
	// being filled, or no slot can be had for it; later is closed when it may be
	// otherwise, nil if nothing is under way that would make it so.
	Take(u Unit) (l Lease, later <-chan struct{})
	// Get returns a unit for a request; nil if it is not here.
	Get(key kvcache.Hash) Lease
	// Peek is Get for the tiers' own purposes, which are no use of the unit.
	Peek(key kvcache.Hash) Lease
	// Leave returns the unit that goes next, if fewer than spare slots are free or
	// becoming so; it is freed with its lease, unless somebody gets it before.
	Leave(spare int) Lease
	// Leaving reports whether no slot is free, and some will be; Freed is poked then.
	Leaving() bool
	Freed() <-chan struct{}
	// Units lists the units that are here.
	Units() []Unit
	// Raise notes a higher priority of a unit, if it is here.
	Raise(key kvcache.Hash, priority int8)
	// Repin looks anew whether units are pinned.
	Repin(keys []kvcache.Hash)

	// Batch is how many units Gather and Scatter move together.
	Batch() int
	// Gather copies units out of the pool.
	Gather(units []Move) error
	// Scatter begins to put units into blocks that nobody reads. What it returns waits
	// for the end, and says how many units, from the first, have the rows that their
	// digests were made of; it is to be called once.
	Scatter(units []Move) (wait func() (good int, err error))
	// Arrives reports whether the pool can compute with units while they arrive, and
	// Arrive is Scatter, layer by layer, for steps to wait for.
	Arrives() bool
	Arrive(units []Move) (kernels.HostArrival, error)
}

// Lease is a slot of Memory that stays what it is until it is released.
type Lease interface {
	Record() []byte
	Unit() Unit
	Loads() int           // how often the unit was asked for since it came here
	Publish(at time.Time) // makes a filled slot findable; at, unless zero, is when the unit was born
	Stay()                // takes Leave back
	Release()             // a slot that was not published, or is leaving, is freed
}

// Move is a unit on its way between its record and blocks of the pool.
type Move struct {
	Lease
	Blocks []int32
	Pos    int // of its first token
}

// Remote is a level that workers share, over a network.
type Remote interface {
	Level
	// Ask asks which of the units, at most AskMost, it has; false: there is no answer.
	Ask(ctx context.Context, keys []kvcache.Hash) (have []bool, ok bool)
	// Delete has a unit forgotten by all workers.
	Delete(ctx context.Context, key kvcache.Hash)
	// Purge deletes all units of this identity and shape, as many as it finds until ctx
	// ends; an error says that there may be more.
	Purge(ctx context.Context) (deleted int, err error)
}

// AskMost bounds the units that one question is about.
const AskMost = 512

// Keeper is a level that outlives the process, and keeps what is pinned with it.
type Keeper interface {
	ReadPins() ([]byte, error) // fs.ErrNotExist: there are none
	WritePins(b []byte) error
	// Trim makes the level as small as it may be, once pins are known.
	Trim() error
}

// Aborter is a level that can give up transfers that its device has not begun. The
// error says what still hangs.
type Aborter interface {
	Abort(ctx context.Context) error
}

// Config opens one level.
type Config interface {
	Open(ctx context.Context, env *Env) (Level, error)
}

// Env is what a level is opened in.
type Env struct {
	Shape       Shape
	Identity    string // of the model and its numerics
	Pool        kernels.Pool
	LoadTimeout time.Duration
	TTL         time.Duration // units are not found from that age on; 0: however old
	TenantShare float64       // of the level, that units of one root may take; 0: all
	Pinned      func(kvcache.Hash) bool
	// Changed hears of each unit that can be found from now on, or no more, and Went of
	// those that went for another one, both under the level's lock. Nil: nobody does.
	Changed func(level string, u Unit, stored bool)
	Went    func(u Unit)
	// Complain logs what goes wrong, now and then.
	Complain func(error)
	Log      *slog.Logger
	Awake    context.Context // ends as the tiers begin to close: probes do
}

// Tell passes a change on to Changed.
func (e *Env) Tell(level string, u Unit, stored bool) {
	if e.Changed != nil {
		e.Changed(level, u, stored)
	}
}

// IsPinned reports whether a unit is pinned.
func (e *Env) IsPinned(key kvcache.Hash) bool { return e.Pinned != nil && e.Pinned(key) }

// Old reports whether a unit is not to be used any more.
func (e *Env) Old(born time.Time) bool { return e.TTL > 0 && time.Since(born) >= e.TTL }

// Share is how many of so many slots one tenant may have; 0: all.
func (e *Env) Share(slots int) int {
	if e.TenantShare == 0 {
		return 0
	}
	return max(1, int(e.TenantShare*float64(slots)))
}

// A SettingError says which setting of a level this machine does not allow, so that
// whoever knows where it was set can name the place.
type SettingError struct {
	Setting string
	Err     error
}

// Bad makes a SettingError.
func Bad(setting, format string, args ...any) error {
	return &SettingError{setting, fmt.Errorf("tier: "+format, args...)}
}

func (e *SettingError) Error() string { return e.Err.Error() }

func (e *SettingError) Unwrap() error { return e.Err }
