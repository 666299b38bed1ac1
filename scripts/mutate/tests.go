package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
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
	direct []string        // what it and its tests import
	all    map[string]bool // what runs in its tests, other processes included
}

// newSuite asks go list. Tests that start xpyd also run all of xpyd's packages.
func newSuite(m *module) (*suite, error) {
	type testPackage struct {
		ImportPath, ForTest                      string
		Imports, TestImports, XTestImports, Deps []string
	}
	list, err := listed[*testPackage](m.dir, "list", "-test", "-json=ImportPath,ForTest,Imports,TestImports,XTestImports,Deps", "./...")
	if err != nil {
		return nil, err
	}
	packages := map[string]*testPackage{}
	for _, p := range list {
		packages[p.ImportPath] = p
	}
	xpyd, cluster := m.path+"/cmd/xpyd", m.path+"/e2e/cluster"
	s := &suite{m: m}
	for path, p := range packages {
		main := packages[path+".test"]
		if main == nil || p.ForTest != "" {
			continue
		}
		t := tested{path: path, direct: slices.Concat(p.Imports, p.TestImports, p.XTestImports), all: map[string]bool{path: true}}
		for _, d := range main.Deps {
			d, _, _ = strings.Cut(d, " ") // less [package.test]
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

// of returns the packages whose tests run a package's code, in the order to try them: itself, its
// importers, the others, and whole clusters.
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
		case slices.Contains(t.direct, path):
			level = 1
		}
		levels[level] = append(levels[level], t.path)
	}
	return slices.DeleteFunc(levels, func(l []string) bool { return len(l) == 0 })
}

// result of go test.
type result struct {
	pkg    string // the one that failed; "": none
	test   string // the first failed test in it; "": see how
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

// read parses go test's output.
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
	*mutant  // nil: no bug
	packages []string
	run      string        // which tests; "": all
	limit    time.Duration // per package
	fresh    bool          // ignores go test's cache
}

// test runs tests up to the first failure. When it returns, everything it started has ended.
func (s *suite) test(ctx context.Context, c check) (r result, err error) {
	dir, err := os.MkdirTemp("", "m")
	if err != nil {
		return result{}, err
	}
	defer os.RemoveAll(dir)
	defer sweep(dir)
	if err := os.Chmod(dir, 0o711); err != nil { // some tests are another user, too
		return result{}, err
	}
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
		// GOFLAGS also reach tests that build xpyd.
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

// watched collects go test's output and calls end when a package fails.
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

// sweep kills processes that run a program in dir, left over by tests that were cut off.
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
