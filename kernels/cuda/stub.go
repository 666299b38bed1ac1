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

// Ranks is never made in a build without cgo.
type Ranks struct{ kernels.Backend }

// Open fails: this build cannot open libraries.
func Open(a arch.Config, w kernels.Weights, opt Options) (kernels.Backend, error) {
	_, err := New(a, w, opt)
	return nil, err
}

// NewRanks fails: this build cannot open libraries.
func NewRanks(a arch.Config, w kernels.Weights, opt Options) (*Ranks, error) {
	_, err := New(a, w, opt)
	return nil, err
}

// NewRandomRanks fails: this build cannot open libraries.
func NewRandomRanks(a arch.Config, _ uint64, opt Options) (*Ranks, error) {
	return NewRanks(a, kernels.Weights{}, opt)
}
