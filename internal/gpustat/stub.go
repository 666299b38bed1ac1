//go:build !cgo || !linux

package gpustat

import "fmt"

// Open fails: this build cannot open libraries.
func Open(string) (Device, error) {
	return nil, fmt.Errorf("%w: xpyd was built without cgo", ErrUnavailable)
}

// Cards fails: this build cannot open libraries.
func Cards() ([]Card, error) {
	return nil, fmt.Errorf("%w: xpyd was built without cgo", ErrUnavailable)
}
