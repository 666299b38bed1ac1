// Package store declares what a shared store of KV units must do. engine/tier/shared uses one;
// engine/tier/redis is one.
package store

import (
	"context"
	"errors"
)

// Errors of a Store. Any other error means that the store cannot be reached or does not answer as
// it should.
var (
	// ErrRefused: the store answered at once and said no: it is full, or read-only.
	ErrRefused = errors.New("refused by the store")
	// ErrForeign: the key's value is not ours: it is too long, or of another type.
	ErrForeign = errors.New("no value of ours")
)

// Store keeps values for many workers, and deletes them some time after they were last written or
// read. Every method may be called from many goroutines, and ends within a bound that the
// implementation documents, or soon after ctx does. Callers verify values; they do not trust them.
type Store interface {
	// Exists reports for each key whether it has a value.
	Exists(ctx context.Context, keys []string) ([]bool, error)
	// Read asks for the values of all keys at once and calls got for each, in the order of keys,
	// as they come, with the value, which is valid until got returns; or an error about this key
	// alone; or neither if the key has no value. If Read fails, got was called for fewer keys.
	Read(ctx context.Context, keys []string, got func(i int, value []byte, err error)) error
	// Write keeps a value, unless the key has one.
	Write(ctx context.Context, key string, value []byte) (stored bool, err error)
	// Delete deletes a key.
	Delete(ctx context.Context, key string) error
	// Purge deletes the keys with a prefix that it finds until ctx ends. After an error there may
	// be more.
	Purge(ctx context.Context, prefix string) (deleted int, err error)
	// Close ends the store. Nothing may be under way.
	Close() error
	// String is the store's address, without credentials.
	String() string
}
