package docs

import (
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// sourceOf is the text of a folder's Go files, its tests or the others.
func sourceOf(t *testing.T, dir string, tests bool) string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("../..", dir, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	var all strings.Builder
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") != tests {
			continue
		}
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		all.Write(text)
	}
	return all.String()
}

// has reports whether source declares methods of all these names.
func has(source string, methods ...string) bool {
	return !slices.ContainsFunc(methods, func(m string) bool {
		return !regexp.MustCompile(`(?m)^func \(\w* ?\*?\w+\) ` + m + `\(`).MatchString(source)
	})
}

// TestConformanceSuites: each transport and each level of the KV tiers passes the suite of its kind.
func TestConformanceSuites(t *testing.T) {
	levels, transports := 0, 0
	suite := sourceOf(t, "engine/tier/level", true)
	for _, dir := range packages(t, "../..") {
		switch base := path.Base(dir); path.Dir(dir) {
		case "engine/tier":
			if base != "level" && has(sourceOf(t, dir, false), "Load", "Save") {
				levels++
				if !strings.Contains(suite, `"github.com/xpyd/xpyd/`+dir+`"`) {
					t.Errorf("%s is a level, and engine/tier/level's tests do not know it", dir)
				}
			}
		case "kvconn":
			if slices.Contains([]string{"kvconntest", "local", "way"}, base) {
				continue // doubles, what transports share, and the choice among them
			}
			if text := sourceOf(t, dir, false); has(text, "Dial", "Listen") || strings.Contains(text, "way.Kind{") {
				transports++
				if !strings.Contains(sourceOf(t, dir, true), "kvconntest.Run(") {
					t.Errorf("%s is a transport, and its tests do not call kvconntest.Run", dir)
				}
			}
		}
	}
	if levels < 2 || transports < 5 {
		t.Errorf("found %d levels and %d transports", levels, transports)
	}
}
