package uring

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// File is a file that is read and written through a ring. It may be closed before or after the ring.
type File struct {
	ring *Ring
	f    *os.File
	conn syscall.RawConn
}

// most is what one transfer may move; the kernel's own bound is just below 2 GiB.
const most = 1 << 30

// File takes over a file.
func (r *Ring) File(f *os.File) (*File, error) {
	conn, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	return &File{r, f, conn}, nil
}

// ReadAt fills b; io.EOF: the file ended before.
func (f *File) ReadAt(b []byte, off int64) (int, error) {
	return f.move(opRead, b, off, "read", f.f.ReadAt, io.EOF)
}

// WriteAt writes all of b.
func (f *File) WriteAt(b []byte, off int64) (int, error) {
	return f.move(opWrite, b, off, "write", f.f.WriteAt, io.ErrShortWrite)
}

// Close closes the file.
func (f *File) Close() error { return f.f.Close() }

func (f *File) move(opcode uint8, b []byte, off int64, verb string, direct func([]byte, int64) (int, error), none error) (n int, err error) {
	for n < len(b) {
		m, refused, err := f.ring.do(opcode, f.conn.Control, b[n:min(len(b), n+most)], off+int64(n))
		switch {
		case errors.Is(refused, os.ErrClosed):
			return n, &fs.PathError{Op: verb, Path: f.f.Name(), Err: os.ErrClosed}
		case errors.Is(err, unix.ECANCELED):
			return n, &fs.PathError{Op: verb, Path: f.f.Name(), Err: ErrClosed}
		case errors.Is(err, unix.EINTR):
			continue
		case refused != nil, errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINVAL), errors.Is(err, unix.EOPNOTSUPP):
			// Whether the ring or the file is the reason, pread or pwrite will show.
			f.ring.direct.Add(1)
			m, err := direct(b[n:], off+int64(n))
			return n + m, err
		case err != nil:
			return n, &fs.PathError{Op: verb, Path: f.f.Name(), Err: err}
		case m == 0:
			return n, none
		}
		n += m
	}
	return n, nil
}
