package figures

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestBook(t *testing.T) {
	dir := t.TempDir()
	b, err := Open(dir, "unit", "make unit")
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
	logs, _ := filepath.Glob(filepath.Join(dir, "raw", "*-unit.log"))
	if len(logs) != 1 {
		t.Fatal(logs)
	}
	if text, err := os.ReadFile(logs[0]); err != nil || !bytes.Contains(text, []byte(": make unit\na run\n")) {
		t.Errorf("%v: %s", err, text)
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

// run is what one round came to.
type run float64

func (r run) String() string { return fmt.Sprintf("%g s", float64(r)) }

func TestCompare(t *testing.T) {
	dir := t.TempDir()
	b, err := Open(dir, "unit", "make unit")
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	runs, err := Compare(b.Logf, 3, [2]string{"on", "off"}, func(round int, way string) (run, error) {
		return run(map[string]int{"on": 1, "off": 2}[way] * (round + 1)), nil
	})
	if err != nil || len(runs[0]) != 3 || runs[0][2] != 3 || runs[1][2] != 6 {
		t.Fatalf("%v, %v", runs, err)
	}
	if err := b.Add(RatiosOf(Figure{Name: "unit.x", Unit: "ms"}, runs, func(r run) float64 { return 1000 * float64(r) })); err != nil {
		t.Fatal(err)
	}
	line, err := os.ReadFile(filepath.Join(dir, "results", "unit.jsonl"))
	if err != nil || !strings.Contains(string(line), `"value":2000,"unit":"ms","peer":"","peer_value":4000,"ratio":0.5`) {
		t.Errorf("%s, %v", line, err)
	}
	logs, err := filepath.Glob(filepath.Join(dir, "raw", "*"))
	if err != nil || len(logs) != 1 {
		t.Fatal(logs, err)
	}
	if raw, err := os.ReadFile(logs[0]); err != nil || !strings.Contains(string(raw), "round 1, on: 1 s\nround 1, off: 2 s\nround 2, on: 2 s\n") {
		t.Errorf("%s, %v", raw, err)
	}
	broken := errors.New("broken")
	if _, err := Compare(b.Logf, 1, [2]string{}, func(int, string) (run, error) { return 0, broken }); err != broken {
		t.Errorf("%v", err)
	}
}

func TestQuantiles(t *testing.T) {
	v := []float64{3, 1, 2, 4}
	if m, q := Median(v), Quantile(v, 0.99); m != 2.5 || q != 4 || v[0] != 3 {
		t.Errorf("median %v, p99 %v of %v", m, q, v)
	}
}

// TestMedianWithin: the ranks of the sign test's tables.
func TestMedianWithin(t *testing.T) {
	for n, want := range map[int][2]float64{1: {0, 0}, 5: {0, 4}, 6: {0, 5}, 9: {1, 7}, 20: {5, 14}, 25: {7, 17}} {
		v := make([]float64, n)
		for i := range v {
			v[i] = float64((i*7 + 3) % n) // in another order; 7 divides none of them
		}
		if low, high := MedianWithin(v); low != want[0] || high != want[1] {
			t.Errorf("of %d: %v to %v, want %v", n, low, high, want)
		}
	}
}
