package datadir_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/datadir"
)

// TestKept: no folder above is one in which another user could put his own in the place
// of what he does not like, however far up and behind whatever link.
func TestKept(t *testing.T) {
	base := t.TempDir()
	top, low := filepath.Join(base, "top"), filepath.Join(base, "top", "mid", "low")
	if err := os.MkdirAll(low, 0o700); err != nil {
		t.Fatal(err)
	}
	data := filepath.Join(low, "data")
	may := func(dir string, mode fs.FileMode) {
		t.Helper()
		if err := os.Chmod(dir, mode); err != nil {
			t.Fatal(err)
		}
	}
	link := func(to, path string) string {
		t.Helper()
		if err := os.Symlink(to, path); err != nil {
			t.Fatal(err)
		}
		return path
	}
	accepted := func(path string) {
		t.Helper()
		if err := datadir.Kept(path); err != nil {
			t.Error(err)
		}
		d, err := datadir.Own(path)
		if err != nil {
			t.Error(err)
			return
		}
		d.Close()
	}
	none := func(path string) { // it was not made
		t.Helper()
		if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v", path, err)
		}
	}
	other := filepath.Join(base, "other")
	if err := os.Mkdir(other, 0o700); err != nil {
		t.Fatal(err)
	}
	through := link("../top/mid/", filepath.Join(other, "through"))
	there := filepath.Join(low, "there")
	if err := os.Mkdir(there, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{low, top} {
		may(dir, 0o777)
		words := []string{" is in " + dir + ", in which others may rename it (mode 0777): run `chmod go-w " + dir + "`", "--data"}
		refused(t, there, words...)
		refused(t, filepath.Join(through, "low", "there"), words...)
		if _, err := datadir.Own(data); err == nil || !strings.Contains(err.Error(), words[0]) {
			t.Error(err)
		}
		if _, err := datadir.Open(data); !errors.Is(err, fs.ErrNotExist) { // there is nothing to believe
			t.Error(err)
		}
		none(data)
		may(dir, 0o777|fs.ModeSticky) // as /tmp
		accepted(data)
		may(dir, 0o755)
		accepted(data)
		accepted(filepath.Join(through, "low", "data"))
	}
	may(other, 0o777)
	refused(t, filepath.Join(through, "low", "there"), " is in "+other)
	may(other, 0o700)
	if err := datadir.Kept(filepath.Join(link("loop", filepath.Join(base, "loop")), "x")); err == nil {
		t.Error("links without end")
	}
	if os.Geteuid() != 0 {
		t.Log("not root: no folder can be given to another user")
		return
	}
	if err := os.Chown(top, stranger, stranger); err != nil {
		t.Fatal(err)
	}
	refused(t, there, " is in "+top+", which belongs to uid 65534, not to 0", "--data")
	if err := errors.Join(os.Chown(top, 0, stranger), os.Chmod(top, 0o775)); err != nil {
		t.Fatal(err)
	}
	refused(t, there, "mode 0775")
	if err := errors.Join(os.Chown(top, 0, 0), os.Lchown(through, stranger, stranger)); err != nil {
		t.Fatal(err)
	}
	accepted(there) // our own group is ours alone
	refused(t, filepath.Join(through, "low", "there"), "the symbolic link "+through+", which belongs to uid 65534")
}
