package kernels

// EachSIMD calls f under every instruction set that this machine has.
func EachSIMD(f func(name string)) {
	a, b := useAVX512, useAVX2
	defer func() { useAVX512, useAVX2 = a, b }()
	if a {
		f("avx512")
	}
	useAVX512 = false
	if b {
		f("avx2")
	}
	useAVX2 = false
	f("portable")
}
