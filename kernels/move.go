package kernels

import (
	"context"
	"errors"

	"github.com/xpyd/xpyd/kvlayout"
)

// What a Pool on a device can do beyond Pool: blocks in bulk, to other devices
// of this host and to host memory, by calls that do not wait. kernels/cuda
// implements all of it; a pool that cannot move this way does not implement it.
// Blocks move whole, with their stored digests (Pool.Digest) and how many rows
// those cover; rows above that are undefined at both ends.
//
// Whatever comes from another process (handles, memory, block ids) is checked
// here before it is used. Ids out of range are errors, and nothing moves.

var (
	// ErrLate: the context ended first. What was asked for may still happen.
	ErrLate = errors.New("not done in time")
	// ErrNoPeerAccess: the two devices cannot reach each other's memory, or the
	// system does not let processes share it. Errors of OpenPeer wrap it.
	ErrNoPeerAccess = errors.New("no access to the peer's device memory")
)

// MaxHandle bounds an Export's handle, bytes.
const MaxHandle = 512

// FlagLines is how many flags a pool has for its peers to set.
const FlagLines = 1024

// Export is what another process needs to write into a pool.
type Export struct {
	// Handle names the pool's device memory and says how it is laid out. It is
	// opaque, valid as long as the backend, and at most MaxHandle bytes.
	Handle []byte
	// FD is a memory file of Bytes bytes, sealed against shrinking, with the
	// host's half of the flags. The backend's own, open until its Close. The
	// peer maps it, shared and writable.
	FD    int
	Bytes int64
}

// Exporter is a Pool that peers on this host write into (decode).
//
// A peer's writes are fenced by the peer alone: a mapping cannot be taken back.
// Blocks of a revoked transfer are reusable after the peer's Drain, its Close,
// or its process's end.
type Exporter interface {
	Pool
	// Export describes the pool. Each call returns the same.
	Export() (Export, error)
	// Flag is the last value that a peer has set on a line; 0 at first. A peer's
	// pushes arrive in their order: a value that only grows, on a line of one
	// peer, says which are complete. Costs a read of host memory.
	Flag(line int) uint64
	// AwaitFlag waits until Flag(line) >= value; ErrLate when ctx ends before.
	// It polls: 50 microseconds without a pause, then with naps.
	AwaitFlag(ctx context.Context, line int, value uint64) error
	// ClearFlag makes a line 0 again, for another peer, when nobody can be
	// setting it any more.
	ClearFlag(line int) error
	// Verify makes the digests of blocks anew, on the device, from the rows that
	// lie there, and compares them with those that came with the blocks. Of
	// good[i] the stored digest covers exactly Rows rows and is right. One
	// launch for up to thousands of entries; safe beside steps and other calls.
	// After ErrLate nothing is known of any block.
	Verify(ctx context.Context, landed []Landed) (good []bool, err error)
}

// Landed is a block of one layer whose rows should have arrived.
type Landed struct {
	Layer    int
	Block    int32
	FirstPos int // absolute position of the block's row 0
	Rows     int // 1..BlockTokens
}

// PeerOpener is a Pool that pushes its blocks into others (prefill).
type PeerOpener interface {
	Pool
	// OpenPeer maps the pool that handle describes; flags is the memory behind
	// its Export.FD, mapped by the caller, who keeps it so until Close has
	// returned nil. The pools' layouts may differ in block_tokens, and in dtype among
	// bf16, f16 and f8e4m3; where they do, pushes are of Push.Refills, else of
	// Push.Blocks. Once a peer and epoch: it takes milliseconds. The handle must
	// be of another process.
	OpenPeer(handle []byte, flags []byte) (Peer, error)
}

// Peer is another process's pool, open for writing. Its pushes run in order on
// a stream of their own beside the steps. Safe for concurrent use.
type Peer interface {
	// Push copies blocks and returns when all is launched: some microseconds.
	// The source blocks must keep their rows until the push is complete (Drain,
	// or the receiver's word), and nobody else writes the destination blocks.
	// An error means that nothing was launched, or that the device is lost.
	Push(p *Push) error
	// Drain returns nil when nothing that was pushed before the call is being
	// read or written any more; ErrLate when ctx ends first, and then that is
	// not known. Revoke, Drain, acknowledge: after that the receiver may use the
	// blocks anew.
	Drain(ctx context.Context) error
	// Close drains and unmaps. On an error the pool is still mapped, and Close
	// may be called again. Push fails from the first call on.
	Close(ctx context.Context) error
}

// Engine is who copies.
type Engine int

// Engines.
const (
	// Auto is Copy where runs of consecutive blocks are long: 256 KiB a layer on
	// average for pushes, 64 KiB for host moves.
	Auto Engine = iota
	// Kernel is multiprocessors: any list at nearly the link's rate, in one launch.
	Kernel
	// Copy is the copy engines: no multiprocessors but for digests, and the link's
	// rate from runs of 64 KiB on, which cost the caller up to 1 microsecond each.
	// So a push that waits for its step (AfterStep) may well take it for any list.
	Copy
)

// BlockPair is a source block and where it goes.
type BlockPair struct{ Src, Dst int32 }

// Push says what to copy: Blocks in each of Layers layers from FirstLayer on.
// One source may go to several destinations; destinations must differ.
type Push struct {
	FirstLayer, Layers int
	Blocks             []BlockPair
	// Value, unless 0, is set on Line of the receiver's flags once everything
	// of this push, and of all before it to this peer, is there to be read. A
	// push of no blocks only does that.
	Line  int
	Value uint64

	// Refills, in place of Blocks, is for a peer whose blocks have another size or
	// whose rows have another dtype: rows of Sources are put together anew. Layers is
	// 1 then, and Engine and AfterStep are not used.
	//
	// Where a source goes into a destination block whole, its stored digest goes
	// along and is not looked at. One that is cut, or whose rows are converted, is hashed
	// as it is read, all of it, and compared with its stored digest. The pieces' digests
	// are those of the rows that were written, or, when the source is bad, no rows'
	// digest at all: a bad row never gets a good digest.
	Sources []kvlayout.Held
	Refills []kvlayout.Refill

	Engine Engine
	CTAs   int // of Kernel, at most; 0 chooses: all for speed. 16 reach 88 % of the link
	// AfterStep makes the device wait for the push's last layer in the step
	// that was launched last (kernels.Launcher), which must have OnLayer. Only
	// the goroutine that launches steps may set it. Without it the rows must be
	// in the pool already, as they are in OnLayer.
	AfterStep bool
}

// HostMover is a Pool that moves blocks to and from host memory in bulk.
type HostMover interface {
	Pool
	// RegisterHost makes host memory reachable by the device (it is pinned:
	// pages are taken). mem begins and ends on a page and outlives the HostMemory.
	RegisterHost(mem []byte) (HostMemory, error)
	// GatherBlocks copies blocks, with their digests, to host memory, and
	// ScatterBlocks back, setting digests as SetDigest does; ScatterBlocks
	// verifies nothing: see Exporter.Verify. Both return when all is launched;
	// after an error nothing is under way.
	GatherBlocks(m *HostMove) (Pending, error)
	ScatterBlocks(m *HostMove) (Pending, error)
}

// HostMemory is registered memory. Close when no move uses it.
type HostMemory interface {
	Bytes() []byte
	Close() error
}

// HostBlock is a block and where it lies in host memory, in bytes from its
// beginning: layer FirstLayer's rows as Gather packs a whole block (a multiple of
// 16), and its digests, one uint64 a head (a multiple of 8).
type HostBlock struct {
	Block         int32
	Rows, Digests int64
	Filled        int // rows that the digests cover; ScatterBlocks and ArriveBlocks only
	FirstPos      int // absolute position of the block's row 0; ArriveBlocks only
}

// HostMove is one move: Layers layers from FirstLayer on of each block. The
// rows of the next layer lie LayerStride bytes on, its digests DigestStride: a
// device's layers are alike (kvlayout.Layout.Uniform).
type HostMove struct {
	Memory                    HostMemory
	FirstLayer, Layers        int
	Blocks                    []HostBlock
	LayerStride, DigestStride int64
	Engine                    Engine
	CTAs                      int // of Kernel, 1..8; 0 chooses 4, of an arrival 2
}

// Pending is a move under way. Each must be waited for until Wait returned
// something else than ErrLate.
type Pending interface {
	// Wait returns nil when the move is complete; ErrLate when ctx ends first.
	Wait(ctx context.Context) error
}

// Arriver is a HostMover whose blocks can be computed with while they arrive: a
// step that names an Arrival (Step.Arrivals) computes each layer when that layer
// of it is there. The device waits, no goroutine does.
type Arriver interface {
	HostMover
	// ArriveBlocks is ScatterBlocks in the order of the layers, with Verify of
	// each where it landed. It returns when all is launched; after an error
	// nothing is under way.
	ArriveBlocks(m *HostMove) (HostArrival, error)
}

// Arrival is blocks on their way into the pool. It must be waited for as any
// Pending. Safe for concurrent use.
type Arrival interface {
	Pending
	// Layers is how many of the pool's layers, from the first, a step need not
	// wait for any more. Costs a look, and may be less than the truth.
	Layers() int
}

// HostArrival is an Arrival of what a device moves and verifies itself.
type HostArrival interface {
	Arrival
	// Good says of each block of the move whether its rows are right in all
	// layers. ErrLate before everything has arrived; a step that named the
	// arrival and has been awaited proves that it has.
	Good() ([]bool, error)
}

// Gated is a backend whose steps can wait for blocks that others write, such as a
// peer. It is the launch that waits, on the host: a device that waited for a peer
// would hold a hardware queue, in which others' work may be behind it.
type Gated interface {
	// Gate makes an arrival that begins with no layer.
	Gate() (Gate, error)
}

// Gate is an arrival that somebody tells how far it is. Whoever does must come to
// its end within moments, whatever the peer does: a step waits for it.
type Gate interface {
	Arrival
	// Open says that steps need not wait for so many layers, from the first; fewer
	// than before says nothing. All of them is the gate's end. It waits for no step.
	// Safe for concurrent use.
	Open(layers int)
}
