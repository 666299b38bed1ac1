package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/internal/figures"
)

func TestMain(m *testing.M) { os.Exit(cluster.Main(m)) }

// TestOnCPU runs between two workers on the CPU that share memory: every reply is the computed
// one, the figures are recorded, and nothing is left behind.
func TestOnCPU(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	binary := cluster.Binary(t)
	if err := run(t.Context(), []string{"peer", "-xpyd", binary, "-rounds", "2", "-rest", "0s", "-out", dir}, t.Output()); err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(filepath.Join(dir, "results/hicache.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	var list []figures.Figure
	for line := range strings.Lines(string(raw)) {
		var f figures.Figure
		if err := json.Unmarshal([]byte(line), &f); err != nil {
			t.Fatal(err)
		}
		list = append(list, f)
	}
	if len(list) != 2 || list[0].Name != "hicache.peer_ttft_ratio.cpu" || list[1].Name != "hicache.peer_ttft_ms.cpu" || list[0].Runs != 2 ||
		list[0].Value <= 0 || list[1].PeerValue <= 0 || !strings.Contains(list[0].Spread, "giver shm; 2 of 2 answers as computed") {
		t.Errorf("%s", raw)
	}
	if list[0].Command != "go run ./scripts/bench peer -rest 0s -rounds 2" {
		t.Errorf("command %q", list[0].Command)
	}
	if left, err := filepath.Glob(filepath.Join(dir, "xpyd-bench*")); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}
