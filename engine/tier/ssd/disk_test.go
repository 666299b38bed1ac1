package ssd

import (
	"context"
	"errors"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/engine/tier/level"
)

// TestFailedWrites: a write that fails takes no slot away.
func TestFailedWrites(t *testing.T) {
	f := &fullFS{}
	d := newDisk(t, 128, env(t), f.wrap)
	for i := range 2 * d.slots {
		f.full.Store(i%2 == 0)
		if _, err := put(t, d, level.Unit{Key: key(i)}); (err != nil) != f.full.Load() {
			t.Fatal(err)
		}
	}
	if n := len(d.log); n != 1 {
		t.Errorf("%d segments for the units of one", n)
	}
	if err := d.Check(nil); err != nil {
		t.Error(err)
	}
}

// TestFullStart: a worker starts on a disk without room, and uses it when there is some.
func TestFullStart(t *testing.T) {
	f := &fullFS{}
	f.full.Store(true)
	d := newDisk(t, 128, env(t), f.wrap)
	if ok, err := put(t, d, level.Unit{Key: key(1)}); ok || !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("written without room: %t, %v", ok, err)
	}
	f.full.Store(false)
	if ok, err := put(t, d, level.Unit{Key: key(1)}); !ok || err != nil {
		t.Errorf("not written: %v", err)
	}
}

// fullFS is a disk that has no room while it is full.
type fullFS struct {
	FS
	full atomic.Bool
}

type fullFile struct {
	File
	f *fullFS
}

func (f *fullFS) wrap(fs FS) FS {
	f.FS = fs
	return f
}

func (f *fullFS) Open(path string, flag int) (File, error) {
	if f.full.Load() {
		return nil, syscall.ENOSPC
	}
	file, err := f.FS.Open(path, flag)
	return fullFile{file, f}, err
}

func (f fullFile) WriteAt(b []byte, at int64) (int, error) {
	if f.f.full.Load() {
		return 0, syscall.ENOSPC
	}
	return f.File.WriteAt(b, at)
}

// unread is a disk one place of which cannot be read.
type unread struct {
	File
	at int64
}

func (f unread) ReadAt(b []byte, at int64) (int, error) {
	if at == f.at {
		return 0, syscall.EIO
	}
	return f.File.ReadAt(b, at)
}

// TestMoveUnread: when the log moves, only the unit that cannot be read is lost of those
// to be kept.
func TestMoveUnread(t *testing.T) {
	d := newDisk(t, 128, env(t), nil)
	rec := aligned(d.env.Shape.Record())
	failed := 0
	write := func(i int) {
		if ok, err := put(t, d, level.Unit{Key: key(i)}); err != nil {
			failed++
		} else if !ok {
			t.Fatalf("unit %d is not written", i)
		}
	}
	for i := range d.slots {
		write(i)
	}
	for i := range 8 {
		if _, err := d.read(&level.Read{Key: key(i), Rec: rec}); err != nil {
			t.Fatal(err)
		}
	}
	d.mu.Lock()
	d.log[0].file = unread{d.log[0].file, d.at(0)}
	first := d.log[0]
	d.mu.Unlock()
	for i := d.slots; d.log[0] == first; i++ {
		write(i)
	}
	for i := range d.slots {
		if want := i > 0 && i < 8; d.Has(key(i)) != want {
			t.Errorf("unit %d is kept: %t", i, !want)
		}
	}
	if failed != 1 {
		t.Errorf("%d writes say that something was lost", failed)
	}
}

func FuzzPreamble(f *testing.F) {
	d := &Disk{env: &level.Env{Shape: shape(), Identity: identity}}
	f.Add([]byte(`{"format":"xpyd KV segment 1","segment":1}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if d.ours(1, b) && len(b) < 50 {
			t.Fatal(string(b))
		}
	})
}

// TestSlowStart: an SSD that is slow while its segments are recovered opens nothing.
func TestSlowStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		for range 2 { // the second time there is a segment
			e := env(t)
			awake, rest := context.WithCancel(t.Context())
			e.Awake = awake
			l, err := Config{Dir: dir, Bytes: 128 * level.Page, IO: IOPread, Timeout: time.Second, Wrap: func(fs FS) FS { return slowFS{fs} }}.Open(t.Context(), e)
			if err != nil {
				t.Fatal(err)
			}
			if !l.Breaker().Allow() {
				t.Error("it is left alone before anybody asked")
			}
			d := l.(*Disk)
			if d.late("read"); l.Breaker().Allow() {
				t.Error("it is not watched when it is open")
			}
			rest()
			l.Breaker().Close()
			if err := l.Close(t.Context()); err != nil {
				t.Error(err)
			}
		}
	})
}

// slowFS takes an hour for everything.
type slowFS struct{ FS }

type slowFile struct{ File }

func (f slowFS) Open(path string, flag int) (File, error) {
	file, err := f.FS.Open(path, flag)
	return slowFile{file}, err
}

func (f slowFile) ReadAt(b []byte, at int64) (int, error) {
	time.Sleep(time.Hour) // the disk's, not the test's
	return f.File.ReadAt(b, at)
}

func (f slowFile) WriteAt(b []byte, at int64) (int, error) {
	time.Sleep(time.Hour)
	return f.File.WriteAt(b, at)
}
