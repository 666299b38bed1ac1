package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestGuards: every expression of ../mutate-kv.txt still changes its file, or scripts/mutate-kv
// would find the guard gone only when somebody runs it.
func TestGuards(t *testing.T) {
	text, err := os.ReadFile("../mutate-kv.txt")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		f := strings.SplitN(line, " | ", 5)
		if strings.HasPrefix(line, "#") || strings.TrimSpace(line) == "" {
			continue
		}
		if len(f) != 5 {
			t.Errorf("not five fields: %s", line)
			continue
		}
		file, err := os.ReadFile(filepath.Join("../..", strings.TrimSpace(f[1])))
		if err != nil {
			t.Error(err)
			continue
		}
		sed := exec.Command("sed", strings.TrimSpace(f[2]))
		sed.Stdin = bytes.NewReader(file)
		changed, err := sed.Output()
		if err != nil || bytes.Equal(changed, file) {
			t.Errorf("%s: %s changes nothing in %s: %v", f[0], f[2], f[1], err)
		}
	}
}
