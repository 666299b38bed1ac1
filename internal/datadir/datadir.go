// Package datadir is the folder that a router owns, with its secrets and addresses. Only this user
// may read it or have put it there; any other folder is refused, with advice. Symbolic links in it
// are never followed.
package datadir

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"time"
)

// maxFile bounds what is read: these files are a line or two.
const maxFile = 64 << 10

// Dir is a folder that is this user's alone.
type Dir struct {
	path string
	root *os.Root // the folder that was checked, even if another is put in its place
	lock *os.File // nil if only opened
	made bool
	lent atomic.Bool // another process holds the lock too, and the folder is that one's
}

// Default is the default folder: XPYD_DATA, else below XDG_RUNTIME_DIR, XDG_STATE_HOME,
// ~/.local/state or, without a home, the folder for temporary files.
func Default() string {
	if d := os.Getenv("XPYD_DATA"); d != "" {
		return d
	}
	for _, of := range []struct{ env, below string }{{"XDG_RUNTIME_DIR", ""}, {"XDG_STATE_HOME", ""}, {"HOME", ".local/state"}} {
		if d := os.Getenv(of.env); filepath.IsAbs(d) {
			return filepath.Join(d, of.below, "xpyd")
		}
	}
	return filepath.Join(os.TempDir(), fmt.Sprintf("xpyd-%d", os.Geteuid()))
}

// words are what a refusal calls a folder, and by which settings another is chosen.
type words struct{ folder, setting, settings string }

var ofData = words{"data folder", "--data", "--data or XPYD_DATA"}

// Open opens a folder for reading. The error is fs.ErrNotExist if there is none.
func Open(path string) (*Dir, error) { return open(path, ofData) }

// OpenAs is Open of a folder for something else, which a setting names.
func OpenAs(path, setting string) (*Dir, error) {
	return open(path, words{"folder", setting, setting})
}

func open(path string, w words) (*Dir, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	info, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	if err := w.mine(path, info); err != nil {
		return nil, err
	}
	if err := w.kept(path); err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(path)
	if err != nil {
		return nil, err
	}
	if there, err := root.Stat("."); err != nil || !os.SameFile(info, there) {
		root.Close()
		return nil, errors.Join(fmt.Errorf("%s %s: another was put in its place just now", w.folder, path), err)
	}
	return &Dir{path: path, root: root}, nil
}

// mine returns an error if a folder is not this user's alone.
func (w words) mine(path string, info fs.FileInfo) error {
	if info.Mode()&fs.ModeSymlink != 0 {
		return fmt.Errorf("%s %s is a symbolic link, which is not followed: name the folder that it leads to", w.folder, path)
	}
	if !info.IsDir() {
		return fmt.Errorf("%s %s is not a folder: choose another with %s", w.folder, path, w.setting)
	}
	if uid := Owner(info); uid != os.Geteuid() {
		return fmt.Errorf("%s %s belongs to uid %d (mode %04o), and this is uid %d: secrets in it would be theirs; choose another with %s, or have it removed",
			w.folder, path, uid, info.Mode().Perm(), os.Geteuid(), w.settings)
	}
	if info.Mode().Perm()&0o077 != 0 {
		advice := "choose another with " + w.setting
		if ours(path) {
			advice = fmt.Sprintf("run `chmod 700 %s`, or %s", path, advice)
		}
		return fmt.Errorf("%s %s has mode %04o, so that others may look into it: %s", w.folder, path, info.Mode().Perm(), advice)
	}
	return nil
}

// ours reports whether a folder may be taken for a router's alone: it is empty, or a router has
// locked it. Nobody is told to close /tmp to others.
func ours(path string) bool {
	if _, err := os.Lstat(filepath.Join(path, fileLock)); err == nil {
		return true
	}
	there, err := os.ReadDir(path)
	return err == nil && len(there) == 0
}

// kept is Kept, with advice.
func (w words) kept(path string) error {
	if err := Kept(path); err != nil {
		return fmt.Errorf("%s %w, with %s", w.folder, err, w.settings)
	}
	return nil
}

// Owner is the uid that a file belongs to.
func Owner(info fs.FileInfo) int {
	if s, ok := info.Sys().(*syscall.Stat_t); ok {
		return int(s.Uid)
	}
	return -1
}

// fileLock is held by the router that owns the folder.
const fileLock = "lock"

// Own makes the folder, if there is none, and locks it until Close. It refuses a folder that
// another process has.
func Own(path string) (*Dir, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) { // else Open says what is wrong with it
		if err := ofData.kept(path); err != nil {
			return nil, err
		}
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, err
	}
	err = os.Mkdir(path, 0o700)
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	d, openErr := Open(path)
	if openErr != nil {
		return nil, openErr
	}
	d.made = err == nil
	if err := d.acquireLock(); err != nil {
		d.root.Close()
		return nil, err
	}
	return d, nil
}

// lookers is how long acquireLock waits for processes that only look (Taken).
const lookers = 200 * time.Millisecond

// acquireLock locks the folder, and checks that the lock file is still there, as the former owner
// removes it.
func (d *Dir) acquireLock() error {
	until := time.Now().Add(lookers)
	for range 100 {
		f, err := d.open(fileLock, os.O_CREATE|os.O_RDWR)
		if err != nil {
			return err
		}
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		for errors.Is(err, syscall.EWOULDBLOCK) && time.Now().Before(until) {
			time.Sleep(5 * time.Millisecond)
			err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		}
		if err != nil {
			f.Close()
			return fmt.Errorf("data: another xpyd uses %s; stop it, or choose another folder with --data", d.path)
		}
		held, err := f.Stat()
		named, errNamed := d.root.Lstat(fileLock)
		if err == nil && errNamed == nil && os.SameFile(held, named) {
			d.lock = f
			return nil
		}
		f.Close()
	}
	return fmt.Errorf("data folder %s: its lock is being replaced all the time", d.path)
}

// Inherit opens the folder whose lock another process holds and has given to this one, which owns it
// only from Take on. made is that process's Made.
func Inherit(path string, lock *os.File, made bool) (*Dir, error) {
	d, err := Open(path)
	if err != nil {
		return nil, err
	}
	held, err := lock.Stat()
	named, errNamed := d.root.Lstat(fileLock)
	if err = errors.Join(err, errNamed); err == nil && !os.SameFile(held, named) {
		err = fmt.Errorf("data folder %s: the lock that was given is another folder's", d.path)
	}
	if err != nil {
		d.root.Close()
		return nil, err
	}
	d.lock, d.made = lock, made
	d.lent.Store(true)
	return d, nil
}

// Lock is the lock file, for a process that is to Inherit the folder.
func (d *Dir) Lock() *os.File { return d.lock }

// Take makes this process the owner.
func (d *Dir) Take() { d.lent.Store(false) }

// Give makes the process that inherited the folder its owner: Close removes nothing.
func (d *Dir) Give() { d.lent.Store(true) }

// Taken reports whether a running process owns the folder.
func (d *Dir) Taken() (bool, error) {
	f, err := d.open(fileLock, os.O_RDONLY|syscall.O_NONBLOCK)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer f.Close() // and the lock with it
	switch err := syscall.Flock(int(f.Fd()), syscall.LOCK_SH|syscall.LOCK_NB); {
	case errors.Is(err, syscall.EWOULDBLOCK):
		return true, nil
	case err != nil:
		return false, fmt.Errorf("data folder %s: whether its %s is held: %w", d.path, fileLock, err)
	}
	return false, nil
}

// Path is the folder's absolute path.
func (d *Dir) Path() string { return d.path }

// Made reports whether Own made the folder.
func (d *Dir) Made() bool { return d.made }

// Read returns what Write wrote. The error is fs.ErrNotExist if there is no such file. It
// refuses a file that others own or may read.
func (d *Dir) Read(name string) ([]byte, error) {
	f, err := d.open(name, os.O_RDONLY|syscall.O_NONBLOCK)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	path := filepath.Join(d.path, name)
	if !info.Mode().IsRegular() || Owner(info) != os.Geteuid() || info.Mode().Perm()&0o077 != 0 {
		advice := "want a file of mode 0600 and this user's"
		if info.Mode().IsRegular() && Owner(info) == os.Geteuid() {
			advice = fmt.Sprintf("if nobody else has read or written it, run `chmod 600 %s`", path)
		}
		return nil, fmt.Errorf("%s is not believed: it has mode %v and belongs to uid %d, and this process is uid %d: %s", path, info.Mode(), Owner(info), os.Geteuid(), advice)
	}
	text, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(text) > maxFile {
		err = fmt.Errorf("%s has more than %d bytes", path, maxFile)
	}
	return text, err
}

// open opens a file that is no symbolic link.
func (d *Dir) open(name string, flag int) (*os.File, error) {
	if info, err := d.root.Lstat(name); err == nil && info.Mode()&fs.ModeSymlink != 0 { // with a better error than opening it
		return nil, fmt.Errorf("%s is a symbolic link, which is not followed: remove it, or put the file itself in its place, with mode 0600", filepath.Join(d.path, name))
	}
	f, err := d.root.OpenFile(name, flag|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("data folder %s: %w", d.path, err)
	}
	return f, nil
}

// Write writes a file for this user's eyes only, whole or not at all. One process at a time writes a
// file: the folder's owner, or the command whose file it is.
func (d *Dir) Write(name string, text []byte) error {
	fresh := "." + name
	if err := d.root.Remove(fresh); err != nil && !errors.Is(err, fs.ErrNotExist) { // of a killed process
		return fmt.Errorf("data folder %s: %w", d.path, err)
	}
	f, err := d.root.OpenFile(fresh, os.O_WRONLY|os.O_CREATE|os.O_EXCL|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return fmt.Errorf("data folder %s: %w", d.path, err)
	}
	_, err = f.Write(text)
	if err = errors.Join(err, f.Sync(), f.Close()); err == nil {
		err = d.root.Rename(fresh, name)
	}
	if err != nil {
		return fmt.Errorf("data folder %s: %w", d.path, err)
	}
	return nil
}

// Remove removes a file, if it is there.
func (d *Dir) Remove(name string) error {
	if err := d.root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("data folder %s: %w", d.path, err)
	}
	return nil
}

// Close gives up the folder. It removes these files, and the folder if Own made it and it is empty.
// It may be called again, also concurrently.
func (d *Dir) Close(remove ...string) {
	if d.lock == nil {
		d.root.Close()
		return
	}
	if d.lent.Load() { // not unlocked either: the lock is one for both
		d.lock.Close()
		d.root.Close()
		return
	}
	for _, name := range remove {
		_ = d.root.Remove(name) // may be gone already
	}
	_ = d.root.Remove(fileLock)
	if d.made {
		_ = syscall.Rmdir(d.path) // what others put there stays
	}
	_ = syscall.Flock(int(d.lock.Fd()), syscall.LOCK_UN) // a child that was just forked may hold a copy
	d.lock.Close()
	d.root.Close()
}
