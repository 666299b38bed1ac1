package figures

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestBook(t *testing.T) {
	dir := t.TempDir()
	b, err := Open(dir, "unit")
	if err != nil {
		t.Fatal(err)
	}
	b.Logf("a run")
	for _, ours := range [][]float64{{1, 1, 9}, {2, 4, 6}} {
		if err := b.Add(Figure{Name: "unit.x", Unit: "s"}.Ratios(ours, []float64{2, 2, 2})); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(filepath.Join(dir, "results", "unit.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	newest := map[string]Figure{}
	if err := Newest(newest, f); err != nil {
		t.Fatal(err)
	}
	g := newest["unit.x"]
	if here, err := Here(dir, "unit", "."); err != nil || len(here) != 1 || !here["unit.x"] {
		t.Errorf("of this commit: %v, %v", here, err)
	}
	if here, err := Here(dir, "other", "."); err != nil || len(here) != 0 {
		t.Errorf("nothing was measured: %v, %v", here, err)
	}
	if len(newest) != 1 || g.Value != 4 || g.PeerValue != 2 || g.Ratio != 2 || g.Runs != 3 || g.Commit == "" {
		t.Errorf("read %+v", newest)
	}
	if raw, err := os.ReadFile(g.Raw); err != nil || !strings.Contains(string(raw), "a run") {
		t.Errorf("log %q: %q, %v", g.Raw, raw, err)
	}
	if err := Newest(newest, strings.NewReader("{}\nx\n")); err == nil || !strings.Contains(err.Error(), "line 2") {
		t.Errorf("a line that is no object: %v", err)
	}
}

func TestQuantiles(t *testing.T) {
	v := []float64{3, 1, 2, 4}
	if m, q := Median(v), Quantile(v, 0.99); m != 2.5 || q != 4 || v[0] != 3 {
		t.Errorf("median %v, p99 %v of %v", m, q, v)
	}
}
