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

// Disk is the level: a log of segments. New units go to the end; when the log is full its
// oldest segment goes, except for units that were read since they were written, or are
// pinned: those are written once more.
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

	growing sync.Mutex // held while a segment is begun; mu may be taken inside it
	last    uint64     // id of the newest segment ever; growing guards it

	// Whoever looks a unit up takes mu: no file is touched under it.
	mu      sync.Mutex
	index   map[kvcache.Hash]place
	pending map[kvcache.Hash]bool // being written
	reading map[place]int         // reads under way
	limit   int                   // units that one tenant may have; 0: all
	tenants map[uint32]*holding   // by unit.tag; with a limit
	over    uint64                // units that went, or were left out, for that
	log     []*segment            // oldest first; the last is written to; empty: the first write begins one
	lost    uint64                // units that went for others
	gone    []func() error        // files to delete and close, after mu
	stuck   []string              // files that could not be deleted: clear tries again
}

// unlock lets go of mu, and then of the files that nobody needs any more.
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

// open takes the folder for this process, and finds what an earlier one with the same
// identity has left there.
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
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return nil, level.Bad(SettingDir, "%w", err)
	}
	err := private(c.Dir)
	if err != nil {
		return nil, level.Bad(SettingDir, "%w", err)
	}
	if d.lock, err = os.OpenFile(filepath.Join(c.Dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600); err != nil {
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

// load recovers the segments there are, oldest first; the newest goes on if it
// has room.
func (d *Disk) load() error {
	log := d.env.Log
	names, err := filepath.Glob(filepath.Join(d.cfg.Dir, "*.xpydkv"))
	if err != nil {
		return err
	}
	slices.Sort(names)
	d.mu.Lock() // nobody else is there yet; for what retire leaves
	defer d.unlock()
	for _, name := range names {
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
		if err != nil { // it may be read the next time
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
	s, err := d.create(d.last + 1)
	if fullDisk(err) { // there will be room, or not: no reason not to start
		log.Warn("the SSD has no room for KV; it is tried again with each write", "dir", d.cfg.Dir, "error", err)
		return nil
	}
	if err != nil {
		return err
	}
	d.last++
	d.log = append(d.log, s)
	return nil
}

// Trim retires what is more than the log may have, as after a restart with less.
func (d *Disk) Trim() error {
	var old []*kept
	d.mu.Lock()
	for len(d.log) > d.most {
		if k := d.retire(d.log[0]); k != nil {
			old = append(old, k)
		}
	}
	return errors.Join(d.unlocked(), d.reprieve(old...))
}

// newest is the segment that is written to; nil: there is none.
func (d *Disk) newest() *segment {
	if len(d.log) == 0 {
		return nil
	}
	return d.log[len(d.log)-1]
}

// fullDisk says of an error that there is no room.
func fullDisk(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// begin makes a new segment the one that is written to. growing is held; mu is not,
// because this creates the file.
func (d *Disk) begin() error {
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

// extend begins a new segment, if full is still the newest one. old are units of
// the segment that had to go for it.
func (d *Disk) extend(full *segment) (old []*kept, err error) {
	d.growing.Lock()
	defer d.growing.Unlock()
	d.mu.Lock()
	if d.newest() != full {
		d.mu.Unlock()
		return nil, nil
	}
	for len(d.log) >= d.most { // first, so that a full disk has room again
		if k := d.retire(d.log[0]); k != nil {
			old = append(old, k)
		}
	}
	d.unlock()
	return old, d.begin()
}

// close lets go of folder and segments, whose files stay.
func (d *Disk) close() (err error) {
	for _, s := range d.log {
		err = errors.Join(err, s.file.Close())
	}
	return errors.Join(err, unlockDir(d.lock), d.lock.Close())
}

// Has implements level.Level, as does what follows.
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

// find looks a unit up, and forgets it if it is too old.
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

// Load reads one unit after the other; callers have many calls under way.
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

// read reads a unit, and checks that it is the one.
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
	defer d.done(p)
	if _, err := p.seg.file.ReadAt(r.Rec, d.at(int(p.slot))); err != nil {
		return born, err
	}
	if _, err = d.env.Shape.Stamped(r.Rec, r.Key, r.Pos, p.seg.id, int(p.slot)); err != nil {
		err = fmt.Errorf("slot %d of %s: %w", p.slot, p.seg.path, err)
	}
	return born, err
}

// done ends a read; the last use of a retired segment closes its file.
func (d *Disk) done(p place) {
	d.mu.Lock()
	defer d.unlock()
	if d.reading[p]--; d.reading[p] == 0 {
		delete(d.reading, p)
	}
	d.unuse(p.seg)
}

func (d *Disk) unuse(s *segment) {
	if s.users--; s.users == 0 {
		d.gone = append(d.gone, func() error { s.file.Close(); return nil })
	}
}

// Save appends a unit, unless it is there or being written. It sets the record's header.
func (d *Disk) Save(_ context.Context, u level.Unit, rec []byte) (saved bool, err error) {
	if saved, err = d.append(u, rec, nil); err != nil {
		d.errors.WithLabelValues("write").Inc()
		d.env.Complain(fmt.Errorf("write to %s: %w", d.cfg.Dir, err))
	}
	return saved, err
}

// append writes a unit; one that lies in from is moved. A new one that a full disk has
// no room for gets that of the log's oldest segment.
func (d *Disk) append(u level.Unit, rec []byte, from *segment) (written bool, err error) {
	var oldest *segment
	d.mu.Lock()
	if len(d.log) > 0 {
		oldest = d.log[0]
	}
	d.mu.Unlock()
	tried := from != nil // what is moved is of a segment that goes anyway
	for again := true; again; {
		written, again, err = d.put(u, rec, from)
		if fullDisk(err) && !written && !tried {
			tried, again = true, d.yield(oldest)
		}
	}
	return written, err
}

// yield gives up the log's oldest segment, if it is that one, to a disk that others
// have filled: all of it, since there is no room to keep anything. False: there is
// none but the newest.
func (d *Disk) yield(oldest *segment) bool {
	d.mu.Lock()
	defer d.unlock()
	switch {
	case len(d.log) == 0:
		return false
	case d.log[0] != oldest: // another write has seen to it
		return true
	case len(d.log) == 1:
		return false
	}
	if k := d.retire(oldest); k != nil {
		d.drain(k)
	}
	return true
}

// put tries to append; again: the log has gone round meanwhile.
func (d *Disk) put(u level.Unit, rec []byte, from *segment) (written, again bool, err error) {
	s, slot, old, err := d.reserve(u, from)
	if err != nil || s == nil {
		return false, false, errors.Join(err, d.reprieve(old...))
	}
	defer d.release(s)
	d.env.Shape.Stamp(rec, &u, s.id, slot, rec)
	_, err = s.file.WriteAt(rec, d.at(slot))
	d.mu.Lock()
	d.wrote(&u) // at once with settle: a unit that counted twice would cost its tenant another
	if err != nil {
		s.spare = append(s.spare, slot)
		d.mu.Unlock()
		return false, false, errors.Join(err, d.reprieve(old...))
	}
	again = s.retired
	if written = !again && d.index[u.Key].seg == from; written { // else it was dropped while it moved
		d.settle(u.Key, place{s, int32(slot)})
	}
	if written && from == nil {
		d.env.Tell(Name, u, true)
	}
	d.mu.Unlock()
	return written, again, d.reprieve(old...)
}

// wrote ends a write.
func (d *Disk) wrote(u *level.Unit) {
	delete(d.pending, u.Key)
	if d.limit > 0 {
		d.tenants[u.Tenant()].writing--
		d.forgo(u.Tenant())
	}
}

func (d *Disk) release(s *segment) {
	d.mu.Lock()
	defer d.unlock()
	d.unuse(s)
}

// reserve hands out the next slot, in use for the caller; none if the unit
// needs none. old are units of segments that had to go, which deserve to be
// kept.
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

// take is reserve where the newest segment has room; full: it, or nil where there is
// none, has not.
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

// kept are slots of a retired segment that are written again.
type kept struct {
	seg   *segment
	slots []int
}

// retire takes the oldest segment off the log and deletes its file, which
// stays readable for whoever uses it. At most half of it is kept for having
// been read, so that the log moves on (pins are bounded for the same reason); what is kept stays in the index until reprieve.
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

// discard has a file deleted after mu.
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

// reprieve writes kept units to the end of the log; what cannot be is lost.
func (d *Disk) reprieve(old ...*kept) error {
	var err error
	for _, k := range old {
		err = errors.Join(err, d.moveUp(k))
	}
	return err
}

func (d *Disk) moveUp(k *kept) (err error) {
	defer d.abolish(k)
	rec := aligned(d.env.Shape.Record())
	for _, i := range k.slots {
		if _, e := k.seg.file.ReadAt(rec, d.at(i)); e != nil {
			err = errors.Join(err, e) // others may be read
			continue
		}
		h, e := d.env.Shape.Whole(rec)
		if e != nil || h.Key != k.seg.keys[i] {
			continue // bad: it is not worth keeping
		}
		u := h.Unit()
		u.Born = time.Unix(k.seg.born[i], 0)
		if _, e := d.append(*u, rec, k.seg); e != nil {
			return errors.Join(err, e)
		}
	}
	return err
}

// abolish ends a retired segment.
func (d *Disk) abolish(k *kept) {
	d.mu.Lock()
	defer d.unlock()
	d.drain(k)
}

// drain forgets what was kept of a retired segment and has not been moved.
func (d *Disk) drain(k *kept) {
	for _, i := range k.slots {
		if key := k.seg.keys[i]; d.index[key].seg == k.seg {
			d.forget(key)
			d.lost++
		}
	}
	d.unuse(k.seg)
}

// Clear forgets every unit. erase deletes the files, which takes no room: the next write
// begins a new one. An error says that some are still there, for a process that starts
// anew to find.
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
