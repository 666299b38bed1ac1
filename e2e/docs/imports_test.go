package docs

import (
	"io/fs"
	"os"
	"path"
	"slices"
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
	for _, dir := range packages(t, "../..") {
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

// packages returns the folders below root that have Go files, tests aside. It reads them itself,
// so that the test runs again when there is one more.
func packages(t *testing.T, root string) (list []string) {
	t.Helper()
	err := fs.WalkDir(os.DirFS(root), ".", func(p string, d fs.DirEntry, err error) error {
		name := d.Name()
		switch {
		case err != nil:
			return err
		case d.IsDir() && (name == "testdata" || len(name) > 1 && (name[0] == '.' || name[0] == '_')):
			return fs.SkipDir
		case strings.HasSuffix(name, ".go") && !strings.HasSuffix(name, "_test.go") && !slices.Contains(list, path.Dir(p)):
			list = append(list, path.Dir(p))
		}
		return nil
	})
	if err != nil || len(list) < 50 {
		t.Fatal(list, err)
	}
	return list
}
