//go:build unix

package tier

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// private reports an error for a folder in which another user could put KV of his
// own: digests tell what is corrupt, not what is forged.
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
	return keeps(dir)
}

// keeps reports an error for a folder whose parent lets another user put one of his
// own in its place.
func keeps(dir string) error {
	real, err := filepath.EvalSymlinks(dir)
	if err == nil {
		real, err = filepath.Abs(real)
	}
	if err != nil {
		return err
	}
	parent := filepath.Dir(real)
	info, err := os.Stat(parent)
	if err != nil {
		return err
	}
	others := os.FileMode(0o002)
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		if uid := int(st.Uid); uid != 0 && uid != os.Geteuid() {
			return fmt.Errorf("%s is in %s, which belongs to uid %d, not to %d, as whom this runs: name another folder", dir, parent, uid, os.Geteuid())
		}
		if int(st.Gid) != os.Getegid() {
			others = 0o022
		}
	}
	if mode := info.Mode(); mode.Perm()&others != 0 && mode&os.ModeSticky == 0 {
		return fmt.Errorf("%s is in %s, in which others may rename it (mode %#o): name a folder in a place that is this user's, or root's", dir, parent, mode.Perm())
	}
	return nil
}
