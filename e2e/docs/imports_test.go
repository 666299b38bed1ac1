package docs

import (
	"os"
	"os/exec"
	"path"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// TestImportRules: each package has one rule in .golangci.yml that says what it may import; one
// without a rule could import anything. Commands, tests of whole processes and scripts have none.
func TestImportRules(t *testing.T) {
	text, err := os.ReadFile("../../.golangci.yml")
	if err != nil {
		t.Fatal(err)
	}
	var config struct {
		Linters struct {
			Settings struct {
				Depguard struct {
					Rules map[string]struct{ Files []string }
				}
			}
		}
	}
	if err := yaml.Unmarshal(text, &config); err != nil {
		t.Fatal(err)
	}
	list, err := exec.Command("go", "list", "-C", "../..", "./...").Output()
	if err != nil {
		t.Fatal(err)
	}
	for pkg := range strings.Lines(string(list)) {
		dir := strings.TrimPrefix(strings.TrimSpace(pkg), "github.com/xpyd/xpyd/")
		if top, _, _ := strings.Cut(dir, "/"); top == "cmd" || top == "e2e" || top == "scripts" {
			continue
		}
		var of []string
		for name, r := range config.Linters.Settings.Depguard.Rules {
			for _, f := range r.Files {
				pattern, anywhere := strings.CutPrefix(f, "**/")
				if match, err := path.Match(pattern, dir+"/x.go"); anywhere && match && err == nil {
					of = append(of, name)
				}
			}
		}
		if len(of) != 1 {
			t.Errorf("%s has %d rules in .golangci.yml, want one: %v", dir, len(of), of)
		}
	}
}
