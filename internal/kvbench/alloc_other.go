//go:build unix && !linux

package kvbench

func adviseHuge([]byte) {}
