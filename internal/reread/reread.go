// Package reread reads keys and certificates again when their files change under a running process.
// It compares files by their metadata, which also sees through the links by which Kubernetes changes
// secrets.
package reread

import (
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// Files are what one setting is read from. It is not safe for concurrent use.
type Files struct {
	paths []string
	seen  []os.FileInfo
	gone  []bool
	lost  error // of one that the last look missed first
}

// Of returns the files at paths, "" left out.
func Of(paths ...string) *Files {
	f := &Files{}
	for _, p := range paths {
		if p != "" {
			f.paths = append(f.paths, p)
		}
	}
	return f
}

// None reports whether there are no files.
func (f *Files) None() bool { return len(f.paths) == 0 }

// Lost is an error if a file went between the last call of Changed and the one before.
func (f *Files) Lost() error { return f.lost }

// Changed reports whether a file has changed since the last call; at first, all have.
func (f *Files) Changed() bool {
	if f.gone == nil {
		f.gone = make([]bool, len(f.paths))
	}
	f.lost = nil
	now := make([]os.FileInfo, len(f.paths))
	differ := f.seen == nil
	for i, p := range f.paths {
		info, err := os.Stat(p)
		if err != nil && !f.gone[i] && f.seen != nil {
			f.lost = fmt.Errorf("%s is gone", p)
		}
		f.gone[i] = err != nil
		if err != nil {
			continue // nil: gone for now
		}
		now[i] = info
		if !differ {
			old := f.seen[i]
			differ = old == nil || !os.SameFile(old, info) || !old.ModTime().Equal(info.ModTime()) || old.Size() != info.Size() || old.Mode() != info.Mode()
		}
	}
	for i := range f.seen { // what is gone is not a change, what comes back is
		if now[i] == nil {
			now[i] = f.seen[i]
		}
	}
	f.seen = now
	return differ
}

// Every is how often files are looked at.
const Every = 2 * time.Second

// Value is what is made of files. Get looks at them, so that nothing runs in between. It is safe for
// concurrent use.
type Value[T any] struct {
	load  func() (T, error)
	told  func(error)
	start time.Time

	now  atomic.Pointer[T]
	next atomic.Int64 // when to look again, since start

	mu    sync.Mutex // one look at a time
	files *Files
}

// New reads the value. It reports each later reading of changed files to told, with its error or
// nil; after an error the value stays as it was. That a file is gone is such an error, told once.
func New[T any](load func() (T, error), told func(error), paths ...string) (*Value[T], error) {
	v := &Value[T]{load: load, told: told, start: time.Now(), files: Of(paths...)}
	v.files.Changed() // before they are read, so that no change in between is missed
	v.next.Store(int64(Every))
	first, err := load()
	if err != nil {
		return nil, err
	}
	v.now.Store(&first)
	return v, nil
}

// Get returns the value as the files were within the last two seconds, or the one before while they
// are being read.
func (v *Value[T]) Get() T {
	if since := int64(time.Since(v.start)); since >= v.next.Load() && v.mu.TryLock() {
		v.look(since)
		v.mu.Unlock()
	}
	return *v.now.Load()
}

// look reads the files if they have changed; v.mu is held.
func (v *Value[T]) look(since int64) {
	if since < v.next.Load() {
		return // somebody else was faster
	}
	v.next.Store(since + int64(Every))
	changed := v.files.Changed()
	if err := v.files.Lost(); err != nil {
		v.told(err)
		return
	}
	if !changed {
		return
	}
	next, err := v.load()
	if err == nil {
		v.now.Store(&next)
	}
	v.told(err)
}
