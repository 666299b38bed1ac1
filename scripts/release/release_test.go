package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestArchive: what differs between machines leaves no trace in an archive.
func TestArchive(t *testing.T) {
	at := time.Unix(1_700_000_000, 0)
	made := func(order []string, mode os.FileMode) []byte {
		tree := t.TempDir()
		for _, name := range order {
			path := filepath.Join(tree, name)
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(name), mode); err != nil {
				t.Fatal(err)
			}
		}
		to := filepath.Join(t.TempDir(), "x.tar.gz")
		if err := archive(to, tree, "x", at); err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(to)
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	one := made([]string{"b", "a/c", "a/b"}, 0o644)
	if !bytes.Equal(one, made([]string{"a/b", "b", "a/c"}, 0o600)) {
		t.Error("the order and the modes of files are in the archive")
	}
	if bytes.Equal(one, made([]string{"a/b", "b", "a/c"}, 0o755)) {
		t.Error("a program is not told from a text")
	}
	list := exec.Command("tar", "tzv", "--utc", "--full-time")
	list.Stdin = bytes.NewReader(one)
	out, err := list.Output()
	if err != nil || strings.Count(string(out), "0/0") != 3 || strings.Count(string(out), "2023-11-14 22:13:20") != 3 || !strings.HasSuffix(string(out), "x/b\n") {
		t.Errorf("%v\n%s", err, out)
	}
}

const help = `Do it.

Do it well. It's a
.start of a line.

Usage:
  xpyd do [flags]
  xpyd do [command]

Available Commands:
  completion  Generate
  help        Help
  more        Do more

Flags:
      --how string   a\b (default "well")

Use "xpyd do [command] --help" for more.
`

func TestManPage(t *testing.T) {
	r := &release{version: "v1.2.3", at: time.Unix(0, 0).UTC()}
	subs, shorts := subcommands(help)
	if len(subs) != 1 || subs[0] != "more" || shorts[0] != "Do more" {
		t.Errorf("%q, %q", subs, shorts)
	}
	const want = `.TH XPYD-DO 1 1970-01-01 "xpyd v1.2.3" "xpyd's commands"
.SH NAME
xpyd\-do \- do it
.SH DESCRIPTION
Do it.
.PP
Do it well. It's a
\&.start of a line.
.PP
.SH SYNOPSIS
.nf
  xpyd do [flags]
  xpyd do [command]

.fi
.SH COMMANDS
.nf
  completion  Generate
  help        Help
  more        Do more

.fi
.SH OPTIONS
.nf
      \-\-how string   a\eb (default "well")

.fi
.SH SEE ALSO
.BR xpyd (1),
.BR xpyd\-do\-more (1)
`
	if page := string(manPage("xpyd-do", "do it", help, subs, r)); page != want {
		t.Errorf("%s", page)
	}
}

// TestChart: the packed chart has the release's version, and is the same each time.
func TestChart(t *testing.T) {
	t.Chdir("../..")
	pack := func() []byte {
		r := &release{version: "v1.2.3-rc.1", at: time.Unix(1_700_000_000, 0), out: t.TempDir(), work: t.TempDir()}
		if err := r.chart(); err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(filepath.Join(r.out, "xpyd-1.2.3-rc.1.tgz"))
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	one := pack()
	if !bytes.Equal(one, pack()) {
		t.Error("two charts of one tree differ")
	}
	z, err := gzip.NewReader(bytes.NewReader(one))
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for in := tar.NewReader(z); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(in)
		if err != nil {
			t.Fatal(err)
		}
		files[h.Name] = string(text)
	}
	if about := files["xpyd/Chart.yaml"]; !strings.Contains(about, "\nversion: 1.2.3-rc.1\n") || !strings.Contains(about, "\nappVersion: \"v1.2.3-rc.1\"\n") {
		t.Errorf("Chart.yaml:\n%s", about)
	}
	for _, name := range []string{"xpyd/values.yaml", "xpyd/values.schema.json", "xpyd/.helmignore", "xpyd/templates/_helpers.tpl", "xpyd/templates/router.yaml"} {
		if files[name] == "" {
			t.Errorf("no %s", name)
		}
	}
	if _, err := stampChart("name: xpyd\nversion: 1.0.0\n", "v1.2.3"); err == nil {
		t.Error("a chart without placeholders is packed")
	}
}

// TestStamped: a bill of materials has the commit's time, in each place.
func TestStamped(t *testing.T) {
	got := string(stamped([]byte(`{"timestamp": "2026-01-01T00:00:00+01:00","x":1}`), time.Unix(0, 0).UTC()))
	if got != `{"timestamp": "1970-01-01T00:00:00Z","x":1}` {
		t.Error(got)
	}
}

// TestContents: a package has each file of a release's tree, but for the README that is for archives, and the units
// name only what it has.
func TestContents(t *testing.T) {
	t.Chdir("../..")
	tree := t.TempDir()
	made := []file{{"man/xpyd.1.gz", nil}, {"completions/xpyd.bash", nil}, {"completions/_xpyd", nil}, {"completions/xpyd.fish", nil}, {"xpyd", nil}}
	if err := gather(tree, made); err != nil {
		t.Fatal(err)
	}
	list, err := contents(tree, time.Unix(0, 0))
	if err != nil {
		t.Fatal(err)
	}
	if len(list) != len(made)+len(copied)-1 {
		t.Errorf("%d of %d files", len(list), len(made)+len(copied))
	}
	at := map[string]bool{}
	for _, c := range list {
		at[c.Dst] = true
	}
	for _, c := range list {
		if !strings.HasSuffix(c.Src, ".service") {
			continue
		}
		unit, err := os.ReadFile(c.Src)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(unit)) {
			command, found := strings.CutPrefix(line, "ExecStart=")
			if !found {
				continue
			}
			words := strings.Fields(command)
			if !at[words[0]] || !at[words[3]] {
				t.Errorf("%s: %s", c.Dst, line)
			}
		}
	}
}

// TestRefused: what no release can be made of.
func TestRefused(t *testing.T) {
	full := t.TempDir()
	if err := os.WriteFile(filepath.Join(full, "x"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for want, c := range map[string]struct {
		version, out string
		arches       []string
	}{
		`-version "1.2": want`: {"1.2", t.TempDir(), []string{"amd64"}},
		`-arch "mips": want`:   {"v1.2.3", t.TempDir(), []string{"mips"}},
		"is not empty":         {"v1.2.3", full, []string{"amd64"}},
	} {
		if err := run(t.Context(), c.version, c.out, c.arches, true); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}
