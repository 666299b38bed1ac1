//go:build cgo && linux

package cuda

/*
#include "api.h"
*/
import "C"

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/xpyd/xpyd/internal/hostfile"
)

const (
	maxChoices    = 1 << 20     // bytes of a file
	othersMeasure = time.Minute // another process may measure for so long
)

// recall takes the projections' choices from the file that another process has left for the
// same device, library and shape. If there is none, this process is the one to measure, and
// keep writes the file. A folder that cannot be used only means that it measures.
func (b *Backend) recall() (keep func(started bool)) {
	nothing := func(bool) {}
	if !b.opt.Tune || b.opt.Choices == "" {
		return nothing
	}
	var key C.uint64_t
	if err := b.lib.call("xk_choices_key", func() C.int32_t { return C.api_choices_key(b.lib.api, b.ctx, &key) }); err != nil {
		b.unkept(err)
		return nothing
	}
	path := filepath.Join(b.opt.Choices, fmt.Sprintf("%016x", uint64(key)))
	if b.read(path) {
		return nothing
	}
	if err := os.MkdirAll(b.opt.Choices, 0o700); err != nil {
		b.unkept(err)
		return nothing
	}
	ctx, cancel := context.WithTimeout(context.Background(), othersMeasure)
	defer cancel()
	unlock, err := hostfile.Lock(ctx, path+".lock")
	if err != nil {
		b.unkept(err)
		return nothing
	}
	if b.read(path) { // the other has written it
		unlock()
		return nothing
	}
	return func(started bool) {
		defer unlock()
		if !started {
			return
		}
		if err := b.write(path); err != nil {
			b.unkept(err)
		}
	}
}

func (b *Backend) unkept(err error) { b.choices = fmt.Sprintf("measured, not kept: %v", err) }

// Choices says where the choice of kernels for the projections comes from.
func (b *Backend) Choices() string { return b.choices }

// read reports whether a file has choices for this backend, and takes them.
func (b *Backend) read(path string) bool {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return false
	}
	defer f.Close()
	var st unix.Stat_t
	if unix.Fstat(int(f.Fd()), &st) != nil || int(st.Uid) != os.Geteuid() {
		return false
	}
	data, err := io.ReadAll(io.LimitReader(f, maxChoices))
	if err != nil || len(data) == 0 {
		return false
	}
	err = b.lib.call("xk_choices_set", func() C.int32_t {
		return C.api_choices_set(b.lib.api, b.ctx, unsafe.Pointer(&data[0]), C.int64_t(len(data)))
	})
	if err == nil {
		b.choices = "from " + path
	}
	return err == nil
}

// write puts this backend's choices into a file, by rename.
func (b *Backend) write(path string) error {
	data, n := make([]byte, maxChoices), C.int64_t(0)
	err := b.lib.call("xk_choices_get", func() C.int32_t {
		return C.api_choices_get(b.lib.api, b.ctx, unsafe.Pointer(&data[0]), maxChoices, &n)
	})
	if err != nil {
		return err
	}
	if err := hostfile.Write(path, data[:n]); err != nil {
		return err
	}
	b.choices = "measured, kept in " + path
	return nil
}
