// Package level defines the levels of the KV tiers: places below the device pool that
// keep units. engine/tier decides what goes where.
//
// engine/tier/host is host memory: units move between its records and the pool. A Level below
// it (engine/tier/ssd, engine/tier/shared) is read into those records and written from them.
// What only some levels can do is an interface of its own: Remote, Keeper, Aborter.
package level

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/kernels"
)

// Unit is what is kept: kvcache.UnitTokens tokens of one prompt.
type Unit struct {
	Key, Parent kvcache.Hash
	Root        kvcache.Hash // of its chain: one for each cache salt
	Pos         int          // tokens before it
	Tokens      []int32      // its own, while it is being stored; nil if unknown
	Born        time.Time    // when it entered the tiers
	Priority    int8         // the highest of the requests that had stored or found it by then
}

// Tenant identifies the unit's owner: the first bytes of its root, which records carry.
func (u *Unit) Tenant() uint32 { return binary.LittleEndian.Uint32(u.Root[:]) }

// Base is what host memory and every Level have in common. All methods may be called from
// many goroutines.
type Base interface {
	// Name is the level's label in metrics and reports.
	Name() string
	// Has reports whether the level is known to have a unit that is not too old; the
	// breaker says whether it can be loaded now. A Remote has to be asked instead.
	Has(key kvcache.Hash) bool
	// Born is when a unit that the level has entered the tiers; zero if it has none.
	Born(key kvcache.Hash) time.Time
	// Forget makes sure that a unit is not found any more.
	Forget(key kvcache.Hash)
	// Clear forgets every unit. erase, unless nil, deletes what a restarted process
	// would find; it may wait for a device.
	Clear() (erase func() error)
	// Stats describes the level. With ages it looks at every unit.
	Stats(ages bool) Stats
	// Close ends the level. Nothing may be under way except what Abort has given up.
	Close(ctx context.Context) error
}

// Level is a level below host memory. Load and Save may wait for a device or a network.
type Level interface {
	Base
	// Load reads up to Limits.Burst units into their records. It calls got once for
	// each, in order, as they come, with the time the unit entered the tiers or an error.
	// The caller counts ErrCorrupt; the level has counted any other error. Load checks
	// the header, the caller checks the rows.
	Load(ctx context.Context, reads []Read, got func(i int, born time.Time, err error))
	// Save keeps a unit whose record is rec, unless it is there. The caller counts
	// ErrLeftOut; the level has counted and logged any other error.
	Save(ctx context.Context, u Unit, rec []byte) (saved bool, err error)
	// Breaker opens while the level is to be left alone.
	Breaker() *Breaker
	Limits() Limits
	// Metrics are the level's own.
	Metrics() Metrics
}

// Read is a unit to be loaded.
type Read struct {
	Key kvcache.Hash
	Pos int
	Rec []byte // destination, Shape.Record bytes
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

// Remote is a level that workers share over a network.
type Remote interface {
	Level
	// Ask asks which of the units, at most AskMost, it has; ok is false if there is no answer.
	Ask(ctx context.Context, keys []kvcache.Hash) (have []bool, ok bool)
	// Delete deletes a unit for all workers.
	Delete(ctx context.Context, key kvcache.Hash)
	// Purge deletes the units of this identity and shape that it finds until ctx ends.
	// After an error there may be more.
	Purge(ctx context.Context) (deleted int, err error)
}

// AskMost bounds the units of one question.
const AskMost = 512

// Keeper is a level that outlives the process, and keeps the list of pins too.
type Keeper interface {
	ReadPins() ([]byte, error) // fs.ErrNotExist if there is no list
	WritePins(b []byte) error
	// Trim shrinks the level to its size, once pins are known.
	Trim() error
}

// Aborter is a level that can give up transfers its device has not begun. The error
// says what still hangs.
type Aborter interface {
	Abort(ctx context.Context) error
}

// Config opens a level.
type Config interface {
	Open(ctx context.Context, env *Env) (Level, error)
}

// Env is what levels are opened with.
type Env struct {
	Shape       Shape
	Identity    string // of the model and its numerics
	Pool        kernels.Pool
	LoadTimeout time.Duration
	TTL         time.Duration // units of this age are not found; 0: no limit
	TenantShare float64       // of the level, for the units of one root; 0: all
	Pinned      func(kvcache.Hash) bool
	// Changed is told of each unit that can be found from now on, or no more; Went of
	// those that were evicted. Both are called under the level's lock, and may be nil.
	Changed func(level string, u Unit, stored bool)
	Went    func(u Unit)
	// Complain logs failures, now and then.
	Complain func(error)
	Log      *slog.Logger
	Awake    context.Context // ends when the tiers begin to close; probes end with it
}

// Tell passes a change on to Changed.
func (e *Env) Tell(level string, u Unit, stored bool) {
	if e.Changed != nil {
		e.Changed(level, u, stored)
	}
}

// IsPinned reports whether a unit is pinned.
func (e *Env) IsPinned(key kvcache.Hash) bool { return e.Pinned != nil && e.Pinned(key) }

// Old reports whether a unit is too old to be used.
func (e *Env) Old(born time.Time) bool { return e.TTL > 0 && time.Since(born) >= e.TTL }

// Share is how many of these slots one tenant may have; 0 means all.
func (e *Env) Share(slots int) int {
	if e.TenantShare == 0 {
		return 0
	}
	return max(1, int(e.TenantShare*float64(slots)))
}

// A SettingError names the setting of a level that this machine does not allow, so that
// the caller can say where it was set.
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
