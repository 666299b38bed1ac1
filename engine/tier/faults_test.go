package tier

import (
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier/level"
	"github.com/xpyd/xpyd/engine/tier/ssd"
)

// faults run before the operations on an SSD's files: each may wait, and if it returns an
// error the operation is not done.
type faults struct {
	fs ssd.FS
	mu sync.Mutex
	hooks
}

type hooks struct {
	open, remove func(path string) error
	read, write  func(path string, b []byte, at int64) error
}

func (f *faults) wrap(fs ssd.FS) ssd.FS {
	f.fs = fs
	return f
}

// set changes what happens.
func (f *faults) set(change func(h *hooks)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change(&f.hooks)
}

func (f *faults) now() hooks {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.hooks
}

func (f *faults) Open(path string, flag int) (ssd.File, error) {
	if hook := f.now().open; hook != nil {
		if err := hook(path); err != nil {
			return nil, err
		}
	}
	file, err := f.fs.Open(path, flag)
	return faultyFile{file, f, path}, err
}

func (f *faults) Remove(path string) error {
	if hook := f.now().remove; hook != nil {
		if err := hook(path); err != nil {
			return err
		}
	}
	return f.fs.Remove(path)
}

type faultyFile struct {
	ssd.File
	f    *faults
	path string
}

func (f faultyFile) ReadAt(b []byte, at int64) (int, error) {
	if hook := f.f.now().read; hook != nil {
		if err := hook(f.path, b, at); err != nil {
			return 0, err
		}
	}
	return f.File.ReadAt(b, at)
}

func (f faultyFile) WriteAt(b []byte, at int64) (int, error) {
	if hook := f.f.now().write; hook != nil {
		if err := hook(f.path, b, at); err != nil {
			return 0, err
		}
	}
	return f.File.WriteAt(b, at)
}

// block has the SSD's reads wait for gate, and its writes fail while it is full.
func (f *faults) block(gate <-chan struct{}, full *atomic.Bool) {
	room := func() error {
		if full != nil && full.Load() {
			return syscall.ENOSPC
		}
		return nil
	}
	f.set(func(h *hooks) {
		h.open = func(string) error { return room() }
		h.write = func(string, []byte, int64) error { return room() }
		h.read = func(string, []byte, int64) error {
			if gate != nil {
				<-gate
			}
			return nil
		}
	})
}

// stall has each transfer take as long as by says, nanoseconds.
func (f *faults) stall(by *atomic.Int64) {
	wait := func() error {
		time.Sleep(time.Duration(by.Load())) // the disk's, not the test's
		return nil
	}
	f.set(func(h *hooks) {
		h.open = func(string) error { return wait() }
		h.read = func(string, []byte, int64) error { return wait() }
		h.write = h.read
	})
}

// space is what a disk has left for the level's files.
type space struct {
	mu    sync.Mutex
	left  int64
	sizes map[string]int64
}

func (s *space) grow(path string, to int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	more := max(to-s.sizes[path], 0)
	if more > s.left {
		return syscall.ENOSPC
	}
	s.left -= more
	s.sizes[path] += more
	return nil
}

// fill fills the rest of the disk, as others' files would.
func (s *space) fill() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.left = 0
}

// confine leaves the SSD the given room beyond what it has.
func (r *rig) confine(bytes int64) *space {
	s := &space{left: bytes, sizes: map[string]int64{}}
	for _, path := range r.segments() {
		s.sizes[path] = page
	}
	r.set(func(h *hooks) {
		h.write = func(path string, b []byte, at int64) error { return s.grow(path, at+int64(len(b))) }
		h.remove = func(path string) error {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.left += s.sizes[path]
			delete(s.sizes, path)
			return nil
		}
	})
	return s
}

// segments are the SSD's files, oldest first.
func (r *rig) segments() []string {
	r.t.Helper()
	list, err := filepath.Glob(filepath.Join(r.dir, "*.xpydkv"))
	if err != nil {
		r.t.Fatal(err)
	}
	slices.Sort(list)
	return list
}

// place is where a record lies on the SSD.
type place struct {
	path string
	at   int64
}

// places are where the SSD's units lie, the latest of each.
func (r *rig) places() map[kvcache.Hash]place {
	r.t.Helper()
	all := make(map[kvcache.Hash]place)
	for _, path := range r.segments() {
		b, err := os.ReadFile(path)
		if err != nil {
			r.t.Fatal(err)
		}
		for at := page; at < len(b); at += r.tiers.shape.Record() {
			if h, err := level.ParseHeader(b[at:]); err == nil {
				all[h.Key] = place{path, int64(at)}
			}
		}
	}
	return all
}

// peek reads a record behind the level's back.
func (r *rig) peek(p place) []byte {
	r.t.Helper()
	b, err := os.ReadFile(p.path)
	if err != nil {
		r.t.Fatal(err)
	}
	return b[p.at:][:r.tiers.shape.Record()]
}

// edit overwrites bytes of a record behind the level's back.
func (r *rig) edit(p place, off int, b []byte) {
	r.t.Helper()
	f, err := os.OpenFile(p.path, os.O_WRONLY, 0)
	if err != nil {
		r.t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt(b, p.at+int64(off)); err != nil {
		r.t.Fatal(err)
	}
}
