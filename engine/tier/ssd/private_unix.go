//go:build unix

package ssd

import (
	"fmt"
	"os"
	"syscall"

	"github.com/xpyd/xpyd/internal/datadir"
)

// private returns an error if another user could write to a folder: digests expose corrupt KV,
// not forged KV.
func private(dir string) error {
	info, err := os.Stat(dir)
	if err != nil {
		return err
	}
	others := os.FileMode(0o002)
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		if int(st.Uid) != os.Geteuid() {
			return fmt.Errorf("%s belongs to uid %d, not to %d, as whom this runs: name a folder that it makes itself", dir, st.Uid, os.Geteuid())
		}
		if int(st.Gid) != os.Getegid() { // our own group is ours alone where umask lets it write
			others = 0o022
		}
	}
	if mode := info.Mode().Perm(); mode&others != 0 {
		return fmt.Errorf("%s can be written to by others (mode %#o): chmod 700 %s, or name a folder inside it", dir, mode, dir)
	}
	return datadir.Kept(dir)
}
