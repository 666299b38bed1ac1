package docs

import (
	"os"

	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var (
	// link is a Markdown link's target; anchors and other sites are not looked at.
	link = regexp.MustCompile(`\]\(([^)#]+)(?:#[^)]*)?\)`)
	// code is what stands between backquotes.
	code = regexp.MustCompile("`([^`\n]+)`")
	// cited is a path of ours at the beginning of such code, or of a word in it.
	cited = regexp.MustCompile(`^[\w.\-]+(/[\w.\-]+)*/?(\{[\w,.\-/]+\})?$`)
	// test is a test that a document names.
	test = regexp.MustCompile(`^(?:[\w/]*\.)?((?:Test|Fuzz|Benchmark)[A-Z]\w*)$`)
)

// prose are the documents that cite the tree: all but what is recorded or comes from
// elsewhere.
func prose(t *testing.T) []string {
	t.Helper()
	var files []string
	for _, f := range tracked(t) {
		if strings.HasSuffix(f, ".md") && !strings.Contains(f, "testdata/") && f != "CHANGELOG.md" {
			files = append(files, f)
		}
	}
	if len(files) < 10 {
		t.Fatalf("only %q", files)
	}
	return files
}

// tracked are the files of the tree, by their paths from its root.
func tracked(t *testing.T) []string {
	t.Helper()
	var files []string
	err := filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(root, path)
		if d.IsDir() && slices.Contains([]string{".git", ".cache", "bin", "dist", "shared", "node_modules"}, rel) {
			return filepath.SkipDir
		}
		if !d.IsDir() {
			files = append(files, rel)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// tree answers what documents cite.
type tree struct {
	paths map[string]bool // files and folders
	bases map[string]bool // names of files
	tests map[string]bool
}

func newTree(t *testing.T) *tree {
	t.Helper()
	tr := &tree{map[string]bool{}, map[string]bool{}, map[string]bool{}}
	declared := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz|Benchmark)\w+)\(`)
	for _, f := range tracked(t) {
		tr.bases[filepath.Base(f)] = true
		for p := f; p != "."; p = filepath.Dir(p) {
			tr.paths[p] = true
		}
		if strings.HasSuffix(f, "_test.go") {
			for _, m := range declared.FindAllStringSubmatch(read(t, filepath.Join(root, f)), -1) {
				tr.tests[m[1]] = true
			}
		}
	}
	return tr
}

// gone reports whether text cites a file, a folder or a test that is not there.
// Paths count from the root or from the document; the name of a file alone, in
// whichever folder.
func (tr *tree) gone(doc, text string) bool {
	if m := test.FindStringSubmatch(text); m != nil {
		return !tr.tests[m[1]]
	}
	first, _, _ := strings.Cut(text, "/")
	if !cited.MatchString(text) || strings.HasPrefix(text, "-") {
		return false
	}
	text = strings.TrimSuffix(text, "/")
	source := slices.Contains([]string{".go", ".cu", ".cuh", ".md", ".py"}, filepath.Ext(text))
	if !strings.Contains(text, "/") {
		return source && !tr.bases[text]
	}
	if !source && !tr.paths[first] && !tr.paths[filepath.Join(filepath.Dir(doc), first)] || slices.Contains([]string{"bin", "dist"}, first) {
		return false // a path, but not of ours
	}
	before, choice, _ := strings.Cut(text, "{")
	for _, c := range strings.Split(strings.TrimSuffix(choice, "}"), ",") {
		p := before + c
		// A package's member is package.Name.
		name := strings.TrimRight(p, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_")
		member := strings.TrimSuffix(name, ".")
		found := false
		for _, at := range []string{p, filepath.Join(filepath.Dir(doc), p), p + ".go"} {
			found = found || tr.paths[at]
		}
		if !found && (name == member || !tr.paths[member] && !tr.paths[filepath.Join(filepath.Dir(doc), member)]) {
			return true
		}
	}
	return false
}

// TestCited: what documents link to and cite is there.
func TestCited(t *testing.T) {
	tr := newTree(t)
	for _, doc := range prose(t) {
		text := read(t, filepath.Join(root, doc))
		for _, m := range link.FindAllStringSubmatch(text, -1) {
			if !strings.Contains(m[1], ":") && !tr.paths[filepath.Join(filepath.Dir(doc), m[1])] {
				t.Errorf("%s links to %s, which is not there", doc, m[1])
			}
		}
		for _, m := range code.FindAllStringSubmatch(text, -1) {
			for i, word := range strings.Fields(m[1]) {
				if i > 0 && !strings.Contains(word, "/") { // of commands, their paths
					continue
				}
				if tr.gone(doc, strings.TrimPrefix(strings.Trim(word, ",;:()"), "./")) {
					t.Errorf("%s cites %s, which is not there", doc, word)
				}
			}
		}
	}
}

// TestGone: what counts as gone.
func TestGone(t *testing.T) {
	tr := newTree(t)
	for text, want := range map[string]bool{
		"router/DESIGN.md": false, "router/gone.go": true, "router/": false, "scripts/gone": true, "kvconn/{tcp,shm}": false, "kvconn/{tcp,gone}": true,
		"TestCited": false, "TestGoneByNow": true, "docs.TestCited": false, "links_test.go": false, "gone.go": true,
		"text/plain": false, "probe/probe.cu": true, "/v1/models": false, "kvconn/ticket.Outcome": false, "--flag": false,
	} {
		if got := tr.gone("README.md", text); got != want {
			t.Errorf("%s: gone %t", text, got)
		}
	}
}

// TestMakeTargets: `make x` of a document is a target.
func TestMakeTargets(t *testing.T) {
	makefile := read(t, filepath.Join(root, "Makefile"))
	target := regexp.MustCompile("`make ([a-z-]+)")
	n := 0
	for _, doc := range prose(t) {
		for _, m := range target.FindAllStringSubmatch(read(t, filepath.Join(root, doc)), -1) {
			if n++; !strings.Contains(makefile, "\n"+m[1]+":") {
				t.Errorf("%s: there is no `make %s`", doc, m[1])
			}
		}
	}
	if n == 0 {
		t.Error("no document names a target")
	}
}
