package way_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/kvconn/local"
	"github.com/xpyd/xpyd/kvconn/way"
)

// TestMachine: a folder makes the same machine of all who see it, under whatever path, and
// another than the network namespace or any other folder does.
func TestMachine(t *testing.T) {
	folder, link := t.TempDir(), filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(folder, link); err != nil {
		t.Fatal(err)
	}
	here, shared := way.Machine(""), way.Machine(folder)
	if strings.Count(here, "/") != 2 || here != way.Machine("") {
		t.Fatalf("%q, then %q", here, way.Machine(""))
	}
	if shared != way.Machine(link) || shared == here || shared == way.Machine(t.TempDir()) {
		t.Errorf("folder %q, by a link %q, another %q, none %q", shared, way.Machine(link), way.Machine(t.TempDir()), here)
	}
	if none := way.Machine(filepath.Join(folder, "none")); none != "" {
		t.Errorf("a folder that is not there: %q", none)
	}
}

func TestCheckSockets(t *testing.T) {
	t.Chdir(t.TempDir())
	for name, mode := range map[string]os.FileMode{"good": 0o700, "open": 0o777, strings.Repeat("l", local.MaxFolder+1): 0o700} {
		if err := os.Mkdir(name, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(name, mode); err != nil {
			t.Fatal(err)
		}
		if err := way.CheckSockets(name); (err == nil) != (name == "good") {
			t.Errorf("%.5s: %v", name, err)
		}
	}
	if err := way.CheckSockets("none"); err == nil {
		t.Error("a folder that is not there")
	}
}
