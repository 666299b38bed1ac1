// Package kept keeps responses for the requests that go on with them, within bounds: in memory, or in a
// Redis that several routers share. Each belongs to whose request it was, and nobody else finds it.
//
// A conversation is kept once: a response names those before it. Whoever uses the last has used all of
// them, so that they stay as long as it does.
package kept

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/xpyd/xpyd/engine/tier/redis"
	"github.com/xpyd/xpyd/engine/tier/store"
)

// Entry is a response. Nothing of it may be changed once it is kept.
type Entry struct {
	Owner    string
	Before   []string // the responses that it went on with, the oldest first
	Input    []byte   // what was asked, as JSON
	Response []byte   // JSON
	// Until is when a response that is not over was lost, in seconds since 1970; 0: it is over.
	Until int64
}

// Bounds of an entry.
const (
	MaxChain = 1024 // responses before it
	overhead = 512  // bytes beside its own
)

func (e *Entry) size() int64 {
	n := overhead + len(e.Owner) + len(e.Input) + len(e.Response)
	for _, id := range e.Before {
		n += len(id)
	}
	return int64(n)
}

// Errors of a Store. Any other means that the Redis cannot be reached or does not answer as it should.
var (
	// ErrNone: there is no such response, or it is somebody else's.
	ErrNone = errors.New("no such response is kept")
	// ErrLarge: a response is larger than all that may be kept.
	ErrLarge = errors.New("it is larger than what may be kept")
)

// MissingError is ErrNone for one of the responses that another goes on with.
type MissingError struct{ ID string }

func (e *MissingError) Error() string { return e.ID + ": " + ErrNone.Error() }

// Is implements errors.Is.
func (e *MissingError) Is(err error) bool { return err == ErrNone }

// Stats is what a Store holds and has dropped.
type Stats struct {
	Entries                      int // in memory
	Bytes                        int64
	Full, Expired, Large, Failed uint64 // dropped because of the bounds, the TTL, its own size, the Redis
}

// Store keeps entries. Its methods may be called from many goroutines, and end within Config.RedisTimeout,
// or soon after their context.
type Store struct {
	cfg    Config
	memory memory
	redis  store.Store // nil without one
	places chan struct{}
	large  atomic.Uint64
	failed atomic.Uint64
}

// maxValue bounds a value in the Redis, and maxOps how many operations of it are under way.
const (
	maxValue = 64 << 20
	maxOps   = 64
)

// New makes a store. A Redis is connected to with the first use.
func New(cfg Config) (*Store, error) {
	s := &Store{cfg: cfg, memory: memory{cfg: cfg, by: map[string]*held{}}}
	if cfg.Redis == "" {
		return s, nil
	}
	addr, err := redis.ParseURL(cfg.Redis)
	if err != nil {
		return nil, err
	}
	s.places = make(chan struct{}, maxOps)
	s.redis, err = redis.New(redis.Config{Address: addr, Timeout: cfg.RedisTimeout, TTL: cfg.TTL, MaxValue: maxValue})
	return s, err
}

// Close ends the store. Nothing may be under way.
func (s *Store) Close() error {
	if s.redis == nil {
		return nil
	}
	return s.redis.Close()
}

// On reports whether anything is kept.
func (s *Store) On() bool { return s.cfg.Entries > 0 || s.redis != nil }

// Shared reports whether several routers may keep theirs together.
func (s *Store) Shared() bool { return s.redis != nil }

// Stats returns what there is.
func (s *Store) Stats() Stats {
	out := s.memory.stats()
	out.Large, out.Failed = s.large.Load(), s.failed.Load()
	return out
}

// Put keeps an entry.
func (s *Store) Put(ctx context.Context, id string, e *Entry) error {
	most := s.cfg.Bytes
	if s.redis != nil {
		most = maxValue
	}
	if e.size() > most {
		s.large.Add(1)
		return ErrLarge
	}
	if s.redis == nil {
		s.memory.put(id, e)
		return nil
	}
	value, err := e.encode()
	if err == nil {
		err = s.place(ctx, func() error {
			_, err := s.redis.Write(ctx, over+id, value)
			return err
		})
	}
	if err != nil {
		s.failed.Add(1)
	}
	return err
}

// Announce lets other routers find an entry that is not over, until it is Put or retracted; in memory there are none.
func (s *Store) Announce(ctx context.Context, id string, e *Entry) error {
	if s.redis == nil {
		return nil
	}
	if e.size() > maxValue {
		return ErrLarge
	}
	value, err := e.encode()
	if err == nil {
		err = s.place(ctx, func() error {
			_, err := s.redis.Write(ctx, running+id, value)
			return err
		})
	}
	if err != nil {
		s.failed.Add(1)
	}
	return err
}

// Retract undoes Announce.
func (s *Store) Retract(ctx context.Context, id string) error {
	if s.redis == nil {
		return nil
	}
	return s.place(ctx, func() error { return s.redis.Delete(ctx, running+id) })
}

// Find returns an owner's entry, also one that is announced.
func (s *Store) Find(ctx context.Context, owner, id string) (*Entry, error) {
	all, err := s.get(ctx, over, []string{id})
	if err == nil && all[0] == nil && s.redis != nil {
		all, err = s.get(ctx, running, []string{id})
	}
	if err != nil {
		return nil, err
	}
	if all[0] == nil || all[0].Owner != owner {
		return nil, ErrNone
	}
	return all[0], nil
}

// Chain returns an owner's entry behind those that it went on with, the oldest first. All of them count as used.
func (s *Store) Chain(ctx context.Context, owner, id string) ([]*Entry, error) {
	last, err := s.Find(ctx, owner, id)
	if err != nil {
		return nil, err
	}
	if len(last.Before) == 0 {
		return []*Entry{last}, nil
	}
	before := slices.Clone(last.Before)
	slices.Reverse(before) // the oldest is to be dropped last
	all, err := s.get(ctx, over, before)
	if err != nil {
		return nil, err
	}
	for i, e := range all {
		if e == nil || e.Owner != owner {
			return nil, &MissingError{before[i]}
		}
	}
	slices.Reverse(all)
	return append(all, last), nil
}

// Delete deletes an owner's entry.
func (s *Store) Delete(ctx context.Context, owner, id string) error {
	if _, err := s.Find(ctx, owner, id); err != nil {
		return err
	}
	if s.redis == nil {
		s.memory.drop(id)
		return nil
	}
	return s.place(ctx, func() error { return s.redis.Delete(ctx, over+id) })
}

// get returns entries, nil for those that there are not, of those that are over or running.
func (s *Store) get(ctx context.Context, prefix string, ids []string) ([]*Entry, error) {
	out := make([]*Entry, len(ids))
	if s.redis == nil {
		for i, id := range ids {
			out[i] = s.memory.get(id)
		}
		return out, nil
	}
	keys := make([]string, len(ids))
	for i, id := range ids {
		keys[i] = prefix + id
	}
	var refused error
	err := s.place(ctx, func() error {
		return s.redis.Read(ctx, keys, func(i int, value []byte, err error) {
			switch {
			case err == nil && value != nil:
				out[i] = decode(value)
			case err != nil && !errors.Is(err, store.ErrForeign):
				refused = err
			}
		})
	})
	if err == nil {
		err = refused
	}
	if err != nil {
		s.failed.Add(1)
		return nil, err
	}
	return out, nil
}

// place runs an operation of the Redis, of which so many may be under way.
func (s *Store) place(ctx context.Context, use func() error) error {
	select {
	case s.places <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("wait for a connection to the redis: %w", context.Cause(ctx))
	}
	defer func() { <-s.places }()
	return use()
}

// Prefixes of entries' keys in the Redis. What is written there stays as it is, so one that is not over has another.
const (
	over    = "xpyd:response:"
	running = "xpyd:response-running:"
)
