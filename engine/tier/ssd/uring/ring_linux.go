package uring

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Ring is one pair of queues. All methods may be called at the same time.
type Ring struct {
	kernel kernel
	fd     int
	rings  []byte // mapped: both queues' heads and tails, and the completions
	memory []byte // mapped: the submissions

	sqHead, sqTail, cqHead, cqTail *uint32
	sqMask, cqMask                 uint32
	sqes                           []sqe
	cqes                           []cqe

	places chan uint32   // free indexes of ops
	ops    []op          // by place
	closed chan struct{} // closed by Close: no transfer begins any more
	reaped chan struct{} // closed when the reaper has ended
	broken atomic.Bool   // nothing more can be submitted
	gone   atomic.Bool   // the wake of the reaper neither

	mu     sync.Mutex // guards the submission queue and ending
	ending bool

	submitted, completed, direct, stray atomic.Uint64
}

// op is a place for one transfer at a time.
type op struct {
	turn atomic.Uint32 // counts its transfers, so that a completion names one of them
	busy atomic.Bool   // the kernel has it
	done chan int32    // its result; room for one
	pin  runtime.Pinner
}

// userData of completions that are not of transfers.
const (
	wake     = ^uint64(0)
	canceled = wake - 1
)

// nudge is how long a kernel may take over nothing, and how often a broken ring is looked at.
const nudge = time.Second

// Open sets up a ring for at least so many transfers at a time, at most 4,096.
func Open(depth int) (*Ring, error) { return open(depth, system) }

func open(depth int, k kernel) (*Ring, error) {
	if depth < 1 || depth > 4096 {
		return nil, fmt.Errorf("a ring for %d transfers, want 1 to 4096", depth)
	}
	p := params{flags: setupClamp}
	fd, err := k.setup(uint32(depth)+1, &p)
	if err != nil {
		return nil, fmt.Errorf("%w: io_uring_setup: %w%s", ErrUnavailable, err, hint(err))
	}
	r := &Ring{kernel: k, fd: fd, closed: make(chan struct{}), reaped: make(chan struct{})}
	if err := r.begin(&p); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnavailable, errors.Join(err, r.unmap()))
	}
	go r.reap()
	ctx, cancel := context.WithTimeout(context.Background(), nudge)
	defer cancel()
	if err := r.prove(ctx); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnavailable, errors.Join(err, r.Close(ctx)))
	}
	return r, nil
}

func hint(err error) string {
	switch {
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return " (kernel.io_uring_disabled, or a container's seccomp profile)"
	case errors.Is(err, unix.ENOSYS):
		return " (this kernel has none)"
	case errors.Is(err, unix.ENOMEM):
		return " (ulimit -l, with kernels before 5.12)"
	}
	return ""
}

// begin checks what the kernel offers, and maps the queues.
func (r *Ring) begin(p *params) error {
	if p.features&(featSingleMmap|featNoDrop) != featSingleMmap|featNoDrop {
		return fmt.Errorf("kernel's features %#x: older than 5.5", p.features)
	}
	var have probe
	if err := r.kernel.register(r.fd, &have); err != nil {
		return fmt.Errorf("io_uring_register: %w", err)
	}
	for _, op := range []int{opNop, opRead, opWrite, opAsyncCancel} {
		if have.ops[op].flags&opSupported == 0 {
			return fmt.Errorf("the kernel lacks operation %d", op)
		}
	}
	size := max(int(p.sq.array)+4*int(p.sqEntries), int(p.cq.dropped)+int(unsafe.Sizeof(cqe{}))*int(p.cqEntries))
	var err error
	if r.rings, err = unix.Mmap(r.fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE); err != nil {
		return fmt.Errorf("map the rings: %w", err)
	}
	if r.memory, err = unix.Mmap(r.fd, offSQEs, int(unsafe.Sizeof(sqe{}))*int(p.sqEntries), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE); err != nil {
		return fmt.Errorf("map the entries: %w", err)
	}
	word := func(off uint32) *uint32 { return (*uint32)(unsafe.Pointer(&r.rings[off])) }
	r.sqHead, r.sqTail, r.sqMask = word(p.sq.head), word(p.sq.tail), *word(p.sq.ringMask)
	r.cqHead, r.cqTail, r.cqMask = word(p.cq.head), word(p.cq.tail), *word(p.cq.ringMask)
	r.sqes = unsafe.Slice((*sqe)(unsafe.Pointer(&r.memory[0])), p.sqEntries)
	r.cqes = unsafe.Slice((*cqe)(unsafe.Pointer(&r.rings[p.cq.dropped])), p.cqEntries)
	for i := range p.sqEntries { // entry i is at index i
		*word(p.sq.array + 4*i) = i
	}
	// A completion for each transfer, one for cancelling each, and the last.
	n := min(p.sqEntries-1, p.cqEntries/2-1)
	r.ops, r.places = make([]op, n), make(chan uint32, n)
	for i := range r.ops {
		r.ops[i].done = make(chan int32, 1)
		r.places <- uint32(i)
	}
	return nil
}

// prove submits a nop and waits for its completion.
func (r *Ring) prove(ctx context.Context) error {
	i := <-r.places
	o := &r.ops[i]
	if err := r.submit(&sqe{opcode: opNop, userData: o.take(i)}); err != nil {
		o.busy.Store(false)
		return fmt.Errorf("io_uring_enter: %w", err)
	}
	select {
	case res := <-o.done:
		r.places <- i
		if res < 0 {
			return fmt.Errorf("the first operation: %w", unix.Errno(-res))
		}
		return nil
	case <-ctx.Done():
		return errors.New("the first operation does not come back")
	}
}

// take begins a transfer and returns its name.
func (o *op) take(i uint32) (userData uint64) {
	o.busy.Store(true)
	return uint64(o.turn.Add(1))<<32 | uint64(i)
}

// submit passes one entry to the kernel. After an error the kernel has not taken it.
func (r *Ring) submit(e *sqe) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ending || r.broken.Load() {
		return ErrClosed
	}
	return r.push(e)
}

// push is submit under the lock.
func (r *Ring) push(e *sqe) error {
	tail := atomic.LoadUint32(r.sqTail)
	r.sqes[tail&r.sqMask] = *e
	r.submitted.Add(1) // before it can end
	atomic.StoreUint32(r.sqTail, tail+1)
	for {
		n, err := r.kernel.enter(r.fd, 1, 0, 0)
		switch {
		case n == 1 || atomic.LoadUint32(r.sqHead) == tail+1:
			return nil
		case errors.Is(err, unix.EINTR):
			continue
		}
		atomic.StoreUint32(r.sqTail, tail)
		r.submitted.Add(^uint64(0))
		if err == nil {
			err = unix.EAGAIN
		}
		return err
	}
}

// do moves all or the first part of b from or to an open file, and waits until the kernel is done
// with b. refused says that the kernel never had it.
func (r *Ring) do(opcode uint8, fd func(func(fd uintptr)) error, b []byte, off int64) (n int, refused, err error) {
	var i uint32
	select {
	case i = <-r.places:
	case <-r.closed:
		return 0, ErrClosed, nil
	}
	o := &r.ops[i]
	p := unsafe.SliceData(b)
	o.pin.Pin(p)
	e := sqe{opcode: opcode, off: uint64(off), addr: uint64(uintptr(unsafe.Pointer(p))), len: uint32(len(b)), userData: o.take(i)}
	err = fd(func(fd uintptr) { // it cannot be closed meanwhile; afterwards the kernel has its own reference
		e.fd = int32(fd)
		refused = r.submit(&e)
	})
	res := int32(0)
	if refused = errors.Join(refused, err); refused == nil {
		res = <-o.done
	} else {
		o.busy.Store(false)
	}
	o.pin.Unpin()
	r.places <- i
	switch {
	case refused != nil:
		return 0, refused, nil
	case res < 0:
		return 0, nil, unix.Errno(-res)
	}
	return int(res), nil, nil
}

// reap handles completions until the ring is closed and nothing is under way.
func (r *Ring) reap() {
	defer close(r.reaped)
	var last bool
	for !last || r.under() > 0 {
		head, tail := *r.cqHead, atomic.LoadUint32(r.cqTail)
		if head == tail {
			if _, err := r.kernel.enter(r.fd, 0, 1, enterGetEvents); err != nil && !errors.Is(err, unix.EINTR) {
				r.broken.Store(true) // transfers under way may still end
				last = last || r.gone.Load()
				time.Sleep(nudge / 100)
			}
			continue
		}
		for ; head != tail; head++ {
			last = r.complete(r.cqes[head&r.cqMask]) || last
		}
		atomic.StoreUint32(r.cqHead, head)
	}
}

// under is how many submissions have no completion yet.
func (r *Ring) under() uint64 { return r.submitted.Load() - r.completed.Load() }

// complete ends a completion's transfer. last says that the ring is closed.
func (r *Ring) complete(c cqe) (last bool) {
	defer r.completed.Add(1)
	if c.userData >= canceled {
		return c.userData == wake
	}
	if i := uint32(c.userData); i < uint32(len(r.ops)) {
		o := &r.ops[i]
		if o.turn.Load() == uint32(c.userData>>32) && o.busy.CompareAndSwap(true, false) {
			o.done <- c.res
			return false
		}
	}
	r.stray.Add(1)
	return false
}

// Close ends the ring: what the kernel has not begun is cancelled, and its callers get an
// error; what it has begun is waited for until ctx ends. Then an error says how much is left,
// whose buffers must not be used again, and the ring stays mapped. Again: the same.
func (r *Ring) Close(ctx context.Context) error {
	r.mu.Lock()
	if !r.ending {
		r.ending = true
		close(r.closed)
		for i := range r.ops {
			if o := &r.ops[i]; o.busy.Load() { // the kernel does not find those that end meanwhile
				_ = r.push(&sqe{opcode: opAsyncCancel, addr: uint64(o.turn.Load())<<32 | uint64(i), userData: canceled})
			}
		}
		if err := r.push(&sqe{opcode: opNop, userData: wake}); err != nil {
			r.gone.Store(true) // the reaper fares no better, and so finds out
		}
	}
	r.mu.Unlock()
	select {
	case <-r.reaped:
		return r.unmap()
	case <-ctx.Done():
		return fmt.Errorf("%d transfers of the ring do not end", r.under())
	}
}

func (r *Ring) unmap() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var err error
	for _, m := range []*[]byte{&r.memory, &r.rings} {
		if *m != nil {
			err = errors.Join(err, unix.Munmap(*m))
			*m = nil
		}
	}
	if r.fd >= 0 {
		err = errors.Join(err, unix.Close(r.fd))
		r.fd = -1
	}
	return err
}

// Stats counts what went through the ring.
func (r *Ring) Stats() Stats {
	done := r.completed.Load() // first, so that it is never the larger
	return Stats{Submitted: r.submitted.Load(), Completed: done, Direct: r.direct.Load(), Stray: r.stray.Load()}
}
