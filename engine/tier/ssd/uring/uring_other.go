//go:build !linux

package uring

import (
	"context"
	"errors"
	"fmt"
	"os"
)

// Ring is none on this system.
type Ring struct{}

// File is never made.
type File struct{ *os.File }

// Open returns ErrUnavailable.
func Open(int) (*Ring, error) { return nil, fmt.Errorf("%w: not Linux", ErrUnavailable) }

// File returns an error.
func (*Ring) File(*os.File) (*File, error) { return nil, errors.ErrUnsupported }

// Close does nothing.
func (*Ring) Close(context.Context) error { return nil }

// Stats are none.
func (*Ring) Stats() Stats { return Stats{} }
