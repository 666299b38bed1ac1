package cpu

import (
	"encoding/binary"
	"fmt"
	"runtime"

	"github.com/klauspost/cpuid/v2"
)

// numerics is Numerics, marked where KV bytes lie in the other byte order.
func numerics() string {
	if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
		return Numerics + "-be"
	}
	return Numerics
}

func device() string {
	name := cpuid.CPU.BrandName
	if name == "" {
		name = runtime.GOARCH
	}
	return fmt.Sprintf("%s, %d CPUs", name, runtime.NumCPU())
}
