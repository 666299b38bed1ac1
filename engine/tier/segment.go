package tier

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/kvlayout"
)

// A segment is a file of slots of one record each, written from the front and
// deleted whole; a slot is written again only by a tenant that has its share.
// Its first page says, in JSON, what the records are.
//
// Nothing is flushed and no length is trusted: after a crash a record is
// whole, or its header is not there, or its rows disagree with their digests.
type segment struct {
	id    uint64
	path  string
	file  file
	keys  []kvcache.Hash // of the slots handed out
	born  []int64        // by slot: as in its header
	hits  []bool         // by slot: it was read since it was written
	tags  []uint32       // by slot: whose it is
	spare []int          // slots whose write failed: they are handed out first
	users int            // reads and writes under way, and 1 while it is listed
	// retired: what is being written to it is written for nothing.
	retired bool
}

// preamble is a segment's first page.
type preamble struct {
	Format   string `json:"format"`
	Segment  uint64 `json:"segment"`
	Identity string `json:"identity"` // of the model and its numerics
	Record   int    `json:"record_bytes"`
	Payload  int    `json:"payload_bytes"`
	Blocks   int    `json:"unit_blocks"`
	// Layout is part of what names a unit: another layout's are never read.
	Layout kvlayout.Layout `json:"layout"`
}

func (d *disk) preamble(id uint64) []byte {
	return d.shape.preamble("xpyd KV segment 4", id, d.identity)
}

func (s *shape) preamble(format string, id uint64, identity string) []byte {
	text, err := json.Marshal(preamble{format, id, identity, s.record(), s.payload(), s.blocks, s.Layout})
	if err != nil { // it has nothing that JSON cannot hold
		panic(err)
	}
	return text
}

func segmentPath(dir string, id uint64) string {
	return filepath.Join(dir, fmt.Sprintf("%016x.xpydkv", id))
}

// create makes a new segment file.
func (d *disk) create(id uint64) (*segment, error) {
	text := d.preamble(id)
	if len(text) > page {
		return nil, fmt.Errorf("identity and layout of %d bytes", len(text))
	}
	s := &segment{id: id, path: segmentPath(d.dir, id), users: 1}
	var err error
	if s.file, err = d.open(s.path, os.O_RDWR|os.O_CREATE|os.O_EXCL); err != nil {
		return nil, err
	}
	b := aligned(page)
	copy(b, text)
	if _, err = s.file.WriteAt(b, 0); err != nil {
		return nil, errors.Join(err, s.file.Close(), os.Remove(s.path))
	}
	return s, nil
}

// add hands out the next slot.
func (s *segment) add(u *unit) {
	s.keys, s.born, s.hits, s.tags = append(s.keys, kvcache.Hash{}), append(s.born, 0), append(s.hits, false), append(s.tags, 0)
	s.set(len(s.keys)-1, u)
}

// set says what is in a slot.
func (s *segment) set(slot int, u *unit) {
	s.keys[slot], s.born[slot], s.hits[slot], s.tags[slot] = u.key, u.born.Unix(), false, u.tag()
}

var errForeign = errors.New("written by another model, layout or version")

// recover reads what an earlier process has left. errForeign: not for us.
func (d *disk) recover(id uint64) (*segment, error) {
	s := &segment{id: id, path: segmentPath(d.dir, id), users: 1}
	var err error
	if s.file, err = d.open(s.path, os.O_RDWR); err != nil {
		return nil, err
	}
	b := aligned(page)
	if _, err = s.file.ReadAt(b, 0); err == nil {
		err = d.recognise(id, b)
	} else if errors.Is(err, io.EOF) {
		err = errForeign
	}
	if err == nil {
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
		h, err := parseHeader(b)
		ours := err == nil && h.segment == id && h.slot == uint32(i) && h.payload == d.shape.payload()
		if !ours {
			s.add(&unit{})
			continue
		}
		s.add(h.unit())
		d.settle(h.key, place{s, int32(i)})
	}
	return s, nil
}

// cut makes a file no longer than segments are now: they were larger.
func (d *disk) cut(path string) error {
	info, err := os.Stat(path)
	if err == nil && info.Size() > d.at(d.slots) {
		err = os.Truncate(path, d.at(d.slots))
	}
	return err
}

func (d *disk) recognise(id uint64, b []byte) error {
	if !bytes.Equal(bytes.TrimRight(b, "\x00"), d.preamble(id)) {
		return errForeign
	}
	return nil
}

// at is where a slot begins in its file.
func (d *disk) at(slot int) int64 { return page + int64(slot)*int64(d.shape.record()) }
