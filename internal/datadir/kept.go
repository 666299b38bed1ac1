package datadir

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// maxLinks is how many symbolic links a path may lead through, as in Linux.
const maxLinks = 40

// Kept returns an error if another user could put something of his own in path's place. It walks
// the path as the kernel does: each folder and link on it must be ours or root's, and no folder
// may be writable by others, unless sticky like /tmp. What does not exist yet is fine.
func Kept(path string) error {
	path, err := filepath.Abs(path)
	if err != nil {
		return err
	}
	links := 0
	at, names := "/", strings.Split(path, "/")
	for len(names) > 0 {
		name := names[0]
		names = names[1:]
		switch name {
		case "", ".":
			continue
		case "..":
			at = filepath.Dir(at) // at has no links
			continue
		}
		if err := keeper(path, at); err != nil {
			return err
		}
		next := filepath.Join(at, name)
		info, err := os.Lstat(next)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		if info.Mode()&fs.ModeSymlink == 0 {
			at = next
			continue
		}
		if uid := Owner(info); !trusted(uid) {
			return fmt.Errorf("%s leads through the symbolic link %s, which belongs to uid %d, not to %d, as whom this runs, and may lead elsewhere tomorrow: choose another place", path, next, uid, os.Geteuid())
		}
		if links++; links > maxLinks {
			return fmt.Errorf("%s: %w", path, syscall.ELOOP)
		}
		to, err := os.Readlink(next)
		if err != nil {
			return err
		}
		if filepath.IsAbs(to) {
			at = "/"
		}
		names = append(strings.Split(to, "/"), names...)
	}
	return nil
}

func trusted(uid int) bool { return uid == 0 || uid == os.Geteuid() }

// keeper returns an error for a folder in which another user may rename files.
func keeper(path, dir string) error {
	info, err := os.Stat(dir)
	if err != nil {
		return err
	}
	if uid := Owner(info); !trusted(uid) {
		return fmt.Errorf("%s is in %s, which belongs to uid %d, not to %d, as whom this runs: that user could put another in its place; choose a place that is this user's, or root's",
			path, dir, uid, os.Geteuid())
	}
	others := fs.FileMode(0o022)
	if s, ok := info.Sys().(*syscall.Stat_t); ok && int(s.Gid) == os.Getegid() { // our own group may write, as some umasks allow
		others = 0o002
	}
	if mode := info.Mode(); mode.Perm()&others != 0 && mode&fs.ModeSticky == 0 {
		return fmt.Errorf("%s is in %s, in which others may rename it (mode %#o): run `chmod go-w %s`, or choose a place that is this user's, or root's",
			path, dir, mode.Perm(), dir)
	}
	return nil
}
