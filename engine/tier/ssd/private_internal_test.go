//go:build unix

package ssd

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/engine/tier/level"
)

// TestPrivate: KV that another user may have put there is not loaded. A folder
// that was made beforehand, as everybody can in /tmp, is refused by its owner or
// its mode, also behind a link.
func TestPrivate(t *testing.T) {
	refuses := func(dir, want string) {
		t.Helper()
		l, err := Config{Dir: dir, Bytes: 512 << 10}.Open(t.Context(), env(t))
		var setting *level.SettingError
		if !errors.As(err, &setting) || setting.Setting != SettingDir || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", dir, err, want)
		}
		if err == nil {
			_ = l.Close(t.Context())
		}
	}
	made := filepath.Join(t.TempDir(), "made")
	if err := os.Mkdir(made, 0o700); err != nil {
		t.Fatal(err)
	}
	may := func(mode os.FileMode) {
		t.Helper()
		if err := os.Chmod(made, mode); err != nil {
			t.Fatal(err)
		}
	}
	may(0o777)
	refuses(made, "0777")
	if os.Geteuid() != 0 {
		t.Log("not root: a folder of another user cannot be made")
		return
	}
	if err := os.Chown(made, 0, 65534); err != nil {
		t.Fatal(err)
	}
	may(0o770)
	refuses(made, "0770")
	may(0o700)
	if err := os.Chown(made, 65534, 65534); err != nil {
		t.Fatal(err)
	}
	refuses(made, "uid 65534")
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(made, link); err != nil {
		t.Fatal(err)
	}
	refuses(link, "uid 65534")
	if names, err := os.ReadDir(made); err != nil || len(names) > 0 {
		t.Errorf("something was put there: %v %v", names, err)
	}
}

// TestPrivateParent: a folder that another user could replace is refused, too.
func TestPrivateParent(t *testing.T) {
	parent := t.TempDir()
	leaf := filepath.Join(parent, "leaf")
	if err := os.Mkdir(leaf, 0o700); err != nil {
		t.Fatal(err)
	}
	f := func(mode os.FileMode, want string) {
		t.Helper()
		if err := os.Chmod(parent, mode); err != nil {
			t.Fatal(err)
		}
		if err := private(leaf); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v, want %q", mode, err, want)
		}
	}
	f(0o755, "")
	f(0o777, "may rename it")
	f(0o777|os.ModeSticky, "") // as /tmp
	low := filepath.Join(leaf, "low")
	if err := os.Mkdir(low, 0o700); err != nil {
		t.Fatal(err)
	}
	leaf = low
	f(0o777, "may rename it") // however far up
	f(0o755, "")
	if os.Geteuid() != 0 {
		t.Log("not root: a folder of another user cannot be made")
		return
	}
	if err := os.Chown(parent, 65534, 65534); err != nil {
		t.Fatal(err)
	}
	f(0o755, "belongs to uid 65534")
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(leaf, link); err != nil {
		t.Fatal(err)
	}
	leaf = link
	f(0o755, "belongs to uid 65534")
}
