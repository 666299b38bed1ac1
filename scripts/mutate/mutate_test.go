package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// tree writes a module and returns it and its one package to mutate.
func tree(t *testing.T, files map[string]string) (*module, *unit) {
	t.Helper()
	dir := t.TempDir()
	files["go.mod"] = "module example.org/m\n\ngo 1.26\n"
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	m, err := newModule(dir, []string{"p"})
	if err != nil {
		t.Fatal(err)
	}
	u, err := m.load("p", nil)
	if err != nil {
		t.Fatal(err)
	}
	return m, u
}

const sample = `package p

import (
	"fmt"
	"log/slog"
	"sync"
	"time"
)

type t struct {
	mu   sync.Mutex
	n    int
	done func()
	log  *slog.Logger
}

func (x *t) close() error { return nil }

func pair(a, b int, s string) int { return a - b }

func (x *t) f(a, b int, list []int, more ...string) (bool, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	defer x.done()
	x.log.Info("f", "a", 7)
	timer := time.NewTimer(3 * time.Second)
	defer timer.Stop()
	if err := x.close(); err != nil {
		return false, fmt.Errorf("close %d: %w", a, err)
	}
	if a < b && x.ok() {
		x.n = pair(a, b, "s")
		x.n++
		x.done()
	}
	list = list[a:]
	return a == len(list), x.close()
}

func (x *t) ok() bool { return x.n > 1000 }

func (x *t) yes() bool { return x.ok() }
`

// TestKinds: each kind makes its bugs, and none in code that no test checks.
func TestKinds(t *testing.T) {
	m, u := tree(t, map[string]string{"p/p.go": sample})
	var got []string
	for _, x := range mutants(m, u, u.files[0]) {
		text := x.Kind + ": " + x.Before + " → " + x.After
		if !m.compiles(u, x.source, x.text()) {
			text += " (does not compile)"
		}
		got = append(got, text)
	}
	want := strings.Split(strings.TrimSpace(`
defer: defer x.done() → 
const: timer := time.NewTimer(3 * time.Second) → timer := time.NewTimer(0)
ignore: if err := x.close(); err != nil { → if err := x.close(); err != nil && false {
return: return false, fmt.Errorf("close %d: %w", a, err) → return true, fmt.Errorf("close %d: %w", a, err)
error: return false, fmt.Errorf("close %d: %w", a, err) → return false, nil (does not compile)
andor: if a < b && x.ok() { → if a < b || x.ok() {
relax: if a < b && x.ok() { → if a <= b && x.ok() {
negate: if a < b && x.ok() { → if a >= b && x.ok() {
bound: if a < b && x.ok() { → if a < (b+1) && x.ok() {
bound: if a < b && x.ok() { → if a < (b-1) && x.ok() {
drop: x.n = pair(a, b, "s") → _ = pair(a, b, "s")
drop: x.n++ → 
drop: x.done() → 
swap: x.n = pair(a, b, "s") → x.n = pair(b, a, "s")
drop: list = list[a:] → _ = list[a:]
bound: list = list[a:] → list = list[(a+1):]
bound: list = list[a:] → list = list[(a-1):]
error: return a == len(list), x.close() → return a == len(list), nil
negate: return a == len(list), x.close() → return a != len(list), x.close()
negate: func (x *t) ok() bool { return x.n > 1000 } → func (x *t) ok() bool { return x.n <= 1000 }
return: func (x *t) yes() bool { return x.ok() } → func (x *t) yes() bool { return !(x.ok()) }
const: func (x *t) ok() bool { return x.n > 1000 } → func (x *t) ok() bool { return x.n > 0 }
`), "\n")
	slices.Sort(got)
	slices.Sort(want)
	for i := range max(len(got), len(want)) {
		if i >= len(got) || i >= len(want) || got[i] != want[i] {
			t.Fatalf("mutants:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	}
}

// TestDraw: the seed decides, mutants are distinct and compile, and lines above do not change ids.
func TestDraw(t *testing.T) {
	m, u := tree(t, map[string]string{"p/p.go": sample})
	names := func(m *module, u *unit, seed uint64, n int) (list []string) {
		for _, x := range draw(m, []*unit{u}, seed, n) {
			list = append(list, x.ID)
		}
		return list
	}
	all := names(m, u, 1, 1000)
	if len(all) != 21 {
		t.Errorf("%d mutants, want 21", len(all))
	}
	if one := names(m, u, 1, 5); !slices.Equal(one, all[:5]) || slices.Equal(one, names(m, u, 2, 5)) {
		t.Errorf("seed 1: %v, then %v; seed 2: %v", all[:5], one, names(m, u, 2, 5))
	}
	m2, u2 := tree(t, map[string]string{"p/p.go": strings.Replace(sample, "type t", "// T.\ntype t", 1)})
	again := names(m2, u2, 1, 1000)
	slices.Sort(all)
	slices.Sort(again)
	if !slices.Equal(all, again) || len(slices.Compact(all)) != len(again) {
		t.Error("a comment changes the names, or two have one")
	}
}

// TestRead: go test's ways to report a failure.
func TestRead(t *testing.T) {
	f := func(out string, want result) {
		t.Helper()
		if got := read(out); got != want {
			t.Errorf("%q: %+v, want %+v", out, got, want)
		}
	}
	f("ok  \tx/a\t0.1s\n", result{})
	f("ok  \tx/a\t0.1s\n--- FAIL: TestB (0.00s)\n    --- FAIL: TestB/c (0.00s)\nFAIL\nFAIL\tx/b\t0.1s\nFAIL\n", result{pkg: "x/b", test: "TestB"})
	f("--- FAIL: TestA (0.00s)\nok  \tx/a\t0.1s\npanic: no\n\ngoroutine 1\nFAIL\tx/b\t0.1s\n", result{pkg: "x/b", how: "panic: no"})
	f("panic: test timed out after 1s\n\trunning tests:\n\t\tTestA (1s)\n\ngoroutine 1\nFAIL\tx/a\t1.0s\n", result{pkg: "x/a", test: "TestA", how: "hung", hung: true})
	f("p.go:1:1: no\nFAIL\tx/a [build failed]\n", result{pkg: "x/a", how: "exited", broken: true})
	f("FAIL\tx/a\t1.0s\n", result{pkg: "x/a", how: "exited"})
}

func TestEquivalents(t *testing.T) {
	e, _, err := readEquivalents(strings.NewReader("# comment\n\np/p.go f relax\n- if a < b {\n+ if a <= b {\nThey are never\nequal.\n\np/p.go - drop 2\n- x = 0\n+ \nIt is.\n"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range []struct {
		x    mutant
		want string
	}{
		{mutant{File: "p/p.go", Func: "f", Kind: "relax", Nth: 1, Before: "if a < b {", After: "if a <= b {"}, "They are never equal."},
		{mutant{File: "p/p.go", Func: "g", Kind: "relax", Nth: 1, Before: "if a < b {", After: "if a <= b {"}, ""},
		{mutant{File: "p/p.go", Kind: "drop", Nth: 2, Before: "x = 0"}, "It is."},
		{mutant{File: "p/p.go", Kind: "drop", Nth: 1, Before: "x = 0"}, ""},
		{mutant{File: "p/q.go", Kind: "drop", Nth: 2, Before: "x = 0"}, ""},
	} {
		if got := e[f.x.what()]; got != f.want {
			t.Errorf("%+v: %q, want %q", f.x, got, f.want)
		}
	}
	for _, bad := range []string{"p/p.go relax\n- a\n+ b\nwhy\n", "p/p.go f relax 0\n- a\n+ b\nwhy\n", "p/p.go f relax\n- a\n+ b\n", "p/p.go f relax\nwhy\n"} {
		if _, _, err := readEquivalents(strings.NewReader(bad)); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}

// TestStanding: all mutants of the committed list exist.
func TestStanding(t *testing.T) {
	f, err := os.Open("equivalent.txt")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	_, list, err := readEquivalents(f)
	if err != nil {
		t.Fatal(err)
	}
	var targets []string
	for _, x := range list {
		targets = append(targets, x.File)
	}
	folders, only := folders(targets)
	m, err := newModule("../..", folders)
	if err != nil {
		t.Fatal(err)
	}
	there := map[string]bool{}
	for _, folder := range folders {
		u, err := m.load(folder, only[folder])
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range u.files {
			for _, x := range mutants(m, u, s) {
				there[x.what()] = true
			}
		}
	}
	for _, x := range list {
		if !there[x.what()] {
			t.Errorf("there is no %s of %q in %s of %s (any more)", x.Kind, x.Before, x.Func, x.File)
		}
	}
}

// TestMutate is a whole run: a user's test notices one of two bugs, and a listed one is not tried.
// A second run has nothing to do, as all are in the log.
func TestMutate(t *testing.T) {
	const test = "package q\n\nimport (\n\t\"testing\"\n\n\t\"example.org/m/p\"\n)\n\nfunc TestLimit(t *testing.T) {\n\tif p.Limit != 100 {\n\t\tt.Fail()\n\t}\n}\n"
	m, _ := tree(t, map[string]string{
		"p/p.go":         "package p\n\nvar Limit = 100\n\nvar Size = 200\n\nvar Hint = 300\n",
		"q/q.go":         "package q\n",
		"q/q_test.go":    test,
		"equivalent.txt": "p/p.go - const\n- var Hint = 300\n+ var Hint = 0\nNobody reads it.\n",
	})
	o := options{seed: 1, n: 10, log: filepath.Join(m.dir, "log.jsonl"), targets: []string{"p"}, limit: time.Minute, dir: m.dir, equivalentFile: "equivalent.txt"}
	for _, run := range []string{"first", "second"} {
		var out strings.Builder
		if err := mutate(t.Context(), o, &out); err != nil {
			t.Fatal(err)
		}
		if !strings.HasSuffix(out.String(), "\nnoticed 1 of 2, 50.0 % (and 1 equivalent)\n") || strings.Count(out.String(), "NOT NOTICED") != map[string]int{"first": 2, "second": 1}[run] {
			t.Errorf("the %s run printed:\n%s", run, &out)
		}
	}
	done, err := readLog(o.log)
	if err != nil || len(done) != 3 {
		t.Fatalf("%d mutants in the log, %v", len(done), err)
	}
	for _, r := range done {
		want := map[string]string{"var Limit = 100": "q TestLimit"}[r.Before]
		if r.By != want || r.Noticed != (want != "") {
			t.Errorf("%v by %q, want %q", r, r.By, want)
		}
	}
	if b, err := os.ReadFile(filepath.Join(m.dir, "p/p.go")); err != nil || !strings.Contains(string(b), "Limit = 100") {
		t.Errorf("the tree was changed: %s %v", b, err)
	}
}
