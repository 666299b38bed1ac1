// Package store says what a shared store of KV units must do. engine/tier
// uses one; engine/tier/redis is one. It declares, and does nothing.
package store

import (
	"context"
	"errors"
)

// Errors of a Store, by what follows from them. Any other one means that the
// store cannot be reached or does not answer as it should.
var (
	// ErrRefused: the store is there and says no (it is full, or read-only);
	// it said so at once.
	ErrRefused = errors.New("refused by the store")
	// ErrForeign: what the key has is no value of ours: it has more bytes than
	// any, or another type.
	ErrForeign = errors.New("no value of ours")
)

// Store keeps values under keys for many workers, and forgets them some time after they were
// last written or read. Every method may be called from many goroutines, and ends within a
// bound that the implementation documents, or soon after ctx does. What comes from a store is
// not to be believed: callers verify values.
type Store interface {
	// Exists says of each key whether it has a value.
	Exists(ctx context.Context, keys []string) ([]bool, error)
	// Read asks for the values of all keys at once and calls got for each, in
	// the order of keys, as they come. There is a value, which is got's until
	// it returns; or an error about this key alone; or neither: the key has no
	// value. When Read fails, got was called for fewer keys.
	Read(ctx context.Context, keys []string, got func(i int, value []byte, err error)) error
	// Write keeps a value, unless the key has one.
	Write(ctx context.Context, key string, value []byte) (stored bool, err error)
	// Delete forgets a key.
	Delete(ctx context.Context, key string) error
	// Purge forgets the keys that begin so, as many as it finds until ctx ends;
	// the error says that there may be more.
	Purge(ctx context.Context, prefix string) (deleted int, err error)
	// Close ends it; nothing may be under way.
	Close() error
	// String is where it is, without credentials.
	String() string
}
