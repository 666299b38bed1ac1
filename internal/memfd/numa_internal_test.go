//go:build linux

package memfd

import (
	"os"
	"slices"
	"testing"
)

func TestPolicy(t *testing.T) {
	sys := map[string]string{
		"/sys/devices/system/node/online":        "0-2\n",
		"/sys/devices/system/node/node0/cpulist": "0-1,4\n",
		"/sys/devices/system/node/node1/cpulist": "2-3\n",
		"/sys/devices/system/node/node2/cpulist": "\n", // memory only
	}
	nodes := numaNodes(func(p string) ([]byte, error) {
		if s, ok := sys[p]; ok {
			return []byte(s), nil
		}
		return nil, os.ErrNotExist
	})
	if len(nodes) != 2 || !slices.Equal(nodes[0].cpus, []int{0, 1, 4}) || !slices.Equal(nodes[1].cpus, []int{2, 3}) {
		t.Fatalf("nodes %+v", nodes)
	}
	f := func(name string, cpus []int, mode int, mask uint64) {
		t.Helper()
		m, k := policy(nodes, func(c int) bool { return slices.Contains(cpus, c) })
		if m != mode || k != mask {
			t.Errorf("%s: mode %d mask %b, want %d %b", name, m, k, mode, mask)
		}
	}
	f("bound to one node", []int{2, 3}, mpolPreferred, 0b10)
	f("over both", []int{1, 2}, mpolInterleave, 0b11)
	f("unknown CPUs", []int{99}, mpolPreferred, 0)
}
