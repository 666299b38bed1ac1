package memfd

import (
	"fmt"
	"math/bits"
	"os"
	"slices"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Memory policies of mbind(2).
const (
	mpolPreferred  = 1
	mpolInterleave = 3
)

// place asks for the pages of b on the nodes that this process computes on:
// its one node if it is bound to one, else evenly over its nodes, as its
// threads will read them. On a machine with one node there is nothing to ask.
// Everything here is a hint: a failure costs speed, not correctness.
func place(b []byte) {
	nodes := numaNodes(os.ReadFile)
	if len(nodes) < 2 {
		return
	}
	var mine unix.CPUSet
	if unix.SchedGetaffinity(0, &mine) != nil {
		return
	}
	mode, mask := policy(nodes, mine.IsSet)
	if mask == 0 {
		return
	}
	_, _, _ = unix.Syscall6(unix.SYS_MBIND, uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)),
		uintptr(mode), uintptr(unsafe.Pointer(&mask)), 64, 0)
}

// node is one NUMA node with its CPUs.
type node struct {
	id   int
	cpus []int
}

// policy chooses among the nodes that have a usable CPU.
func policy(nodes []node, usable func(cpu int) bool) (mode int, mask uint64) {
	for _, n := range nodes {
		if n.id < 64 && slices.ContainsFunc(n.cpus, usable) {
			mask |= 1 << n.id
		}
	}
	if bits.OnesCount64(mask) > 1 {
		return mpolInterleave, mask
	}
	return mpolPreferred, mask
}

// numaNodes lists the nodes that have CPUs; nil when the kernel does not say.
func numaNodes(read func(string) ([]byte, error)) []node {
	const root = "/sys/devices/system/node/"
	online, err := read(root + "online")
	if err != nil {
		return nil
	}
	var nodes []node
	for _, id := range parseList(string(online)) {
		cpus, err := read(fmt.Sprintf("%snode%d/cpulist", root, id))
		if err != nil {
			continue
		}
		if list := parseList(string(cpus)); len(list) > 0 {
			nodes = append(nodes, node{id, list})
		}
	}
	return nodes
}

// maxListed bounds what one range of a kernel list may hold.
const maxListed = 1 << 16

// parseList reads the kernel's "0-3,8" lists; what it cannot read is left out.
func parseList(s string) []int {
	var out []int
	for part := range strings.SplitSeq(strings.TrimSpace(s), ",") {
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		lo, err1 := strconv.Atoi(first)
		hi, err2 := strconv.Atoi(last)
		if err1 != nil || err2 != nil || lo < 0 || hi-lo >= maxListed {
			continue
		}
		for i := lo; i <= hi; i++ {
			out = append(out, i)
		}
	}
	return out
}
