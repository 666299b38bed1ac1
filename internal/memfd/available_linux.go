package memfd

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Available is the kernel's estimate of the bytes that this process can still get: from
// the machine or one of its control groups (version 2 or 1), whichever has least. 0
// means unknown.
func Available() int64 { return available("/") }

func available(root string) int64 {
	least := number(root, "proc/meminfo", "MemAvailable:") << 10
	b, _ := os.ReadFile(filepath.Join(root, "proc/self/cgroup"))
	for line := range strings.Lines(string(b)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) != 3 {
			continue
		}
		mount, limit, used, idle := "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
		switch {
		case f[0] == "0" && f[1] == "":
		case strings.Contains(","+f[1]+",", ",memory,"):
			mount, limit, used, idle = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
		default:
			continue
		}
		// A group's parents bound it, too. In a container the path may be the host's and
		// not exist: then the mount's own files are the container's.
		for at := filepath.Join("/", f[2]); ; at = filepath.Dir(at) {
			group := filepath.Join(mount, at)
			if most := number(root, filepath.Join(group, limit), ""); most > 0 {
				// The kernel gives up file pages that were not used lately first.
				room := most - number(root, filepath.Join(group, used), "") + number(root, filepath.Join(group, "memory.stat"), idle+" ")
				least = min(least, max(room, 1))
			}
			if at == "/" {
				break
			}
		}
	}
	return least
}

// number is the one that follows prefix at the beginning of a line; 0 if there is none,
// as in "max".
func number(root, name, prefix string) int64 {
	b, err := os.ReadFile(filepath.Join(root, name))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, prefix); ok {
			n, _ := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			return n
		}
	}
	return 0
}
