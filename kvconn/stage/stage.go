// Package stage moves blocks between devices that do not reach each other's pool,
// through memory between the two: the sender gathers the blocks of a push into a
// slot of a ring, a lane brings the slot to the receiver, and the receiver copies
// it into its own blocks. So only the receiver writes its pool, and a revoke waits
// only for its own fence.
//
// A lane is shared host memory (kvconn/pinned) or NCCL (kvconn/nccl). Window and
// Hold are the two ends; they implement most of kvconn.StagedWindow and
// kvconn.StagedHold.
//
// A slot of n blocks holds their rows, block after block as kernels.Pool.Gather
// packs whole ones, then their digests, one uint64 a head.
//
// Non-goals: connections, and handing memory over; both are the transports'.
package stage

import (
	"errors"
	"fmt"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvlayout"
)

// Geometry is how a ring is cut up. Both ends must have the same.
type Geometry struct {
	Slots int
	Moves int // blocks that a slot holds
	rows  int64
	sums  int64
	heads int
}

// Ring is the size of a ring: the memory of a pair of workers.
type Ring struct {
	Slots     int   // pushes that may be under way
	SlotBytes int64 // of rows, about: a slot holds whole blocks, and digests besides
}

// page is what slots are multiples of: memory is registered in whole pages.
const page = 4096

// maxMoves bounds the blocks of a slot, however small they are.
const maxMoves = 4096

// NewGeometry cuts a ring for blocks of a layout whose layers are all alike, as devices
// have them. Grant.Describes rejects any other.
func NewGeometry(l kvlayout.Layout, r Ring) Geometry {
	layer := l.Resolve()[0]
	g := Geometry{Slots: max(1, r.Slots), rows: int64(layer.BlockBytes()), sums: int64(layer.DigestBytes()), heads: layer.Heads}
	g.Moves = int(max(1, min(r.SlotBytes/g.rows, maxMoves)))
	return g
}

// SlotBytes is the size of one slot.
func (g Geometry) SlotBytes() int64 { return (g.bytes(g.Moves) + page - 1) / page * page }

// Bytes is the size of the ring.
func (g Geometry) Bytes() int64 { return int64(g.Slots) * g.SlotBytes() }

// bytes is how much of a slot n blocks take.
func (g Geometry) bytes(n int) int64 { return int64(n) * (g.rows + g.sums) }

// at is where the slot of a push begins. Numbers start at 1.
func (g Geometry) at(number uint64) int64 {
	return int64((number-1)%uint64(g.Slots)) * g.SlotBytes()
}

// place is where block i of n lies in a slot.
func (g Geometry) place(number uint64, i, n int) (rows, digests int64) {
	at := g.at(number)
	return at + int64(i)*g.rows, at + int64(n)*g.rows + int64(i)*g.sums
}

// longRun is the average length, in bytes, from which runs of consecutive blocks go by
// the copy engine, which leaves the multiprocessors alone. Shorter ones cost the
// calling thread more than they save.
const longRun = 256 << 10

// engine chooses what copies blocks, listed by id in the order of the slot.
func (g Geometry) engine(blocks []kernels.HostBlock) kernels.Engine {
	runs := int64(1)
	for i := range blocks[1:] {
		if blocks[i+1].Block != blocks[i].Block+1 {
			runs++
		}
	}
	if int64(len(blocks))*g.rows/runs >= longRun {
		return kernels.Copy
	}
	return kernels.Kernel
}

// ctas is how many multiprocessors a copy by kernel may take: enough for PCIe.
const ctas = 4

var (
	errClosed    = errors.New("the ring is closed")
	errAbandoned = errors.New("the peer is gone")
)

func (g Geometry) check(n int) error {
	if n < 1 || n > g.Moves {
		return fmt.Errorf("a push of %d blocks into slots of %d", n, g.Moves)
	}
	return nil
}
