package kernels

import "context"

// Linker is a pool whose device can be linked by NCCL with a device of another process, on
// this host or another, where neither can reach the other's memory.
type Linker interface {
	HostMover
	// NewLink makes the name of a link between two devices, at most MaxHandle bytes. The
	// error says why this process has no links.
	NewLink() (id []byte, err error)
	// OpenLink begins to make our end of a link and returns at once. Each end is opened
	// once. bytes is the size of the link's memory, the same at both ends.
	OpenLink(id []byte, end LinkEnd, bytes int64) (Link, error)
}

// LinkEnd is one of the two ends of a link.
type LinkEnd int

// The ends.
const (
	LinkReceiver LinkEnd = iota
	LinkSender
)

// Link is one end of a link: memory of our device, of which stretches are sent to the same
// place in the other end's memory. Nothing waits beyond its context, whatever the peer
// does. Safe for concurrent use.
type Link interface {
	// Memory serves GatherBlocks and ScatterBlocks of the pool. It ends with the link's
	// Close; its own Close does nothing, and its Bytes are nil.
	Memory() HostMemory
	// Ready returns once both ends are there and a first transfer has succeeded; ErrLate
	// when ctx ends first. Later it returns at once with the link's failure, if any: a
	// transfer of a link that fails may complete with only part of its bytes.
	Ready(ctx context.Context) error
	// Transfer queues the next transfer, to begin once after is done (nil: at once). The
	// sender's end sends, the receiver's receives; both must queue the same transfers in
	// the same order. It does not wait for the launch, which may be delayed while another
	// link ends or the host serves the peer.
	Transfer(ctx context.Context, at, bytes int64, after Pending) (Pending, error)
	// Failed is closed when the link notices its own failure or is closed: no further
	// transfer begins.
	Failed() <-chan struct{}
	// Taken is the device memory that the link takes besides Memory, in bytes, as far as
	// known.
	Taken() int64
	// Close breaks the link off: transfers under way end, and after it nothing is read or
	// written. It may take a second. ErrLate: the device had not let go when ctx ended.
	// What is still under way then uses only Memory, which stays the link's until it is
	// over.
	Close(ctx context.Context) error
}
