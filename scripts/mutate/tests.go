package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// suite knows which packages' tests run which packages' code.
type suite struct {
	m      *module
	tested []tested
}

// tested is one package with tests.
type tested struct {
	path   string
	direct map[string]bool // what it and its tests import
	all    map[string]bool // what runs in its tests, in other processes too
}

// newSuite asks go list. Tests that start xpyd as a process run what xpyd is made of.
func newSuite(m *module) (*suite, error) {
	out, err := output(m.dir, "go", "list", "-test", "-json=ImportPath,ForTest,Imports,TestImports,XTestImports,Deps", "./...")
	if err != nil {
		return nil, err
	}
	type listed struct {
		ImportPath, ForTest                      string
		Imports, TestImports, XTestImports, Deps []string
	}
	packages := map[string]*listed{}
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		p := &listed{}
		if err := d.Decode(p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, err
		}
		packages[p.ImportPath] = p
	}
	xpyd, cluster := m.path+"/cmd/xpyd", m.path+"/e2e/cluster"
	s := &suite{m: m}
	for path, p := range packages {
		main := packages[path+".test"]
		if main == nil || p.ForTest != "" {
			continue
		}
		t := tested{path: path, direct: map[string]bool{}, all: map[string]bool{path: true}}
		for _, list := range [][]string{p.Imports, p.TestImports, p.XTestImports} {
			for _, i := range list {
				t.direct[i] = true
			}
		}
		for _, d := range main.Deps {
			d, _, _ = strings.Cut(d, " ") // its build for this test
			t.all[d] = true
		}
		if x := packages[xpyd]; x != nil && t.all[cluster] {
			for _, d := range append(x.Deps, xpyd) {
				t.all[d] = true
			}
		}
		s.tested = append(s.tested, t)
	}
	slices.SortFunc(s.tested, func(a, b tested) int { return strings.Compare(a.path, b.path) })
	return s, nil
}

// of returns the packages whose tests run a package's code, in the order in which
// they are tried: itself, who imports it, the others, and whole clusters.
func (s *suite) of(path string) [][]string {
	levels := make([][]string, 4)
	for _, t := range s.tested {
		level := 2
		switch {
		case !t.all[path]:
			continue
		case t.path == path:
			level = 0
		case strings.HasPrefix(t.path, s.m.path+"/e2e"):
			level = 3
		case t.direct[path]:
			level = 1
		}
		levels[level] = append(levels[level], t.path)
	}
	return slices.DeleteFunc(levels, func(l []string) bool { return len(l) == 0 })
}

// result of go test.
type result struct {
	pkg    string // that failed; empty: none did
	test   string // the first test that failed in it; empty: it ended otherwise
	how    string
	hung   bool
	broken bool // it does not compile
}

var (
	failedIn   = regexp.MustCompile(`(?m)^FAIL\t(\S+)(.*)\n`)
	failedTest = regexp.MustCompile(`(?m)^\s*--- FAIL: (\S+)`)
	timedOut   = regexp.MustCompile(`(?m)^panic: test timed out after .*\n\s*running tests:\n\s*(\S+)`)
	panicked   = regexp.MustCompile(`(?m)^(panic|fatal error): .*`)
)

// read takes from go test's output how it failed.
func read(out string) (r result) {
	m := failedIn.FindStringSubmatchIndex(out)
	if m == nil {
		return r
	}
	r.pkg, r.broken = out[m[2]:m[3]], strings.Contains(out[m[4]:m[5]], "build failed")
	out = out[:m[0]]
	if i := strings.LastIndex(out, "\nok  \t"); i >= 0 {
		out = out[i+1:]
	}
	if t := timedOut.FindStringSubmatch(out); t != nil {
		r.test, r.hung, r.how = t[1], true, "hung"
	} else if t := failedTest.FindStringSubmatch(out); t != nil {
		r.test = t[1]
	} else if r.how = panicked.FindString(out); r.how == "" {
		r.how = "exited"
	}
	return r
}

// check is one call of go test.
type check struct {
	*mutant  // is put in; nil: nothing is
	packages []string
	run      string        // which tests; empty: all
	limit    time.Duration // of one package
	fresh    bool          // a result that go test has kept does not do
}

// test runs tests and ends with the first failure. All that it started has ended
// when it returns.
func (s *suite) test(ctx context.Context, c check) (r result, err error) {
	dir, err := os.MkdirTemp("", "m")
	if err != nil {
		return result{}, err
	}
	defer os.RemoveAll(dir)
	defer sweep(dir)
	args := []string{"test", "-vet=off", "-failfast", "-p=2", "-timeout=" + c.limit.String()}
	if c.run != "" {
		args = append(args, "-run="+c.run)
	}
	if c.fresh {
		args = append(args, "-count=1")
	}
	env := append(os.Environ(), "TMPDIR="+dir)
	if x := c.mutant; x != nil {
		file, overlay := filepath.Join(dir, filepath.Base(x.File)), filepath.Join(dir, "overlay.json")
		b, err := json.Marshal(map[string]any{"Replace": map[string]string{filepath.Join(s.m.dir, x.File): file}})
		if err == nil {
			err = errors.Join(os.WriteFile(file, x.text(), 0o600), os.WriteFile(overlay, b, 0o600))
		}
		if err != nil {
			return result{}, err
		}
		// Also for the builds of xpyd that tests make.
		env = append(env, strings.TrimSpace("GOFLAGS="+os.Getenv("GOFLAGS")+" -overlay="+overlay))
	}
	ctx, cancel := context.WithTimeout(ctx, time.Duration(len(c.packages))*c.limit+time.Minute)
	defer cancel()
	failed, fail := context.WithCancel(ctx)
	defer fail()
	cmd := exec.CommandContext(failed, "go", append(args, c.packages...)...)
	out := &watched{end: fail}
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = s.m.dir, env, out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	err = cmd.Run()
	r = read(out.String())
	switch {
	case r.pkg != "":
		return r, nil
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return result{pkg: c.packages[0], how: "hung", hung: true}, nil
	case err != nil:
		return r, errors.Join(ctx.Err(), fmt.Errorf("go %s: %w\n%s", strings.Join(args, " "), err, out))
	}
	return r, nil
}

// watched is what go test prints; end is called when a package has failed.
type watched struct {
	strings.Builder
	end func()
}

func (w *watched) Write(b []byte) (int, error) {
	n, err := w.Builder.Write(b)
	if failedIn.Match(b) {
		w.end()
	}
	return n, err
}

// sweep kills what runs a program that lies in dir: processes of a test that did not
// get to its end.
func sweep(dir string) {
	list, _ := filepath.Glob("/proc/[0-9]*/exe")
	for _, path := range list {
		exe, err := os.Readlink(path)
		if err != nil || !strings.HasPrefix(exe, dir+"/") {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path))); err == nil {
			_ = syscall.Kill(pid, syscall.SIGKILL) // or it has ended
		}
	}
}
