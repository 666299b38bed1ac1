package main

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/xpyd/xpyd/e2e/cluster"
)

func TestMain(m *testing.M) { os.Exit(cluster.Main(m)) }

// TestCurrent: docs/reference is what the code makes now.
func TestCurrent(t *testing.T) {
	pages, err := render(cluster.Binary(t), "../../configs/samples")
	if err != nil {
		t.Fatal(err)
	}
	const folder = "../../docs/reference"
	files, err := filepath.Glob(folder + "/*")
	if err != nil || len(files) != len(pages) {
		t.Errorf("%d pages, and %q, %v", len(pages), files, err)
	}
	for name, want := range pages {
		got, err := os.ReadFile(filepath.Join(folder, name))
		if err != nil || string(got) != want {
			t.Errorf("%s is not current (%v): run make reference", name, err)
		}
	}
}

func TestParse(t *testing.T) {
	got := parse("# The file.\n\n# Where.\n#listen: \"\"\n# Two of\n# them.\n#a: 1\n#b: [x, y]\n# A part.\npick:\n  # How.\n  #policy: p\n  breaker:\n    #open: 1s\n\nlog:\n  # a | b\n  #level: info\n")
	want := []key{
		{"listen", "`\"\"`", "Where."}, {"a", "`1`", "Two of them."}, {"b", "`[x, y]`", "as above"},
		{"pick.…", "", "A part."}, {"pick.policy", "`p`", "How."}, {"pick.breaker.open", "`1s`", ""}, {"log.level", "`info`", `a \| b`},
	}
	if !slices.Equal(got, want) {
		t.Errorf("%q\nwant\n%q", got, want)
	}
}
