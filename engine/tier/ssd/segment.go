package ssd

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier/level"
)

// A segment is a file of slots of one record each, written from the front and deleted whole. A
// slot is overwritten only for a tenant that has its share. The first page says, in JSON, what
// the records are.
//
// Nothing is flushed and no length is trusted: after a crash a record is whole, or its header is
// missing, or its rows do not agree with their digests.
type segment struct {
	id    uint64
	path  string
	file  File
	keys  []kvcache.Hash // of the slots handed out
	born  []int64        // by slot: as in its header
	hits  []bool         // by slot: it was read since it was written
	tags  []uint32       // by slot: whose it is
	spare []int          // slots whose write failed: they are handed out first
	users int            // reads and writes under way, and 1 while it is in the log
	// retired says that it left the log: writes under way are lost.
	retired bool
}

func (d *Disk) preamble(id uint64) []byte {
	return d.env.Shape.Preamble("xpyd KV segment 4", id, d.env.Identity)
}

func segmentPath(dir string, id uint64) string {
	return filepath.Join(dir, fmt.Sprintf("%016x.xpydkv", id))
}

// create makes a new segment file.
func (d *Disk) create(id uint64) (*segment, error) {
	text := d.preamble(id)
	if len(text) > level.Page {
		return nil, fmt.Errorf("identity and layout of %d bytes", len(text))
	}
	s := &segment{id: id, path: segmentPath(d.cfg.Dir, id), users: 1}
	var err error
	if s.file, err = d.openFile(s.path, os.O_RDWR|os.O_CREATE|os.O_EXCL); err != nil {
		return nil, err
	}
	b := aligned(level.Page)
	copy(b, text)
	if _, err = s.file.WriteAt(b, 0); err != nil {
		return nil, errors.Join(err, s.file.Close(), os.Remove(s.path))
	}
	return s, nil
}

// add hands out the next slot.
func (s *segment) add(u *level.Unit) {
	s.keys, s.born, s.hits, s.tags = append(s.keys, kvcache.Hash{}), append(s.born, 0), append(s.hits, false), append(s.tags, 0)
	s.set(len(s.keys)-1, u)
}

// set notes which unit is in a slot.
func (s *segment) set(slot int, u *level.Unit) {
	s.keys[slot], s.born[slot], s.hits[slot], s.tags[slot] = u.Key, u.Born.Unix(), false, u.Tenant()
}

var errForeign = errors.New("written by another model, layout or version")

// recover reads what an earlier process left. errForeign: it is not for us.
func (d *Disk) recover(id uint64) (*segment, error) {
	s := &segment{id: id, path: segmentPath(d.cfg.Dir, id), users: 1}
	var err error
	if s.file, err = d.openFile(s.path, os.O_RDWR); err != nil {
		return nil, err
	}
	b := aligned(level.Page)
	switch _, err = s.file.ReadAt(b, 0); {
	case errors.Is(err, io.EOF), err == nil && !d.ours(id, b):
		err = errForeign
	case err == nil:
		err = d.cut(s.path)
	}
	if err != nil {
		return nil, errors.Join(err, s.file.Close())
	}
	for i := range d.slots {
		switch _, err := s.file.ReadAt(b, d.at(i)); {
		case errors.Is(err, io.EOF):
			return s, nil
		case err != nil:
			for i, key := range s.keys {
				if d.index[key] == (place{s, int32(i)}) {
					d.leave(key)
				}
			}
			return nil, errors.Join(err, s.file.Close())
		}
		h, err := level.ParseHeader(b)
		if err != nil || h.Segment != id || h.Slot != uint32(i) || h.Payload != d.env.Shape.Payload() {
			s.add(&level.Unit{})
			continue
		}
		s.add(h.Unit())
		d.settle(h.Key, place{s, int32(i)})
	}
	return s, nil
}

// cut shortens a file to the size of segments, which may have been larger before.
func (d *Disk) cut(path string) error {
	info, err := os.Stat(path)
	if err == nil && info.Size() > d.at(d.slots) {
		err = os.Truncate(path, d.at(d.slots))
	}
	return err
}

// ours reports whether the first page of a segment says that its records are of this shape and
// identity.
func (d *Disk) ours(id uint64, b []byte) bool {
	return bytes.Equal(bytes.TrimRight(b, "\x00"), d.preamble(id))
}

// at is where a slot begins in its file.
func (d *Disk) at(slot int) int64 { return level.Page + int64(slot)*int64(d.env.Shape.Record()) }
