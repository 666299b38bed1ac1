package gpus

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
)

// NodeOf returns the NUMA node of a PCI device by sysfs (os.DirFS("/sys")); -1: the machine does
// not say.
func NodeOf(sys fs.FS, pci string) int {
	domain, rest, ok := strings.Cut(strings.ToLower(pci), ":")
	if !ok {
		return -1
	}
	domain = strings.TrimLeft(domain, "0")
	at := path.Join("bus/pci/devices", strings.Repeat("0", max(0, 4-len(domain)))+domain+":"+rest)
	text, err := fs.ReadFile(sys, path.Join(at, "numa_node"))
	if err != nil {
		return -1
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil || n < 0 {
		return -1
	}
	return n
}

// Near returns the CPUs of the NUMA nodes of these PCI devices, in order; none where that says
// nothing: a machine that has CPUs on one node only, or does not tell a device's node, or a node
// without CPUs.
func Near(sys fs.FS, pci ...string) ([]int, error) {
	const at = "devices/system/node"
	nodes, err := fs.Glob(sys, at+"/node[0-9]*")
	if err != nil || len(nodes) < 2 {
		return nil, err
	}
	cpus, withCPUs := map[int][]int{}, 0
	for _, dir := range nodes {
		n, err := strconv.Atoi(strings.TrimPrefix(path.Base(dir), "node"))
		if err != nil {
			continue
		}
		text, err := fs.ReadFile(sys, path.Join(dir, "cpulist"))
		if err != nil {
			return nil, err
		}
		if cpus[n], err = parseCPUs(string(text)); err != nil {
			return nil, fmt.Errorf("%s/cpulist: %w", dir, err)
		}
		if len(cpus[n]) > 0 {
			withCPUs++
		}
	}
	if withCPUs < 2 {
		return nil, nil
	}
	var near []int
	for _, p := range pci {
		n := NodeOf(sys, p)
		if n < 0 || len(cpus[n]) == 0 {
			return nil, nil
		}
		near = append(near, cpus[n]...)
	}
	slices.Sort(near)
	return slices.Compact(near), nil
}

// mostCPUs bounds a list of CPUs.
const mostCPUs = 1 << 16

var errCPUs = errors.New("not a list of CPUs")

// parseCPUs reads the kernel's "0-3,8,10-11".
func parseCPUs(text string) (list []int, err error) {
	text = strings.TrimSpace(text)
	if text == "" {
		return nil, nil
	}
	for part := range strings.SplitSeq(text, ",") {
		first, last, isRange := strings.Cut(part, "-")
		from, err := strconv.ParseUint(first, 10, 16)
		to := from
		if err == nil && isRange {
			to, err = strconv.ParseUint(last, 10, 16)
		}
		if err != nil || to < from || len(list)+int(to-from) >= mostCPUs {
			return nil, errCPUs
		}
		for n := from; n <= to; n++ {
			list = append(list, int(n))
		}
	}
	return list, nil
}
