// Package ssd is the level on an SSD: a log of files in a folder of this worker's own.
package ssd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier/level"
)

const (
	segmentBytes = 256 << 20 // as a rule; a small tier has smaller ones
	minSegments  = 4
)

// Disk is the level: a log of segments. New units go to the end. When the log is full its
// oldest segment is deleted; units of it that were read since they were written, or are pinned,
// are written again.
type Disk struct {
	cfg      Config
	env      *level.Env
	io       diskIO
	fs       FS
	metrics  level.Metrics
	errors   *prometheus.CounterVec // by operation
	lates    *prometheus.CounterVec // by operation
	slow     level.Breaker          // open while the SSD stalls
	watching atomic.Bool            // for stalls
	slots    int                    // records a segment
	most     int                    // segments
	lock     *os.File

	growing sync.Mutex // held while a segment is created; mu may be taken inside it
	last    uint64     // id of the newest segment ever; guarded by growing

	mu      sync.Mutex // no file is touched under it
	index   map[kvcache.Hash]place
	pending map[kvcache.Hash]bool // being written
	reading map[place]int         // reads under way
	limit   int                   // units that one tenant may have; 0: all
	tenants map[uint32]*holding   // by Unit.Tenant; with a limit
	over    uint64                // units evicted or left out because of it
	log     []*segment            // oldest first; the last is written to; empty: the next write creates one
	lost    uint64                // units evicted
	gone    []func() error        // deletes and closes files once mu is unlocked
	stuck   []string              // files that could not be deleted: erase tries again
}

// unlock unlocks mu, then deletes and closes files that nobody needs any more.
func (d *Disk) unlock() { _ = d.unlocked() }

// unlocked is unlock; an error says that a file is still there.
func (d *Disk) unlocked() (err error) {
	gone := d.gone
	d.gone = nil
	d.mu.Unlock()
	for _, f := range gone {
		err = errors.Join(err, f())
	}
	return err
}

// place is where a unit lies.
type place struct {
	seg  *segment
	slot int32
}

// open locks the folder for this process, and recovers what an earlier one with the same
// identity left there.
func open(c Config, env *level.Env, way diskIO) (*Disk, error) {
	record := env.Shape.Record()
	records := c.Bytes / int64(record)
	if records < 2*minSegments {
		return nil, level.Bad(SettingBytes, "%d bytes in %s: want room for %d units of %d tokens at least, %d bytes each", c.Bytes, c.Dir, 2*minSegments, env.Shape.Tokens(), record)
	}
	d := &Disk{cfg: c, env: env, io: way, fs: &way, index: make(map[kvcache.Hash]place), pending: make(map[kvcache.Hash]bool),
		reading: make(map[place]int), tenants: make(map[uint32]*holding)}
	if c.Wrap != nil {
		d.fs = c.Wrap(d.fs)
	}
	d.slow.Probe = d.probe
	d.measure()
	d.slots = int(max(1, min(segmentBytes/int64(record), records/minSegments)))
	d.most = int(records) / d.slots
	d.limit = env.Share(d.most * d.slots)
	err := os.MkdirAll(c.Dir, 0o700)
	if err == nil {
		err = private(c.Dir)
	}
	if err == nil {
		d.lock, err = os.OpenFile(filepath.Join(c.Dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	}
	if err != nil {
		return nil, level.Bad(SettingDir, "%w", err)
	}
	if err := lockDir(d.lock); err != nil {
		return nil, errors.Join(level.Bad(SettingDir, "another process uses %s: give each worker a folder of its own: %w", c.Dir, err), d.lock.Close())
	}
	if err := d.load(); err != nil {
		return nil, errors.Join(level.Bad(SettingDir, "%w", err), d.close())
	}
	return d, nil
}

// load recovers the segments, oldest first. The newest is written on.
func (d *Disk) load() error {
	log := d.env.Log
	names, err := filepath.Glob(filepath.Join(d.cfg.Dir, "*.xpydkv"))
	if err != nil {
		return err
	}
	slices.Sort(names)
	for _, name := range names { // nobody else uses d yet: no lock is needed
		id, err := strconv.ParseUint(strings.TrimSuffix(filepath.Base(name), ".xpydkv"), 16, 64)
		if err != nil || name != segmentPath(d.cfg.Dir, id) {
			continue // not a name of ours
		}
		d.last = max(d.last, id)
		s, err := d.recover(id)
		if errors.Is(err, errForeign) {
			log.Warn("KV segment not used, deleted", "file", name, "error", err)
			if err := os.Remove(name); err != nil {
				return err
			}
			continue
		}
		if err != nil { // the next start may be able to read it
			log.Error("KV segment cannot be read, left where it is", "file", name, "error", err)
			continue
		}
		d.log = append(d.log, s)
	}
	if n := len(d.index); n > 0 {
		log.Info("KV found on the SSD", "dir", d.cfg.Dir, "units", n, "segments", len(d.log))
	}
	if len(d.log) > 0 {
		return nil
	}
	if err = d.grow(); fullDisk(err) { // no reason not to start
		log.Warn("the SSD has no room for KV; it is tried again with each write", "dir", d.cfg.Dir, "error", err)
		return nil
	}
	return err
}

// Trim retires segments beyond the log's size, which may be smaller than before a restart.
func (d *Disk) Trim() error {
	var old []*kept
	d.mu.Lock()
	for len(d.log) > d.most {
		if k := d.retire(d.log[0]); k != nil {
			old = append(old, k)
		}
	}
	return errors.Join(d.unlocked(), d.reprieve(old))
}

// newest is the segment that is written to; nil if there is none.
func (d *Disk) newest() *segment {
	if len(d.log) == 0 {
		return nil
	}
	return d.log[len(d.log)-1]
}

// fullDisk reports whether an error means that the disk has no room.
func fullDisk(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// grow appends a new segment to the log. growing is held; mu is not, since it creates a file.
func (d *Disk) grow() error {
	s, err := d.create(d.last + 1)
	if err != nil {
		return err
	}
	d.last++
	d.mu.Lock()
	defer d.mu.Unlock()
	d.log = append(d.log, s)
	return nil
}

// extend appends a new segment, if full is still the newest one. old are units to keep of
// segments that were retired for it.
func (d *Disk) extend(full *segment) (old []*kept, err error) {
	d.growing.Lock()
	defer d.growing.Unlock()
	d.mu.Lock()
	if d.newest() != full {
		d.mu.Unlock()
		return nil, nil
	}
	for len(d.log) >= d.most { // before a file is created, so that a full disk has room for it
		if k := d.retire(d.log[0]); k != nil {
			old = append(old, k)
		}
	}
	d.unlock()
	return old, d.grow()
}

// close closes the segments and unlocks the folder. The files stay.
func (d *Disk) close() (err error) {
	for _, s := range d.log {
		err = errors.Join(err, s.file.Close())
	}
	return errors.Join(err, unlockDir(d.lock), d.lock.Close())
}

// Has reports whether a unit is here.
func (d *Disk) Has(key kvcache.Hash) bool { return !d.Born(key).IsZero() }

// Born is when a unit entered the tiers; zero if it is not here.
func (d *Disk) Born(key kvcache.Hash) (at time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if p, ok := d.find(key); ok {
		at = p.born()
	}
	return at
}

func (p place) born() time.Time { return time.Unix(p.seg.born[p.slot], 0) }

// find looks up a unit, and forgets it if it is too old.
func (d *Disk) find(key kvcache.Hash) (place, bool) {
	p, ok := d.index[key]
	if ok && d.env.Old(p.born()) {
		d.forget(key)
		return place{}, false
	}
	return p, ok
}

// forget takes a unit out of the index.
func (d *Disk) forget(key kvcache.Hash) {
	if d.leave(key) {
		d.env.Tell(Name, level.Unit{Key: key}, false)
	}
}

// Forget forgets a unit; its space comes back with its segment's.
func (d *Disk) Forget(key kvcache.Hash) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.forget(key)
}

// Load reads one unit after the other. Callers have many calls under way.
func (d *Disk) Load(_ context.Context, reads []level.Read, got func(i int, born time.Time, err error)) {
	for i := range reads {
		born, err := d.read(&reads[i])
		if err != nil && !errors.Is(err, level.ErrGone) && !errors.Is(err, level.ErrCorrupt) {
			d.errors.WithLabelValues("read").Inc()
			d.env.Complain(fmt.Errorf("read from %s: %w", d.cfg.Dir, err))
			d.Forget(reads[i].Key)
		}
		got(i, born, err)
	}
}

// read reads a unit and checks its header.
func (d *Disk) read(r *level.Read) (born time.Time, err error) {
	d.mu.Lock()
	p, ok := d.find(r.Key)
	if !ok {
		d.mu.Unlock()
		return born, level.ErrGone
	}
	born = p.born()
	p.seg.users++
	d.reading[p]++
	p.seg.hits[p.slot] = true
	d.mu.Unlock()
	defer d.endRead(p)
	if _, err := p.seg.file.ReadAt(r.Rec, d.at(int(p.slot))); err != nil {
		return born, err
	}
	if _, err = d.env.Shape.Stamped(r.Rec, r.Key, r.Pos, p.seg.id, int(p.slot)); err != nil {
		err = fmt.Errorf("slot %d of %s: %w", p.slot, p.seg.path, err)
	}
	return born, err
}

func (d *Disk) endRead(p place) {
	d.mu.Lock()
	defer d.unlock()
	if d.reading[p]--; d.reading[p] == 0 {
		delete(d.reading, p)
	}
	d.unuse(p.seg)
}

// unuse ends one use of a segment. The last one closes the file.
func (d *Disk) unuse(s *segment) {
	if s.users--; s.users == 0 {
		d.gone = append(d.gone, func() error { s.file.Close(); return nil })
	}
}

// Save appends a unit, unless it is there or being written. It writes the record's header.
func (d *Disk) Save(_ context.Context, u level.Unit, rec []byte) (saved bool, err error) {
	if saved, err = d.append(u, rec, nil); err != nil {
		d.errors.WithLabelValues("write").Inc()
		d.env.Complain(fmt.Errorf("write to %s: %w", d.cfg.Dir, err))
	}
	return saved, err
}

// append writes a unit; from is the segment that it is moved from, nil if it is new. If a full
// disk has no room for a new unit, the log's oldest segment is given up for it.
func (d *Disk) append(u level.Unit, rec []byte, from *segment) (written bool, err error) {
	var oldest *segment
	d.mu.Lock()
	if len(d.log) > 0 {
		oldest = d.log[0]
	}
	d.mu.Unlock()
	tried := from != nil // the segment of a unit that is moved goes anyway
	for again := true; again; {
		written, again, err = d.put(u, rec, from)
		if fullDisk(err) && !written && !tried {
			tried, again = true, d.yield(oldest)
		}
	}
	return written, err
}

// yield retires the log's oldest segment, if it is still this one, because others have filled
// the disk. There is no room to keep any of its units. It returns false if only the newest
// segment is left.
func (d *Disk) yield(oldest *segment) bool {
	d.mu.Lock()
	defer d.unlock()
	switch {
	case len(d.log) == 0:
		return false
	case d.log[0] != oldest: // another write has retired it
		return true
	case len(d.log) == 1:
		return false
	}
	if k := d.retire(oldest); k != nil {
		d.drain(k)
	}
	return true
}

// put tries to append. again says that the segment was retired meanwhile.
func (d *Disk) put(u level.Unit, rec []byte, from *segment) (written, again bool, err error) {
	s, slot, old, err := d.reserve(u, from)
	if err == nil && s != nil {
		d.env.Shape.Stamp(rec, &u, s.id, slot, rec)
		_, err = s.file.WriteAt(rec, d.at(slot))
		written, again = d.endWrite(u, place{s, int32(slot)}, from, err)
	}
	return written, again, errors.Join(err, d.reprieve(old))
}

func (d *Disk) endWrite(u level.Unit, at place, from *segment, err error) (written, again bool) {
	d.mu.Lock()
	defer d.unlock()
	defer d.unuse(at.seg)
	delete(d.pending, u.Key)
	if d.limit > 0 { // under the same lock as settle: the unit must not count twice
		d.tenants[u.Tenant()].writing--
		d.forgo(u.Tenant())
	}
	if err != nil {
		at.seg.spare = append(at.seg.spare, int(at.slot))
		return false, false
	}
	again = at.seg.retired
	if written = !again && d.index[u.Key].seg == from; written { // else it was forgotten while it moved
		d.settle(u.Key, at)
	}
	if written && from == nil {
		d.env.Tell(Name, u, true)
	}
	return written, again
}

// reserve hands out the next slot, in use for the caller; no segment if the unit needs none.
// old are units to keep of segments that were retired.
func (d *Disk) reserve(u level.Unit, from *segment) (s *segment, slot int, old []*kept, err error) {
	for {
		s, slot, full := d.take(u, from)
		if !full {
			return s, slot, old, nil
		}
		more, err := d.extend(s)
		old = append(old, more...)
		if err != nil {
			return nil, 0, old, err
		}
	}
}

// take is reserve without extend. full says that the newest segment s, if any, has no room.
func (d *Disk) take(u level.Unit, from *segment) (s *segment, slot int, full bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if p := d.index[u.Key]; p.seg != from || d.pending[u.Key] {
		return nil, 0, false
	}
	if from == nil && d.full(u.Tenant()) {
		if s, slot = d.replace(&u); s == nil {
			return nil, 0, false
		}
	} else {
		if s = d.newest(); s == nil {
			return nil, 0, true
		}
		switch n := len(s.spare); {
		case n > 0:
			slot, s.spare = s.spare[n-1], s.spare[:n-1]
			s.set(slot, &u)
		case len(s.keys) == d.slots:
			return s, 0, true
		default:
			slot = len(s.keys)
			s.add(&u)
		}
	}
	s.users++
	d.pending[u.Key] = true
	if d.limit > 0 {
		d.holding(u.Tenant()).writing++
	}
	return s, slot, false
}

// kept are slots of a retired segment whose units are to be written again.
type kept struct {
	seg   *segment
	slots []int
}

// retire takes the oldest segment off the log and deletes its file, which those who use it can
// still read. It keeps pinned units and those that were read, the latter up to half a segment
// so that the log moves on (pins are bounded too). They stay in the index until reprieve.
func (d *Disk) retire(s *segment) *kept {
	d.log = d.log[1:]
	s.retired = true
	k := &kept{seg: s}
	for i, key := range s.keys {
		if d.index[key] != (place{s, int32(i)}) {
			continue
		}
		if s.hits[i] && len(k.slots) < d.slots/2 || d.env.IsPinned(key) {
			k.slots = append(k.slots, i)
			continue
		}
		d.forget(key)
		d.lost++
	}
	d.discard(s.path)
	if len(k.slots) == 0 {
		d.unuse(s)
		return nil
	}
	return k // keeps the use of the list
}

// discard deletes a file once mu is unlocked.
func (d *Disk) discard(path string) {
	d.gone = append(d.gone, func() error {
		err := d.fs.Remove(path)
		if err == nil || errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		d.stuck = append(d.stuck, path)
		return err
	})
}

// reprieve writes kept units to the end of the log. Those that cannot be written are lost.
func (d *Disk) reprieve(old []*kept) error {
	var err error
	for _, k := range old {
		err = errors.Join(err, d.moveUp(k))
	}
	return err
}

func (d *Disk) moveUp(k *kept) (err error) {
	defer func() {
		d.mu.Lock()
		d.drain(k)
		d.unlock()
	}()
	rec := aligned(d.env.Shape.Record())
	for _, i := range k.slots {
		if _, e := k.seg.file.ReadAt(rec, d.at(i)); e != nil {
			err = errors.Join(err, e) // others may be readable
			continue
		}
		h, e := d.env.Shape.Whole(rec)
		if e != nil || h.Key != k.seg.keys[i] {
			continue // it is corrupt
		}
		u := h.Unit()
		u.Born = time.Unix(k.seg.born[i], 0)
		if _, e := d.append(*u, rec, k.seg); e != nil {
			return errors.Join(err, e)
		}
	}
	return err
}

// drain forgets the kept units of a retired segment that were not moved.
func (d *Disk) drain(k *kept) {
	for _, i := range k.slots {
		if key := k.seg.keys[i]; d.index[key].seg == k.seg {
			d.forget(key)
			d.lost++
		}
	}
	d.unuse(k.seg)
}

// Clear forgets every unit. erase deletes the files and creates none: the next write does. An
// error says that some are still there, and a restarted process would find them.
func (d *Disk) Clear() (erase func() error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.forgetAll()
	return d.erase
}

func (d *Disk) forgetAll() {
	for key := range d.index {
		d.forget(key)
	}
}

func (d *Disk) erase() error {
	d.mu.Lock()
	d.forgetAll()
	for len(d.log) > 0 {
		d.retire(d.log[0]) // keeps nothing: nothing is known
	}
	for _, path := range d.stuck {
		d.discard(path)
	}
	d.stuck = nil
	return d.unlocked()
}
