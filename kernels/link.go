package kernels

import "context"

// Linker is a pool on a device that can be linked with a device of another process,
// on this host or another, where neither reaches the other's memory: by NCCL.
type Linker interface {
	HostMover
	// NewLink makes the name of a link between two devices, at most MaxHandle bytes.
	// The error says why this process has no links.
	NewLink() (id []byte, err error)
	// OpenLink begins to make our end of a link and returns at once; each end of it
	// is opened once. bytes is the size of the memory that it moves to and from, the
	// same at both ends.
	OpenLink(id []byte, end LinkEnd, bytes int64) (Link, error)
}

// LinkEnd is one of the two ends of a link.
type LinkEnd int

// The ends.
const (
	LinkReceiver LinkEnd = iota
	LinkSender
)

// Link is one end of a link: memory of our device, stretches of which are sent to
// the same place in the memory of the other end. Nothing waits for longer than its
// context, whatever becomes of the peer. Safe for concurrent use.
type Link interface {
	// Memory is for GatherBlocks and ScatterBlocks of the pool. It is gone after
	// Close; its own Close does nothing, and it has no Bytes.
	Memory() HostMemory
	// Ready returns once both ends are there and something has been moved; ErrLate
	// when ctx ends first. Later it says at once whether the link has failed since: a
	// transfer of a link that fails may end with a part of its bytes.
	Ready(ctx context.Context) error
	// Transfer has the next transfer begin, once after is done, which may be nil: the
	// sender's end sends, the receiver's receives. Both begin the same transfers in
	// the same order. It does not wait until the transfer is on the device: that may
	// need a moment while another link ends, or what the host does for the peer.
	Transfer(ctx context.Context, at, bytes int64, after Pending) (Pending, error)
	// Failed is closed when the link has failed, as far as it says so by itself, or is
	// closed: no transfer begins any more.
	Failed() <-chan struct{}
	// Taken is how many bytes of our device's memory the link takes besides Memory,
	// as far as that is known.
	Taken() int64
	// Close breaks the link off: what is under way ends, and nothing is read or
	// written any more when it has returned. It may take a second. ErrLate: the device
	// had not let go when ctx ended; what is under way uses nothing but Memory, which
	// stays the link's until it has.
	Close(ctx context.Context) error
}
