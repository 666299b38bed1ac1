// Package harness is what the benchmarks of scripts/bench share: the binary under test,
// child processes that die with their owner, the installation of peers, and the book that
// figures are written to.
package harness

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/xpyd/xpyd/internal/figures"
)

// Options are the flags of every benchmark.
type Options struct {
	XPYD   string // the binary to measure; "" builds it from this tree
	Out    string // folder of results/ and raw/; "" keeps nothing
	Only   string // substrings of part names, comma separated; "" runs every part
	Rounds int
}

// Bench is one run of a benchmark.
type Bench struct {
	Options
	Book    *figures.Book
	Dir     string // temporary
	Command string // recorded with each figure: it repeats the run
	procs   []*Process
}

// Open begins a run whose figures go to results/BOOK.jsonl.
func (b *Bench) Open(book string) (err error) {
	if b.Dir, err = os.MkdirTemp("", "xpyd-bench"); err != nil {
		return err
	}
	if b.Book, err = figures.Open(b.Out, book, b.Command); err != nil {
		os.RemoveAll(b.Dir)
	}
	return err
}

// Close kills the remaining processes and removes the temporary folder.
func (b *Bench) Close() error {
	for _, p := range slices.Backward(b.procs) {
		p.Kill()
	}
	os.RemoveAll(b.Dir)
	return b.Book.Close()
}

// Wants reports whether -only selects name.
func (o *Options) Wants(name string) bool {
	return slices.ContainsFunc(strings.Split(o.Only, ","), func(part string) bool { return strings.Contains(name, part) })
}

// Sayf writes a line to the book's log and to the terminal.
func (b *Bench) Sayf(format string, args ...any) {
	b.Book.Logf(format, args...)
	log.Printf(format, args...)
}

// Add records figures.
func (b *Bench) Add(list ...figures.Figure) error {
	for _, f := range list {
		f.Command = b.Command
		b.Sayf("%s = %.4g %s, %s %.4g, ratio %.3f; %s", f.Name, f.Value, f.Unit, f.Peer, f.PeerValue, f.Ratio, f.Spread)
		if err := b.Book.Add(f); err != nil {
			return err
		}
	}
	return nil
}

// Binary is the path of the xpyd under test, built on the first call unless -xpyd names one.
func (b *Bench) Binary(ctx context.Context) (string, error) {
	if b.XPYD == "" {
		path := filepath.Join(b.Dir, "xpyd")
		if err := Build(ctx, ".", path, "0"); err != nil {
			return "", err
		}
		b.XPYD = path
	}
	return filepath.Abs(b.XPYD)
}

// Build builds xpyd from the tree at root; cgo is "0" or "1".
func Build(ctx context.Context, root, out, cgo string) error {
	_, err := Run(ctx, []string{"CGO_ENABLED=" + cgo}, "go", "build", "-C", root, "-trimpath", "-o", out, "./cmd/xpyd")
	return err
}

// BuildTest builds the test binary of a package of the tree at root.
func BuildTest(ctx context.Context, root, out, pkg string) error {
	_, err := Run(ctx, nil, "go", "test", "-C", root, "-c", "-trimpath", "-o", out, pkg)
	return err
}

// Run runs a command and returns what it prints on either stream.
func Run(ctx context.Context, env []string, argv ...string) (string, error) {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env = append(os.Environ(), env...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s: %w: %s", strings.Join(argv, " "), err, out)
	}
	return string(out), nil
}

// Output runs a program within limit and logs what it prints. Standard output is decoded
// as JSON into to, or copied if to is an io.Writer.
func (b *Bench) Output(ctx context.Context, limit time.Duration, to any, env []string, argv ...string) (*os.ProcessState, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env, cmd.WaitDelay = append(os.Environ(), env...), time.Second
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	b.Book.Logf("$ %s\n%s", strings.Join(append(slices.Clone(env), argv...), " "), compact(stdout.Bytes()))
	if w, ok := to.(io.Writer); ok {
		_, _ = w.Write(stdout.Bytes())
	} else if err == nil {
		err = json.Unmarshal(stdout.Bytes(), to)
	}
	if err != nil {
		b.Book.Logf("%s", stderr.Bytes())
		said := strings.TrimSpace(stderr.String())
		return nil, fmt.Errorf("%s: %w: %s", filepath.Base(argv[0]), err, said[strings.LastIndexByte(said, '\n')+1:])
	}
	return cmd.ProcessState, nil
}

// compact puts JSON on one line of at most 4 KiB.
func compact(text []byte) string {
	var c bytes.Buffer
	if json.Compact(&c, text) != nil {
		return string(text)
	}
	if c.Len() > 4096 {
		return c.String()[:4096] + " …"
	}
	return c.String()
}

// Install installs a program from its Debian package unless it is on the PATH.
func Install(ctx context.Context, program, debian string) error {
	if _, err := exec.LookPath(program); err == nil {
		return nil
	}
	log.Printf("%s is missing: installing Debian's %s", program, debian)
	get := []string{"apt-get", "install", "-y", "-qq", "--no-install-recommends", debian}
	_, err := Run(ctx, nil, get...)
	if err != nil { // the package lists may be missing
		if _, err = Run(ctx, nil, "apt-get", "update", "-qq"); err == nil {
			_, err = Run(ctx, nil, get...)
		}
	}
	if err != nil {
		return fmt.Errorf("%s is missing and cannot be installed (this takes root): %w", program, err)
	}
	return nil
}

// Python is a virtual environment for peers written in Python.
type Python struct {
	Venv    string     // "": NAME in the user's cache
	Name    string     // of what is in it
	Imports string     // modules that import once the environment is complete
	Pip     [][]string // arguments of pip install, one call each
}

// Open returns the folder of the environment, and makes it unless it is complete.
func (p Python) Open(ctx context.Context) (string, error) {
	if p.Venv == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			return "", err
		}
		p.Venv = filepath.Join(cache, "xpyd", p.Name)
	}
	python := filepath.Join(p.Venv, "bin", "python")
	check := []string{python, "-c", "import " + p.Imports}
	if _, err := Run(ctx, nil, check...); err == nil {
		return p.Venv, nil
	}
	log.Printf("installing %s into %s", p.Name, p.Venv)
	calls := [][]string{{"python3", "-m", "venv", p.Venv}}
	for _, packages := range p.Pip {
		calls = append(calls, append([]string{python, "-m", "pip", "install", "--quiet"}, packages...))
	}
	for _, c := range append(calls, check) {
		if _, err := Run(ctx, nil, c...); err != nil {
			return "", err
		}
	}
	return p.Venv, nil
}
