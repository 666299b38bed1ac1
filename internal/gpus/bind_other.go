//go:build !linux

package gpus

// Bind does nothing: GPUs are used on Linux.
func Bind([]int) (bool, error) { return false, nil }
