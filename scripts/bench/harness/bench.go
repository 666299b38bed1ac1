// Package harness is what the benchmarks of scripts/bench share: the binary under
// test, processes that end with their owner, programs of others to compare with,
// and the book in which figures are written.
package harness

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
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

// Options are the flags that every benchmark has.
type Options struct {
	XPYD   string // the binary to measure; "" builds it from this tree
	Out    string // folder of results/ and raw/; "" keeps nothing
	Only   string // parts of a name, comma separated; "" is everything
	Rounds int
}

// Bench is one run of a benchmark.
type Bench struct {
	Options
	Book    *figures.Book
	Dir     string // temporary
	Command string // of the figures
	procs   []*Process
	serial  int
}

// Open begins a run whose figures go to results/BOOK.jsonl.
func (b *Bench) Open(book string) (err error) {
	if b.Dir, err = os.MkdirTemp("", "xpyd-bench"); err != nil {
		return err
	}
	if b.Book, err = figures.Open(b.Out, book); err != nil {
		os.RemoveAll(b.Dir)
	}
	return err
}

// Close kills what still runs, and removes the temporary folder.
func (b *Bench) Close() error {
	for _, p := range slices.Backward(b.procs) {
		p.Kill()
	}
	os.RemoveAll(b.Dir)
	return b.Book.Close()
}

// Wants reports whether -only leaves name in.
func (o *Options) Wants(name string) bool {
	return o.Only == "" || slices.ContainsFunc(strings.Split(o.Only, ","), func(part string) bool { return strings.Contains(name, part) })
}

// Sayf writes a line to the log, and for the user.
func (b *Bench) Sayf(format string, args ...any) {
	b.Book.Logf(format, args...)
	log.Printf(format, args...)
}

// Add writes a figure.
func (b *Bench) Add(f figures.Figure) error {
	f.Command = b.Command
	b.Sayf("%s = %.4g %s, %s %.4g, ratio %.3f; %s", f.Name, f.Value, f.Unit, f.Peer, f.PeerValue, f.Ratio, f.Spread)
	return b.Book.Add(f)
}

// Binary is the xpyd under test.
func (b *Bench) Binary(ctx context.Context) (string, error) {
	if b.XPYD == "" {
		path := filepath.Join(b.Dir, "xpyd")
		if err := Build(ctx, ".", path, "./cmd/xpyd", "CGO_ENABLED=0"); err != nil {
			return "", err
		}
		b.XPYD = path
	}
	return filepath.Abs(b.XPYD)
}

// Build builds a package of the tree at root.
func Build(ctx context.Context, root, out, pkg string, env ...string) error {
	return goTool(ctx, root, env, "build", "-trimpath", "-o", out, pkg)
}

// BuildTest builds a package's test binary.
func BuildTest(ctx context.Context, root, out, pkg string) error {
	return goTool(ctx, root, nil, "test", "-c", "-trimpath", "-o", out, pkg)
}

func goTool(ctx context.Context, root string, env []string, args ...string) error {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir, cmd.Env = root, append(os.Environ(), env...)
	if text, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go %s: %w: %s", strings.Join(args, " "), err, text)
	}
	return nil
}

// Output runs a program to its end, within limit, and reads the JSON that it prints, or
// writes it to an io.Writer; it also goes to the log.
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
		return nil, fmt.Errorf("%s: %w: %s", filepath.Base(argv[0]), err, lastLine(stderr.String()))
	}
	return cmd.ProcessState, nil
}

// compact puts JSON on one line, and cuts a long one.
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

func lastLine(s string) string {
	s = strings.TrimSpace(s)
	return s[strings.LastIndexByte(s, '\n')+1:]
}

// Install sees to it that the program is there, if need be from Debian's package.
func Install(ctx context.Context, program, debian string) error {
	if _, err := exec.LookPath(program); err == nil {
		return nil
	}
	log.Printf("%s is missing: installing Debian's %s", program, debian)
	get := []string{"install", "-y", "-qq", "--no-install-recommends", debian}
	if err := exec.CommandContext(ctx, "apt-get", get...).Run(); err == nil {
		return nil
	}
	err := exec.CommandContext(ctx, "apt-get", "update", "-qq").Run()
	if err == nil {
		err = exec.CommandContext(ctx, "apt-get", get...).Run()
	}
	if err != nil {
		return fmt.Errorf("%s is missing, and so may be the right to install Debian's %s: %w", program, debian, err)
	}
	return nil
}

// Python is a virtual environment in which others' programs are installed.
type Python struct {
	Venv    string     // "": NAME in the user's cache
	Name    string     // of what is in it
	Imports string     // what Python can import once it is complete
	Pip     [][]string // arguments of pip install, call by call
}

// Open returns the folder of the environment, which it makes if it is not complete.
func (p Python) Open(ctx context.Context) (string, error) {
	if p.Venv == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			return "", err
		}
		p.Venv = filepath.Join(cache, "xpyd", p.Name)
	}
	python := filepath.Join(p.Venv, "bin", "python")
	check := func() error {
		text, err := exec.CommandContext(ctx, python, "-c", "import "+p.Imports).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%s: import %s: %w: %s", python, p.Imports, err, lastLine(string(text)))
		}
		return nil
	}
	if check() == nil {
		return p.Venv, nil
	}
	log.Printf("installing %s into %s", p.Name, p.Venv)
	calls := [][]string{{"python3", "-m", "venv", p.Venv}}
	for _, packages := range p.Pip {
		calls = append(calls, append([]string{python, "-m", "pip", "install", "--quiet"}, packages...))
	}
	for _, c := range calls {
		if text, err := exec.CommandContext(ctx, c[0], c[1:]...).CombinedOutput(); err != nil {
			return "", errors.Join(fmt.Errorf("%s: %w: %s", strings.Join(c, " "), err, lastLine(string(text))))
		}
	}
	return p.Venv, check()
}
