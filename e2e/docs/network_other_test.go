//go:build !linux

package docs

import "errors"

// ownNetwork is Linux's alone.
func ownNetwork() error { return errors.ErrUnsupported }
