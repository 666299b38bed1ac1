package config

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"syscall"
)

// Reloader holds the configuration in force and replaces it on demand.
type Reloader[T any] struct {
	load  func() (*T, error)
	apply func(old, new *T) error
	log   *slog.Logger

	mu      sync.Mutex // one reload at a time
	current atomic.Pointer[T]
}

// NewReloader starts with first, which is in force already. load reads anew from the defaults up;
// apply puts the result in force, or refuses it and changes nothing.
func NewReloader[T any](first *T, load func() (*T, error), apply func(old, new *T) error, log *slog.Logger) *Reloader[T] {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	r := &Reloader[T]{load: load, apply: apply, log: log}
	r.current.Store(first)
	return r
}

// Reload loads and applies. On error the old configuration stays in force.
func (r *Reloader[T]) Reload() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	next, err := r.load()
	if err == nil {
		err = r.apply(r.current.Load(), next)
	}
	if err != nil {
		return fmt.Errorf("reload, the old configuration stays in force: %w", err)
	}
	r.current.Store(next)
	return nil
}

// Run reloads on each SIGHUP until ctx ends.
func (r *Reloader[T]) Run(ctx context.Context) {
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	defer signal.Stop(hup)
	for {
		select {
		case <-ctx.Done():
			return
		case <-hup:
			if err := r.Reload(); err != nil {
				r.log.Error("configuration", "err", err)
			} else {
				r.log.Info("configuration reloaded")
			}
		}
	}
}
