package uring

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// What include/uapi/linux/io_uring.h says.
const (
	opNop         = 0
	opAsyncCancel = 14
	opRead        = 22
	opWrite       = 23

	offSQEs = 0x10000000 // offset to map the entries at; the rings are at 0

	setupClamp     = 1 << 4
	featSingleMmap = 1 << 0
	featNoDrop     = 1 << 1
	enterGetEvents = 1 << 0
	registerProbe  = 8
	opSupported    = 1 << 0
)

// params is struct io_uring_params.
type params struct {
	sqEntries, cqEntries, flags, sqThreadCPU, sqThreadIdle, features, wqFD uint32

	resv [3]uint32
	sq   offsets
	cq   offsets
}

// offsets is struct io_sqring_offsets and io_cqring_offsets, which differ in the meaning of some words.
type offsets struct {
	head, tail, ringMask, ringEntries uint32

	flags   uint32 // CQ: overflow
	dropped uint32 // CQ: the completions
	array   uint32 // CQ: flags
	resv    uint32
	user    uint64
}

// sqe is struct io_uring_sqe, 64 bytes.
type sqe struct {
	opcode, flags uint8
	ioprio        uint16
	fd            int32
	off, addr     uint64
	len, rwFlags  uint32
	userData      uint64
	_             [3]uint64
}

// cqe is struct io_uring_cqe.
type cqe struct {
	userData uint64
	res      int32
	flags    uint32
}

// probe is struct io_uring_probe with room for all operations.
type probe struct {
	lastOp, opsLen uint8
	_              uint16
	_              [3]uint32
	ops            [256]struct {
		op, _ uint8
		flags uint16
		_     uint32
	}
}

// kernel is the three system calls; tests replace them.
type kernel struct {
	setup    func(entries uint32, p *params) (fd int, err error)
	register func(fd int, p *probe) error
	enter    func(fd int, submit, wait, flags uint32) (int, error)
}

var system = kernel{
	setup: func(entries uint32, p *params) (int, error) {
		fd, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, uintptr(entries), uintptr(unsafe.Pointer(p)), 0)
		if errno != 0 {
			return -1, errno
		}
		return int(fd), nil
	},
	register: func(fd int, p *probe) error {
		_, _, errno := unix.Syscall6(unix.SYS_IO_URING_REGISTER, uintptr(fd), registerProbe, uintptr(unsafe.Pointer(p)), uintptr(len(p.ops)), 0, 0)
		if errno != 0 {
			return errno
		}
		return nil
	},
	enter: func(fd int, submit, wait, flags uint32) (int, error) {
		n, _, errno := unix.Syscall6(unix.SYS_IO_URING_ENTER, uintptr(fd), uintptr(submit), uintptr(wait), uintptr(flags), 0, 0)
		if errno != 0 {
			return 0, errno
		}
		return int(n), nil
	},
}
