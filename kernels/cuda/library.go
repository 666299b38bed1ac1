//go:build cgo && linux

package cuda

/*
#cgo LDFLAGS: -ldl
#include "api.h"
#include <stdlib.h>
*/
import "C"

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"unsafe"

	"github.com/xpyd/xpyd/kernels"
)

const libraryName = "libxpyd_cuda.so"

// library is the opened .so. It is never closed: CUDA does not unload cleanly.
type library struct{ api *C.xk_api }

// candidates lists where to look for the library: only path, if that is given.
func candidates(path string) []string {
	if path == "" {
		path = os.Getenv(LibraryEnv)
	}
	if path != "" {
		return []string{path}
	}
	var list []string
	if self, err := os.Executable(); err == nil {
		if at := filepath.Join(filepath.Dir(self), libraryName); exists(at) {
			list = append(list, at)
		}
	}
	return append(list, libraryName)
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func openLibrary(path string) (*library, error) {
	var errs []error
	list := candidates(path)
	for _, p := range list {
		lib, err := openAt(p)
		if err == nil {
			return lib, nil
		}
		if len(list) == 1 || !errors.Is(err, ErrAbsent) { // a library that was found but failed is the reason
			errs = append(errs, err)
		}
	}
	return nil, fmt.Errorf("%w: %w", ErrUnavailable, errors.Join(errs...))
}

func openAt(path string) (*library, error) {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	api := (*C.xk_api)(C.calloc(1, C.sizeof_xk_api))
	if msg := C.api_open(name, api); msg != nil {
		defer C.free(unsafe.Pointer(msg))
		C.free(unsafe.Pointer(api))
		err := errors.New(C.GoString(msg))
		if strings.HasPrefix(err.Error(), libraryName+": cannot open shared object file: No such file") { // dlopen gives no other sign
			err = fmt.Errorf("%w: %w", ErrAbsent, err)
		}
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	return &library{api}, nil
}

// call turns a status into an error. The library keeps its message by thread, so f and the
// look at the message stay on one. ErrLate comes without a message: pollers see it often.
func (l *library) call(name string, f func() C.int32_t) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	switch s := f(); s {
	case C.XK_OK:
		return nil
	case C.XK_LATE:
		return kernels.ErrLate
	default:
		return &kernels.Error{Call: name, Code: int(s), Err: errors.New(C.GoString(C.api_last_error(l.api)))}
	}
}

func (l *library) device(ordinal int) (C.xk_device, error) {
	var d C.xk_device
	err := l.call("xk_device_info", func() C.int32_t { return C.api_device_info(l.api, C.int32_t(ordinal), &d) })
	if err != nil {
		err = fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	return d, err
}
