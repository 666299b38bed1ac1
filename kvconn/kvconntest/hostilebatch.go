package kvconntest

import (
	"encoding/binary"
	"math"

	"github.com/xpyd/xpyd/kvconn/ticket"
)

// batch sends units as one frame: head and entries, then all digests, then all rows.
// bend may change the head, 24 bytes, and the entries, 28 bytes each.
func (e *eve) batch(units [][2]int, bend func(b []byte)) {
	var entries, sums, rows []byte
	for _, u := range units {
		b := e.unit(u[0], u[1], nil)
		digests := unitHeadSize + layerOf(e.w.RConfig.Identity.Layout, u[0]).DigestBytes()
		entries = Body(append(entries, b[16:unitHeadSize]...)).U32(uint32(len(b) - digests))
		sums = append(sums, b[unitHeadSize:digests]...)
		rows = append(rows, b[digests:]...)
	}
	b := append(Body(nil).U64(e.id, UnitTag(e.secret, e.key, e.id)).U32(uint32(len(units)), uint32(len(sums)/8)), entries...)
	if bend != nil {
		bend(b)
	}
	e.bulk.Send(Batch, append(append(b, sums...), rows...))
}

// whole sends every unit of the ticket in one correct batch, and the commit.
func (e *eve) whole() {
	var units [][2]int
	e.eachUnit(func(l, i int) { units = append(units, [2]int{l, i}) })
	e.ctl.Send(Accepted, Body(nil).U64(e.id))
	e.batch(units, nil)
	e.sent(0)
	e.commit()
}

// put overwrites a number in a batch's head or entries.
func put(at int, v uint32) func(b []byte) {
	return func(b []byte) { binary.LittleEndian.PutUint32(b[at:], v) }
}

// one sends a bent batch of two units, then everything.
func one(bend func(b []byte)) func(e *eve) {
	return func(e *eve) {
		e.batch([][2]int{{0, 0}, {1, 0}}, bend)
		e.whole()
	}
}

// hostileBatches send batches, into shared memory where there is any.
var hostileBatches = []senderCase{
	{"as-it-should-be", ticket.Done, (*eve).whole},
	{"no-units", ticket.Corrupt, one(put(16, 0))},
	{"2^32-units", ticket.Corrupt, one(put(16, math.MaxUint32))},
	{"more-units-than-entries", ticket.Corrupt, one(put(16, 3))},
	{"2^32-digests", ticket.Corrupt, one(put(20, math.MaxUint32))},
	{"fewer-digests-than-heads", ticket.Corrupt, one(func(b []byte) { put(20, binary.LittleEndian.Uint32(b[20:])-1)(b) })},
	{"heads-of-2^32", ticket.Corrupt, one(put(24+20, math.MaxUint32))},
	{"a-unit-of-4-GiB", ticket.Corrupt, one(put(24+24, math.MaxUint32))},
	{"a-unit-of-no-bytes", ticket.Corrupt, one(func(b []byte) {
		n := binary.LittleEndian.Uint32(b[24+24:])
		put(24+24, 0)(b)
		put(24+28+24, 2*n)(b)
	})},
	{"bytes-of-another-unit", ticket.Done, one(func(b []byte) {
		n := binary.LittleEndian.Uint32(b[24+24:])
		put(24+24, n-8)(b)
		put(24+28+24, n+8)(b)
	})},
	{"old-generation", ticket.Done, one(put(24+12, math.MaxUint32))},
	{"another-block", ticket.Done, one(put(24+8, 7))},
	{"another-tag", ticket.Done, one(put(8, 0))},
	{"layer-of-2^32", ticket.Done, one(put(24, math.MaxUint32))},
	{"the-same-unit-twice", ticket.Done, func(e *eve) {
		e.batch([][2]int{{0, 0}, {0, 0}, {0, 0}}, nil)
		e.whole()
	}},
	{"unit-inside-a-batch-cut-off", ticket.Dead, func(e *eve) {
		e.ctl.Send(Accepted, Body(nil).U64(e.id))
		e.batch([][2]int{{0, 0}, {1, 0}}, nil)
		frame := e.bulk.frame(Unit, e.unit(2, 0, nil))
		e.bulk.Write(frame[:len(frame)-9])
		e.bulk.Close()
	}},
}
