package tier

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier/level"
)

// A level that outlives the process (level.Keeper) keeps the pins too, as a JSON file that
// is rewritten when they change. It names units by hash and has no tokens.
const pinsFormat = "xpyd KV pins 1"

// savedPins is the file.
type savedPins struct {
	Format   string     `json:"format"`
	Identity string     `json:"identity"` // as in segments
	Tokens   int        `json:"unit_tokens"`
	Pins     []savedPin `json:"pins"`
}

type savedPin struct {
	Units []byte    `json:"units"` // hashes, concatenated
	Until time.Time `json:"until"`
}

// noPins is the file of this worker without pins.
func (t *Tiers) noPins() savedPins {
	return savedPins{pinsFormat, t.cfg.Identity, t.shape.Tokens(), nil}
}

// loadPins takes over the unexpired pins of the worker that had the folder before, as far
// as the share allows. A bad file is logged, and the worker starts all the same.
func (t *Tiers) loadPins() {
	var list []*pin
	b, err := t.keeper.ReadPins()
	if err == nil {
		list, err = parsePins(b, t.noPins())
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.log.Warn("pins are not known any more", "error", err)
	}
	left := 0
	for _, one := range list {
		if one.until.After(time.Now()) && t.pins.add(one) != nil {
			left++
		}
	}
	if left > 0 {
		t.log.Warn("pins left out, the share is smaller now", "pins", left)
	}
}

// parsePins does not trust the file: an unknown name pins nothing, anything that is not a
// list of names is an error.
func parsePins(b []byte, want savedPins) ([]*pin, error) {
	var s savedPins
	if err := json.Unmarshal(b, &s); err != nil {
		return nil, err
	}
	if s.Format != want.Format || s.Identity != want.Identity || s.Tokens != want.Tokens {
		return nil, errors.New("written by another model, layout or version")
	}
	var list []*pin
	for i, p := range s.Pins {
		const size = len(kvcache.Hash{})
		n := len(p.Units) / size
		if n == 0 || len(p.Units)%size != 0 {
			return nil, fmt.Errorf("pin %d has %d bytes of names", i, len(p.Units))
		}
		one := &pin{tokens: n * s.Tokens, until: p.Until}
		for i := range n {
			one.keys = append(one.keys, kvcache.Hash(p.Units[i*size:]))
		}
		list = append(list, one)
	}
	return list, nil
}

// writePins writes the pins of this moment.
func (t *Tiers) writePins() error {
	s := t.noPins()
	for _, one := range t.pins.all() {
		p := savedPin{Until: one.until}
		for _, key := range one.keys {
			p.Units = append(p.Units, key[:]...)
		}
		s.Pins = append(s.Pins, p)
	}
	b, err := json.Marshal(&s)
	if err != nil {
		return err
	}
	return t.keeper.WritePins(b)
}

// pinKeeper writes the file after each change until the tiers close, the last one included.
// It retries a write that failed. A disk that hangs holds up nothing else.
func (t *Tiers) pinKeeper() {
	var again <-chan time.Time
	wait := level.ProbeFirst
	write := func() {
		if err := t.writePins(); err != nil {
			t.complain(err)
			again, wait = time.After(wait), min(2*wait, level.ProbeLast)
			return
		}
		again, wait = nil, level.ProbeFirst
	}
	for {
		select {
		case <-t.keep:
		case <-again:
		case <-t.awake.Done():
			if again != nil || len(t.keep) > 0 {
				write()
			}
			return
		}
		write()
	}
}

// pinsChanged has the file written.
func (t *Tiers) pinsChanged() {
	if t.keeper != nil {
		poke(t.keep)
	}
}
