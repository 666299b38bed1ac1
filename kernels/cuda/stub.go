//go:build !cgo || !linux

package cuda

import (
	"fmt"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
)

// Backend is never made in a build without cgo.
type Backend struct{ kernels.Backend }

// NewRandom fails: this build cannot open libraries.
func NewRandom(a arch.Config, _ uint64, opt Options) (*Backend, error) {
	return New(a, kernels.Weights{}, opt)
}

// New fails: this build cannot open libraries.
func New(arch.Config, kernels.Weights, Options) (*Backend, error) {
	return nil, fmt.Errorf("%w: %w: xpyd was built without cgo", ErrUnavailable, ErrAbsent)
}
