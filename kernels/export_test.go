package kernels

// DigestKey and DigestTable expose the schedule to tests.
func DigestKey(i int) uint64   { return digestKey(i) }
func DigestTable(i int) uint64 { return digestKeys[i] }
