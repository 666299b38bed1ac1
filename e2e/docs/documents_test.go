// Package docs holds what README.md and docs/ say to what xpyd does: every
// shell command in them runs as printed, and every path they cite exists.
//
// A document is a row of blocks between fences. What follows the three
// backquotes of a fence says what becomes of the block:
//
//	```sh              runs
//	```sh gpu          needs an NVIDIA GPU
//	```sh hub          downloads something
//	```sh registry     takes packages from a registry: runs where XPYD_DOCS_REGISTRY is set
//	```sh daemon       needs a daemon of the machine's, such as Docker's
//	```sh cluster      needs a Kubernetes cluster, with kubectl and Helm
//	```sh gate         is a step of the gate, and so stands in .ci/run or the Makefile
//	```yaml NAME       is written to the file NAME, for the blocks that follow
//
// Every "## " section begins with nothing running. A block whose last line starts
// a server (see serves) runs until its section ends.
package docs

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const root = "../.."

// marks are what may follow sh.
var marks = []string{"gpu", "hub", "registry", "daemon", "cluster", "gate", "release"}

// block is one fenced block of a document.
type block struct {
	file    string
	line    int // of its first line
	section int // counted from 0
	lang    string
	marks   []string
	text    string
}

func (b *block) String() string { return fmt.Sprintf("%s:%d", b.file, b.line) }

func (b *block) marked(m string) bool { return slices.Contains(b.marks, m) }

// documents are README.md and all of docs, without what is made from the code.
func documents(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	if err != nil || len(files) < 5 {
		t.Fatalf("%d documents, %v", len(files), err)
	}
	return append([]string{filepath.Join(root, "README.md")}, files...)
}

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// parse returns a document's fenced blocks.
func parse(file, text string) (blocks []block, err error) {
	var open *block
	section := 0
	for i, line := range strings.Split(text, "\n") {
		info, fence := strings.CutPrefix(line, "```")
		switch {
		case fence && open != nil:
			blocks, open = append(blocks, *open), nil
		case fence:
			words := strings.Fields(info)
			if len(words) == 0 {
				return nil, fmt.Errorf("%s:%d: a fence says what it holds: sh, yaml, text, …", file, i+1)
			}
			open = &block{file: file, line: i + 2, section: section, lang: words[0], marks: words[1:]}
		case open != nil:
			open.text += line + "\n"
		case strings.HasPrefix(line, "## "):
			section++
		}
	}
	if open != nil {
		return nil, fmt.Errorf("%v: this fence is not closed", open)
	}
	for i := range blocks {
		if err := blocks[i].check(); err != nil {
			return nil, err
		}
	}
	return blocks, nil
}

// check refuses marks that nobody knows, and names of files outside of the folder.
func (b *block) check() error {
	switch b.lang {
	case "sh":
		for _, m := range b.marks {
			if !slices.Contains(marks, m) {
				return fmt.Errorf("%v: unknown mark %q; there are %q", b, m, marks)
			}
		}
	case "yaml":
		if len(b.marks) > 1 || len(b.marks) == 1 && b.marks[0] != filepath.Base(b.marks[0]) {
			return fmt.Errorf("%v: want at most the name of a file, not %q", b, b.marks)
		}
	case "bash", "shell", "console":
		return fmt.Errorf("%v: commands are sh", b)
	default:
		if len(b.marks) > 0 {
			return fmt.Errorf("%v: %s has no marks", b, b.lang)
		}
	}
	return nil
}

// server is a line that starts something that runs until it is stopped.
var server = regexp.MustCompile(`^(\w+=\S+ )*(xpyd (up|router|prefill|decode|mock|bench kv --listen)|redis-server)\b`)

// ends is a line that looks like one of them, and ends by itself.
var ends = regexp.MustCompile(` --(print-config|help|upgrade)\b`)

// serves reports whether the block's last line starts a server, which no other line may.
func (b *block) serves() (bool, error) {
	lines := strings.Split(strings.ReplaceAll(strings.TrimSpace(b.text), "\\\n", ""), "\n")
	last := false
	for i, line := range lines {
		last = server.MatchString(line) && !ends.MatchString(line)
		if last && i < len(lines)-1 {
			return false, fmt.Errorf("%v: what follows %q waits for its end: it wants a block of its own", b, line)
		}
	}
	return last, nil
}

// TestParse: what a reader of the sources relies on.
func TestParse(t *testing.T) {
	const text = "# a\n```sh\nxpyd version\n```\n## b\n```sh gpu hub\nnvidia-smi\nxpyd up\n```\n```yaml r.yaml\na: b\n```\n"
	got, err := parse("d.md", text)
	if err != nil || len(got) != 3 {
		t.Fatalf("%v, %v", got, err)
	}
	if b := got[1]; b.String() != "d.md:7" || b.section != 1 || !b.marked("hub") || b.text != "nvidia-smi\nxpyd up\n" {
		t.Errorf("%+v", b)
	}
	f := func(text, want string) {
		t.Helper()
		blocks, err := parse("d.md", text)
		for i := range blocks {
			if err == nil {
				_, err = blocks[i].serves()
			}
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %s", text, err, want)
		}
	}
	f("```sh tpu\nx\n```\n", `unknown mark "tpu"`)
	f("```sh\nx\n", "not closed")
	f("```\nx\n```\n", "says what it holds")
	f("```bash\nx\n```\n", "commands are sh")
	f("```json gpu\nx\n```\n", "json has no marks")
	f("```yaml ../r.yaml\nx\n```\n", "name of a file")
	f("```sh\nxpyd up\nxpyd status\n```\n", "a block of its own")
	f("```sh\nA=b xpyd router --listen \\\n  a\nxpyd status\n```\n", "a block of its own")
}
