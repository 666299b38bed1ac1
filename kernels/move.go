package kernels

import (
	"context"
	"errors"
	"math"
	"sync/atomic"
	"unsafe"

	"github.com/xpyd/xpyd/kvlayout"
)

// What a Pool on a device can do beyond Pool: move blocks in bulk, to other devices of this
// host and to host memory, by calls that do not wait. kernels/cuda implements all of it; of
// several ranks the whole pool is a HostMover, a Verifier and Divided, and each rank's the
// rest. A pool that cannot move this way implements none. Blocks move whole, with their stored digests (Pool.Digest) and the number of rows
// these cover; rows above that are undefined at both ends.
//
// Whatever comes from another process (handles, memory, block ids) is checked here before
// use. An id out of range is an error, and nothing moves.

var (
	// ErrLate: the context ended first. The operation may still complete.
	ErrLate = errors.New("not done in time")
	// ErrNoPeerAccess: the two devices cannot reach each other's memory, or the
	// system does not let processes share it. Errors of OpenPeer wrap it.
	ErrNoPeerAccess = errors.New("no access to the peer's device memory")
)

// MaxHandle bounds an Export's handle, in bytes.
const MaxHandle = 512

// FlagLines is how many flags a pool has for its peers to set. A line has FlagStride bytes, of
// which the first 8 are the flag.
const (
	FlagLines  = 4096
	FlagStride = 128
)

// FlagUnused is the value of a flag that no device sets: whoever maps the flags writes it to
// lines that it has been given and has no use for.
const FlagUnused = math.MaxUint64

// SetFlag sets a flag in the host's memory of all lines, which begins on a page.
func SetFlag(flags []byte, line int, value uint64) {
	atomic.StoreUint64((*uint64)(unsafe.Pointer(&flags[line*FlagStride])), value)
}

// Export is what another process needs to write into a pool.
type Export struct {
	// Handle names the pool's device memory and describes its layout. It is opaque, valid
	// as long as the backend, and at most MaxHandle bytes.
	Handle []byte
	// FD is a memory file of Bytes bytes, sealed against shrinking, that holds the host's
	// half of the flags. The backend owns it and keeps it open until Close. The peer maps
	// it, shared and writable.
	FD    int
	Bytes int64
}

// Exporter is a Pool that peers on this host write into (decode).
//
// Only the peer can fence its writes: a mapping cannot be taken back. Blocks of a revoked
// transfer are reusable after the peer's Drain, its Close, or the end of its process.
type Exporter interface {
	Pool
	// Export describes the pool. Every call returns the same.
	Export() (Export, error)
	// Flag returns the last value that a peer has set on a line; 0 at first. A peer's
	// pushes arrive in order, so a value that only grows, on a line used by one peer, tells
	// which are complete. Costs a read of host memory.
	Flag(line int) uint64
	// AwaitFlag waits until Flag(line) >= value; ErrLate when ctx ends first. It polls: 50
	// microseconds without a pause, then with short sleeps.
	AwaitFlag(ctx context.Context, line int, value uint64) error
	// ClearFlag resets a line to 0 for another peer, once nobody can set it any more.
	ClearFlag(line int) error
	Verifier
}

// RankPool is the pool of one rank, or a pool that is not divided.
type RankPool interface {
	Exporter
	PeerOpener
}

// Divided is a Pool of several tensor-parallel ranks. A peer opens each of them by itself.
type Divided interface {
	Pool
	// RankPools are the pools of all ranks, in their order; kvlayout.Layout.Ranks says which
	// heads each has. They have one file of flags, and so the same lines.
	RankPools() []RankPool
}

// RankPools are the pools that peers open of p: its ranks', or p itself; none where peers
// cannot open it.
func RankPools(p Pool) []RankPool {
	switch p := p.(type) {
	case Divided:
		return p.RankPools()
	case RankPool:
		return []RankPool{p}
	}
	return nil
}

// Verifier is a Pool on a device that checks what has arrived in it.
type Verifier interface {
	// Verify recomputes the digests of blocks on the device from the rows that lie there,
	// and compares them with those that came with the blocks. good[i] means that the stored
	// digest covers exactly Rows rows and matches. It takes one launch for up to thousands
	// of entries and is safe beside steps and other calls. After ErrLate nothing is known
	// of any block.
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
	// OpenPeer maps the pool that handle describes, which must belong to another process.
	// flags is the memory behind its Export.FD; the caller keeps it mapped until Close has
	// returned nil; no two peers share it. The layouts may differ in block_tokens, and in dtype
	// among bf16, f16 and f8e4m3: then pushes use Push.Refills, otherwise Push.Blocks. They may
	// also differ in heads: then pushes need a Push.Cut. It takes milliseconds: call it once for
	// each peer and epoch.
	OpenPeer(handle []byte, flags []byte) (Peer, error)
}

// Peer is another process's pool, open for writing. Its pushes run in order on their own
// stream beside the steps. Safe for concurrent use.
type Peer interface {
	// Push copies blocks and returns, after some microseconds, when all is launched. The
	// source blocks must keep their rows until the push is complete (by Drain or the
	// receiver's word), and nobody else may write the destination blocks. An error means
	// that nothing was launched, or that the device is lost.
	Push(p *Push) error
	// Drain returns nil when nothing pushed before the call is being read or written any
	// more; ErrLate when ctx ends before that is known. After revoke, Drain and acknowledge
	// the receiver may reuse the blocks.
	Drain(ctx context.Context) error
	// Close drains and unmaps. On an error the pool is still mapped, and Close
	// may be called again. Push fails from the first call on.
	Close(ctx context.Context) error
}

// Engine selects what copies.
type Engine int

// Engines.
const (
	// Auto is Copy where runs of consecutive blocks are long: on average 256 KiB a layer
	// for pushes, 64 KiB for host moves.
	Auto Engine = iota
	// Kernel uses multiprocessors: any list at nearly the link's rate, in one launch.
	Kernel
	// Copy uses the copy engines: multiprocessors only for digests, and the link's rate for
	// runs of at least 64 KiB, each costing the caller up to 1 microsecond. That suits any
	// list of a push that waits for its step (AfterStep).
	Copy
)

// BlockPair is a source block and where it goes.
type BlockPair struct{ Src, Dst int32 }

// Cut is the KV heads of a push: Count of them, from ours number From on to the peer's number
// To on, counted in either pool. The zero Cut is all heads of two pools that have the same.
type Cut struct{ From, To, Count int }

// Or is the cut, or for the zero Cut that of all heads.
func (c Cut) Or(heads int) Cut {
	if c == (Cut{}) {
		return Cut{Count: heads}
	}
	return c
}

// Push says what to copy: Blocks in each of Layers layers from FirstLayer on. One source
// may go to several destinations; destinations must differ.
type Push struct {
	FirstLayer, Layers int
	Blocks             []BlockPair
	Cut                Cut // only these heads, with their digests
	// Value, unless 0, is set on Line of the receiver's flags once this push and all before
	// it to this peer can be read. A push of no blocks only sets the flag.
	Line  int
	Value uint64

	// Refills replaces Blocks for a peer with another block size or row dtype: rows of
	// Sources are assembled anew. Layers is then 1; Engine and AfterStep are not used.
	//
	// A source that goes into a destination block whole keeps its stored digest, unchecked.
	// A source that is cut or converted is hashed in full as it is read, and compared with
	// its stored digest. Its pieces get the digests of the rows written or, if the source
	// is bad, a digest of no rows: a bad row never gets a good digest.
	Sources []kvlayout.Held
	Refills []kvlayout.Refill

	Engine Engine
	CTAs   int // at most, for Kernel; 0 chooses: all, for speed. 16 reach 88 % of the link's rate
	// AfterStep makes the device wait until the last launched step (kernels.Launcher),
	// which must have OnLayer, has written the push's last layer. Only the goroutine that
	// launches steps may set it. Without it the rows must already be in the pool, as they
	// are in OnLayer.
	AfterStep bool
}

// HostMover is a Pool that moves blocks to and from host memory in bulk.
type HostMover interface {
	Pool
	// RegisterHost pins host memory, so that the device can reach it. mem begins and ends
	// on a page and outlives the HostMemory.
	RegisterHost(mem []byte) (HostMemory, error)
	// GatherBlocks copies blocks with their digests to host memory. ScatterBlocks copies
	// them back and sets digests as SetDigest does, without verifying: see Exporter.Verify.
	// Both return when all is launched; after an error nothing is under way.
	GatherBlocks(m *HostMove) (Pending, error)
	ScatterBlocks(m *HostMove) (Pending, error)
}

// HostMemory is registered memory. Close it when no move uses it.
type HostMemory interface {
	Bytes() []byte
	Close() error
}

// HostBlock is a block and its place in host memory, as byte offsets: Rows of layer
// FirstLayer's rows as Gather packs a whole block (a multiple of 16), Digests of its
// digests, one uint64 a head (a multiple of 8).
type HostBlock struct {
	Block         int32
	Rows, Digests int64
	Filled        int // rows covered by the digests; ScatterBlocks and ArriveBlocks only
	FirstPos      int // absolute position of the block's row 0; ArriveBlocks only
}

// HostMove is one move: Layers layers from FirstLayer on of each block. The next layer's
// rows lie LayerStride bytes further on, its digests DigestStride bytes: all layers of a
// device are alike (kvlayout.Layout.Uniform).
type HostMove struct {
	Memory                    HostMemory
	FirstLayer, Layers        int
	Blocks                    []HostBlock
	LayerStride, DigestStride int64
	Engine                    Engine
	CTAs                      int // for Kernel, 1..8; 0 chooses 4, or 2 for an arrival
}

// Pending is a move under way. Call Wait until it returns something other than ErrLate.
type Pending interface {
	// Wait returns nil when the move is complete; ErrLate when ctx ends first.
	Wait(ctx context.Context) error
}

// Arriver is a HostMover whose blocks can be used while they arrive: a step that names an
// Arrival (Step.Arrivals) computes each layer once the arrival has it. The device waits,
// not a goroutine.
type Arriver interface {
	HostMover
	// ArriveBlocks is ScatterBlocks layer by layer, with Verify of each once it has landed.
	// It returns when all is launched; after an error nothing is under way.
	ArriveBlocks(m *HostMove) (HostArrival, error)
}

// Arrival is blocks on their way into the pool. Like any Pending it must be waited for.
// Safe for concurrent use.
type Arrival interface {
	Pending
	// Layers returns how many of the pool's layers, from the first, steps need not wait
	// for. It is cheap, and may lag behind.
	Layers() int
}

// HostArrival is an Arrival that the device itself moves and verifies.
type HostArrival interface {
	Arrival
	// Good reports for each block of the move whether its rows are right in all layers.
	// ErrLate until everything has arrived, which is certain once a step that named the
	// arrival has been awaited.
	Good() ([]bool, error)
}

// Gated is a backend whose steps can wait for blocks that others, such as a peer, write.
// The launch waits, on the host: a device waiting for a peer would hold a hardware queue
// that others' work may be behind.
type Gated interface {
	// Gate returns an arrival that has no layers yet.
	Gate() (Gate, error)
}

// Gate is an arrival whose progress its owner reports. The owner must finish within
// moments, whatever the peer does: a step waits for it.
type Gate interface {
	Arrival
	// Open reports that steps need not wait for the first layers layers; a smaller number
	// than before changes nothing, and all of them end the gate. It does not wait for a
	// step. Safe for concurrent use.
	Open(layers int)
}
