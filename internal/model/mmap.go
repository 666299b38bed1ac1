package model

import (
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// mapping is a file's bytes, for reading only. A file that shrinks while it
// is mapped kills the reader (SIGBUS): weights are replaced by rename, never
// rewritten in place.
type mapping struct {
	path    string // absolute, links resolved; "" for embedded bytes
	data    []byte
	modTime time.Time
	mapped  bool // else data is on the heap
}

// mapFile maps a file that is not empty.
func mapFile(path string) (*mapping, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) // a pipe is refused, not waited for
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("%s: not a regular file", path)
	}
	if st.Size() == 0 {
		return nil, fmt.Errorf("%s: empty file", path)
	}
	if int64(int(st.Size())) != st.Size() {
		return nil, fmt.Errorf("%s: %d bytes do not fit this machine's address space", path, st.Size())
	}
	data, err := unix.Mmap(int(f.Fd()), 0, int(st.Size()), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %s: %w", path, err)
	}
	return &mapping{path: resolve(path), data: data, modTime: st.ModTime(), mapped: true}, nil
}

// resolve makes a path absolute and follows links, as far as possible.
func resolve(path string) string {
	if p, err := filepath.Abs(path); err == nil {
		path = p
	}
	if p, err := filepath.EvalSymlinks(path); err == nil {
		path = p
	}
	return path
}

func (m *mapping) close() (err error) {
	if m.mapped {
		if err = unix.Munmap(m.data); err != nil {
			err = fmt.Errorf("unmap %s: %w", m.path, err)
		}
	}
	m.data, m.mapped = nil, false
	return err
}
