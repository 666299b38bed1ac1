//go:build !amd64

package kernels

// EachSIMD calls f under every instruction set that this machine has.
func EachSIMD(f func(name string)) { f("portable") }
