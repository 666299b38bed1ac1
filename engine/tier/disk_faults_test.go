package tier

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
)

// TestTruncated: a segment that is cut while it is in use loses what was cut,
// and nothing else; new units are written.
func TestTruncated(t *testing.T) {
	for _, keep := range []int64{0, 10, page, page + 100, 3*page + 1, 4 * page} {
		r := newRig(t, config(t.TempDir()))
		tokens := prompt(1, 96)
		r.run(tokens, 0)
		r.saved(tierSSD, 6)
		r.cache.Clear()
		r.tiers.host.clear()
		if err := os.Truncate(r.tiers.disk.log[0].path, keep); err != nil {
			t.Fatal(err)
		}
		// Writers run side by side, so the prompt's units lie in any order.
		n := r.tiers.Load(t.Context(), tokens, "", 96)
		if most := int(max(0, keep/page-1)) * 16; n > most {
			t.Errorf("cut to %d bytes: %d tokens loaded, %d were there", keep, n, most)
		}
		r.quiet() // reads that nobody waits for any more keep their units from being saved
		r.run(tokens, n)
		r.quiet()
		r.cache.Clear()
		r.load(tokens, 96) // host memory has them again
		r.run(tokens, 96)
		more := prompt(700, 64)
		r.run(more, 0)
		r.quiet()
		r.cache.Clear()
		r.tiers.host.clear()
		r.load(more, 64)
		r.run(more, 64)
	}
}

// lateFile is a disk each read of which takes a while.
type lateFile struct {
	file
	by time.Duration
}

func (f lateFile) ReadAt(b []byte, at int64) (int, error) {
	time.Sleep(f.by) // the disk's, not the test's
	return f.file.ReadAt(b, at)
}

// TestLateReads: reads of 500 ms cost a request load_timeout at most, exactly;
// those under way are of use to the next one, and with time enough all arrive
// together.
func TestLateReads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := config(t.TempDir())
		cfg.DirIO, cfg.LoadTimeout = IOPread, 300*time.Millisecond // see TestTTL
		r := newRig(t, cfg)
		tokens, other := prompt(1, 96), prompt(700, 96)
		for _, p := range [][]int32{tokens, other} {
			r.run(p, 0)
			r.quiet()
		}
		r.cache.Clear()
		r.tiers.host.clear()
		for _, s := range r.tiers.disk.log {
			s.file = lateFile{s.file, 500 * time.Millisecond}
		}
		r.took(tokens, 0, 300*time.Millisecond)
		if n := r.value("left_units_total", ""); n != 6 {
			t.Errorf("%v units counted as left out", n)
		}
		if held := r.cache.Holders(); len(held) > 0 {
			t.Errorf("still held: %+v", held)
		}
		time.Sleep(200 * time.Millisecond) // until what was begun has come, and is given back
		synctest.Wait()
		if n := len(r.tiers.reads); n != 0 {
			t.Errorf("%d reads under way", n)
		}
		r.tiers.cfg.LoadTimeout = 2 * time.Second
		r.took(other, 96, 500*time.Millisecond)
		r.run(other, 96)
		r.close()
	})
}

// slowFile is a disk that answers late, or has no room.
type slowFile struct {
	file
	gate <-chan struct{} // reads wait for it
	full *atomic.Bool    // writes fail
}

func (f slowFile) ReadAt(b []byte, at int64) (int, error) {
	if f.gate != nil {
		<-f.gate
	}
	return f.file.ReadAt(b, at)
}

func (f slowFile) WriteAt(b []byte, at int64) (int, error) {
	if f.full != nil && f.full.Load() {
		return 0, syscall.ENOSPC
	}
	return f.file.WriteAt(b, at)
}

// wrap puts a fault between the tier and its files.
func (r *rig) wrap(gate <-chan struct{}, full *atomic.Bool) {
	d := r.tiers.disk
	d.growing.Lock()
	defer d.growing.Unlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	open := d.open
	d.open = func(path string, flag int) (file, error) {
		if full != nil && full.Load() {
			return nil, syscall.ENOSPC
		}
		f, err := open(path, flag)
		return slowFile{f, gate, full}, err
	}
	for _, s := range d.log {
		s.file = slowFile{s.file, gate, full}
	}
}

// TestSlow: a disk that does not answer costs LoadTimeout, and nothing later.
func TestSlow(t *testing.T) {
	for _, policy := range []WritePolicy{Through, Back} {
		t.Run(string(policy), func(t *testing.T) { testSlow(t, policy) })
	}
}

func testSlow(t *testing.T, policy WritePolicy) {
	cfg := config(t.TempDir())
	cfg.Write = policy
	cfg.LoadTimeout = 20 * time.Millisecond
	r := newRig(t, cfg)
	tokens := prompt(1, 96)
	r.run(tokens, 0)
	r.sink()
	r.saved(tierSSD, 6)
	r.cache.Clear()
	r.tiers.host.clear()
	gate := make(chan struct{})
	release := sync.OnceFunc(func() { close(gate) })
	t.Cleanup(release)
	r.wrap(gate, nil)
	r.load(tokens, 0)
	r.run(tokens, 0)
	r.cache.Clear()
	release()
	r.saved(tierSSD, 6) // what was abandoned comes now
	r.tiers.cfg.LoadTimeout = patience
	r.load(tokens, 96)
	r.run(tokens, 96)
}

// TestSlowSegment: while the disk takes its time to begin a segment, what it has
// can be looked up and is loaded.
func TestSlowSegment(t *testing.T) {
	r := newRig(t, config(t.TempDir()))
	first := prompt(1, 96)
	r.run(first, 0)
	r.saved(tierSSD, 6)
	d := r.tiers.disk
	gate, entered := make(chan struct{}), make(chan struct{}, 1)
	d.growing.Lock()
	d.mu.Lock()
	open := d.open
	d.open = func(path string, flag int) (file, error) {
		select {
		case entered <- struct{}{}:
		default:
		}
		<-gate
		return open(path, flag)
	}
	d.mu.Unlock()
	d.growing.Unlock()
	full := make(chan error, 1)
	release := sync.OnceFunc(func() { close(gate) })
	t.Cleanup(release)
	go func() {
		rec := aligned(d.shape.record())
		for i := range d.slots + 1 { // one more than there is room for
			if _, err := d.write(unit{key: kvcache.Hash{1, byte(i), byte(i >> 8)}, born: time.Now()}, rec); err != nil {
				full <- err
				return
			}
		}
		full <- nil
	}()
	come(t, "a segment is begun", entered)
	r.cache.Clear()
	r.tiers.host.clear()
	r.load(first, 96)
	release()
	if err := come(t, "the last write", full); err != nil {
		t.Error(err)
	}
}

// TestFull: without room on the disk the tier works as far as it can.
func TestFull(t *testing.T) {
	for _, policy := range []WritePolicy{Through, Back} {
		t.Run(string(policy), func(t *testing.T) { testFull(t, policy) })
	}
}

func testFull(t *testing.T, policy WritePolicy) {
	cfg := config(t.TempDir())
	cfg.Write = policy
	r := newRig(t, cfg)
	var full atomic.Bool
	r.wrap(nil, &full)
	full.Store(true)
	tokens := prompt(1, 96)
	r.run(tokens, 0)
	r.sink()
	r.quiet()
	if n := r.value("io_errors_total", "write"); n != 6 {
		t.Errorf("%v writes failed", n)
	}
	r.cache.Clear()
	r.load(tokens, 96) // host memory has it
	full.Store(false)
	r.cache.Clear()
	r.tiers.host.clear()
	r.run(tokens, 0)
	r.sink()
	r.saved(tierSSD, 6)
}

// space is what a disk has left for the tier's files.
type space struct {
	mu    sync.Mutex
	left  int64
	sizes map[string]int64
}

type roomy struct {
	file
	path string
	s    *space
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

// fill is others' files that take all that is left.
func (s *space) fill() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.left = 0
}

func (f roomy) WriteAt(b []byte, at int64) (int, error) {
	if err := f.s.grow(f.path, at+int64(len(b))); err != nil {
		return 0, err
	}
	return f.file.WriteAt(b, at)
}

// confine gives the tier a disk with so much room, beside what it has.
func (r *rig) confine(bytes int64) *space {
	s := &space{left: bytes, sizes: map[string]int64{}}
	d := r.tiers.disk
	d.growing.Lock()
	defer d.growing.Unlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	open := d.open
	d.open = func(path string, flag int) (file, error) {
		f, err := open(path, flag)
		return roomy{f, path, s}, err
	}
	d.remove = func(path string) error {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.left += s.sizes[path]
		delete(s.sizes, path)
		return os.Remove(path)
	}
	for _, seg := range d.log {
		s.sizes[seg.path] = page
		seg.file = roomy{seg.file, seg.path, s}
	}
	return s
}

// TestFullMoves: the log moves on in what room others leave it, also where a read
// unit would deserve to be kept.
func TestFullMoves(t *testing.T) {
	r := newRig(t, config(t.TempDir()))
	r.confine(int64(5*r.tiers.disk.slots/2) * page) // of four segments
	for i := range 100 {
		tokens := prompt(256*(i+1), 96)
		r.cache.Clear()
		r.run(tokens, 0)
		r.quiet()
		r.tiers.host.clear()
		if chain := r.unit(tokens, 96); !r.tiers.disk.has(chain) {
			t.Fatalf("prompt %d is not written", i)
		}
		r.cache.Clear()
		r.load(tokens, 96) // and is read
	}
	if n := r.value("io_errors_total", "write"); n != 0 {
		t.Errorf("%v writes failed", n)
	}
}

// TestFailedWrites: a write that fails takes no slot away.
func TestFailedWrites(t *testing.T) {
	r := newRig(t, config(t.TempDir()))
	var full atomic.Bool
	r.wrap(nil, &full)
	d, rec := r.tiers.disk, aligned(r.tiers.shape.record())
	write := func(i int) error {
		_, err := d.write(unit{key: kvcache.Hash{1, byte(i), byte(i >> 8)}, born: time.Now()}, rec)
		return err
	}
	for i := range 2 * d.slots {
		full.Store(i%2 == 0)
		if err := write(i); (err != nil) != full.Load() {
			t.Fatal(err)
		}
	}
	if n := len(d.log); n != 1 {
		t.Errorf("%d segments for the units of one", n)
	}
	if err := d.check(); err != nil {
		t.Error(err)
	}
}

// TestFullStart: a worker starts on a disk without room, and uses it when there is some.
func TestFullStart(t *testing.T) {
	r := newRig(t, config(t.TempDir()))
	full := true
	open := func(path string, flag int) (file, error) {
		if full {
			return nil, syscall.ENOSPC
		}
		return r.tiers.openFile(path, flag)
	}
	d, err := openDisk(t.TempDir(), 512<<10, r.tiers.shape, identity, 0, open, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	u, rec := unit{key: kvcache.Hash{1}, born: time.Now()}, aligned(r.tiers.shape.record())
	if ok, err := d.write(u, rec); ok || !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("written without room: %t, %v", ok, err)
	}
	full = false
	if ok, err := d.write(u, rec); !ok || err != nil {
		t.Errorf("not written: %v", err)
	}
	if err := d.close(); err != nil {
		t.Error(err)
	}
}

// unread is a disk one place of which cannot be read.
type unread struct {
	file
	at int64
}

func (f unread) ReadAt(b []byte, at int64) (int, error) {
	if at == f.at {
		return 0, syscall.EIO
	}
	return f.file.ReadAt(b, at)
}

// TestMoveUnread: of the units that deserve to be kept one that cannot be read is lost,
// and no other.
func TestMoveUnread(t *testing.T) {
	r := newRig(t, config(t.TempDir()))
	d, rec := r.tiers.disk, aligned(r.tiers.shape.record())
	key := func(i int) kvcache.Hash { return kvcache.Hash{1, byte(i), byte(i >> 8)} }
	failed := 0
	write := func(i int) {
		if ok, err := d.write(unit{key: key(i), born: time.Now()}, rec); err != nil {
			failed++
		} else if !ok {
			t.Fatalf("unit %d is not written", i)
		}
	}
	for i := range d.slots {
		write(i)
	}
	for i := range 8 {
		if err := d.read(key(i), 0, rec); err != nil {
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
		if want := i > 0 && i < 8; d.has(key(i)) != want {
			t.Errorf("unit %d is kept: %t", i, !want)
		}
	}
	if failed != 1 {
		t.Errorf("%d writes say that something was lost", failed)
	}
}

// TestSmaller: after a restart with less, the files take no more than that, and pinned
// units are among what is left.
func TestSmaller(t *testing.T) {
	for _, c := range []struct{ pages, then int }{{512, 128}, {11, 8}} { // larger segments, more segments
		cfg := config(t.TempDir())
		cfg.DirBytes, cfg.PinShare = int64(c.pages)*page, 0.5
		r := newRig(t, cfg)
		first := prompt(256, 16)
		if _, err := r.tiers.Pin(first, "", time.Hour); err != nil {
			t.Fatal(err)
		}
		r.run(first, 0)
		r.quiet()
		for i := range c.pages - 1 {
			r.cache.Clear()
			r.run(prompt(256*(i+2), 16), 0)
			r.quiet()
		}
		r.close()
		cfg.DirBytes = int64(c.then) * page
		r = newRig(t, cfg)
		files, _ := filepath.Glob(filepath.Join(cfg.Dir, "*.xpydkv"))
		size := int64(0)
		for _, f := range files {
			info, err := os.Stat(f)
			if err != nil {
				t.Fatal(err)
			}
			size += info.Size() - page
		}
		if size > cfg.DirBytes || size < cfg.DirBytes/2 {
			t.Errorf("%d files, %d bytes in them, %d allowed", len(files), size, cfg.DirBytes)
		}
		if err := r.tiers.disk.check(); err != nil {
			t.Error(err)
		}
		if n := r.tiers.disk.stats().Units; n < c.then/2 {
			t.Errorf("%d units of %d are found", n, c.then)
		}
		r.load(first, 16)
		r.run(first, 16)
	}
}
