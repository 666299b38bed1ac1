package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// rig is a runner whose programs are testdata/fake-gpu.
type rig struct {
	*runner
	t     *testing.T
	clock time.Duration
	said  strings.Builder
	calls string
}

func newRig(t *testing.T) *rig {
	t.Helper()
	fake, err := filepath.Abs("testdata/fake-gpu")
	if err != nil {
		t.Fatal(err)
	}
	bin := t.TempDir()
	for _, name := range append([]string{"nvidia-smi", "compute-sanitizer", "stdbuf", "python3"}, compiled...) {
		if err := os.Symlink(fake, filepath.Join(bin, name)); err != nil {
			t.Fatal(err)
		}
	}
	r := &rig{t: t, calls: filepath.Join(t.TempDir(), "calls")}
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	t.Setenv("FAKE_CALLS", r.calls)
	r.runner = &runner{dir: bin, out: t.TempDir(), pack: pack{Commit: "0123456789ab", Build: "a build"}, device: "a fake GPU", gpus: 1, workers: 4, say: &r.said,
		elapsed: func() time.Duration { return r.clock }}
	return r
}

// do runs stages and returns what was said.
func (r *rig) do(wantOK bool, stages ...stage) string {
	r.t.Helper()
	r.said.Reset()
	ok, err := r.run(r.t.Context(), stages)
	if err != nil || ok != wantOK {
		r.t.Fatalf("ended well: %t, want %t; %v\n%s", ok, wantOK, err, r.said.String())
	}
	return r.said.String()
}

// called returns the programs' calls since the last time.
func (r *rig) called() []string {
	raw, _ := os.ReadFile(r.calls)
	os.Remove(r.calls)
	return strings.FieldsFunc(string(raw), func(c rune) bool { return c == '\n' })
}

func (r *rig) table() string {
	r.t.Helper()
	var b strings.Builder
	if err := report(&b, "", r.out); err != nil {
		r.t.Fatal(err)
	}
	return b.String()
}

func (r *rig) has(text string, wants ...string) {
	r.t.Helper()
	for _, w := range wants {
		if !regexp.MustCompile(`(?m)` + w).MatchString(text) {
			r.t.Errorf("no %q in\n%s", w, text)
		}
	}
}

// figureStages are the stages of the real plan that print figures.
func figureStages(t *testing.T) []stage {
	stages, err := choose(plan(), strings.Fields("hf decode prefill mixed kernels peers kvio hicache multiturn hits fp8 invariant transformers push ttft"))
	if err != nil {
		t.Fatal(err)
	}
	return stages
}

// TestTable: recorded output of an H100 and of two H200s gives the table with verdicts, and lines
// for bench.
func TestTable(t *testing.T) {
	r := newRig(t)
	r.gpus = 2
	r.do(true, figureStages(t)...)
	table := r.table()
	r.has(table, `^2 x a fake GPU +measured`,
		`^gpu\.decode_step_ms\.b1 +5\.610 <= 5\.9 +met +bytes at the measured copy bandwidth 5\.051; cuBLASLt's linears alone`,
		`^gpu\.attn_prefill_tflops\.32k +635\.544 >= 605 +met +PyTorch SDPA, cuDNN, dense KV 611\.2; PyTorch SDPA, flash`,
		`^gpu\.sampler_us\.b64 +56\.587 <= 30 +missed`,
		`^gpu\.small_kernel_pct\.norm +82\.\d+ >= 90 +missed`, // of PyTorch's copy, which was faster
		`^hicache\.multiturn_ratio +2\.319 >= 2 +met +device-only caching`,
		`^kvio\.d2h_gbs\.t16 +\d\d\.\d+ >= 51 +met +copy engine, one run 5\d\.\d+; cudaMemcpyBatchAsync`,
		`^kvio\.duplex_gbs +8\d\.\d+ >= 90 +missed`,
		`^push\.ipc_gbs\.64m +3\d\d\.\d+ >= 345 +met +NCCL send/recv, contiguous 3\d\d`, `^push\.ipc_gbs\.run1m +3\d\d\.\d+ >= 350 +met +copy engine, one run`,
		`^push\.digest_cost_pct +0\.\d+ <= 1 +met`, `^push\.ttft_overhead_pct\.32k +4\.935 <= 0\.5 +missed +first token of the same prompts`, `^push\.itl_ratio +1\.009 <= 1\.05 +met +limit 1\.05`,
		`^gpu\.kv8_decode_step_ms\.b64 `, `^gpu\.endurance_pool_held +- >= 0\.95 +not measured`,
		`^\d\d of 76 targets met`, `^probe +not run`, `^decode +ok`)
	var b strings.Builder
	bench := t.TempDir()
	if err := report(&b, bench, r.out); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"results/gpu.jsonl", "results/kvio.jsonl", "results/hicache.jsonl", "results/push.jsonl"} {
		raw, err := os.ReadFile(filepath.Join(bench, name))
		if err != nil || !strings.Contains(string(raw), `a fake GPU"`) || !strings.Contains(string(raw), `"commit":"0123456789ab"`) {
			t.Errorf("%s: %v\n%s", name, err, raw)
		}
	}
	logs, err := filepath.Glob(filepath.Join(bench, "raw/*-cuda-test.log"))
	if err != nil || len(logs) != 1 {
		t.Errorf("%v, %v", logs, err)
	}
}

// TestBudget: a stage that does not fit is not started; a later, smaller one is.
func TestBudget(t *testing.T) {
	r := newRig(t)
	r.budget = 100 * time.Second
	one := func(name string, seconds int) stage {
		return stage{name: name, seconds: seconds, parts: []part{{name: name, run: []string{"probe", name}}}}
	}
	r.clock = 55 * time.Second
	said := r.do(false, one("first", 40), one("large", 46), one("small", 45))
	if got := r.called(); !slices.Equal(got, []string{"probe first", "probe small"}) {
		t.Errorf("called %v\n%s", got, said)
	}
	r.has(said, "== large.*not begun: it takes 46 s, 45 are left")
}

// TestResume: with the same programs, parts that failed run again, those that passed do not.
func TestResume(t *testing.T) {
	r := newRig(t)
	s := stage{name: "s", seconds: 60, parts: []part{{name: "a", run: []string{"probe", "a"}}, {name: "b", run: []string{"probe", "b"}}, {name: "c", run: []string{"probe", "c"}}}}
	after := stage{name: "after", seconds: 60, parts: []part{{name: "d", run: []string{"moves", "d"}}}}
	t.Setenv("FAKE_FAILS", "probe b*")
	said := r.do(false, s, after)
	r.has(said, `^ok +s .* a`, `^FAILED +s .* b exit status 1 --- FAIL: TestFake`, `^ok +s .* c`, `^ok +after .* d`)
	r.called()
	t.Setenv("FAKE_FAILS", "")
	r.do(true, s, after)
	if got := r.called(); !slices.Equal(got, []string{"probe b"}) {
		t.Errorf("resumed with %v", got)
	}
	r.has(r.do(true, s), "== s: : done before")
	r.pack.Build = "another"
	r.do(true, s)
	if got := r.called(); len(got) != 3 {
		t.Errorf("of another build: %v", got)
	}
	r.again = true
	r.do(true, s)
	if got := r.called(); len(got) != 3 {
		t.Errorf("again: %v", got)
	}
}

// TestHang: a part that hangs ends at its limit, and the others run.
func TestHang(t *testing.T) {
	r := newRig(t)
	t.Setenv("FAKE_HANGS", "probe hang*")
	said := r.do(false, stage{name: "s", seconds: 600, parts: []part{{name: "hang", run: []string{"probe", "hang"}, seconds: 1}, {name: "next", run: []string{"probe", "next"}}}})
	r.has(said, `^NOT ENDED s .* hang 0 cases were done`, `^ok +s .* next`)
}

// TestSanitizer: each of a sanitizer's families has its own verdict.
func TestSanitizer(t *testing.T) {
	r := newRig(t)
	stages := plan()
	of := func(name, family string) stage {
		s := stages[slices.IndexFunc(stages, func(s stage) bool { return s.name == name })]
		s.parts = slices.DeleteFunc(s.parts, func(p part) bool { return !strings.HasPrefix(p.name, family+"/") })
		return s
	}
	race, steps := of("racecheck", "probe"), of("racesteps", "pool")
	t.Setenv("FAKE_RACES", "sanitizer *probe check * 3/16")
	r.has(r.do(false, race, steps), `^REPORTS +racecheck .* probe/3 3`)
	r.has(r.table(), `^racesteps pool +clean`, `^racecheck probe +15 of 16 probe/3 REPORTS 3`, `^racesteps model +0 of \d+ \d+ not run`, `^memcheck +not run`)
	r.called()
	t.Setenv("FAKE_RACES", "")
	r.do(true, race)
	if got := r.called(); !slices.Equal(got, []string{"probe check quick 3/16"}) {
		t.Errorf("resumed with %v", got)
	}
	r.has(r.table(), `^racecheck probe +clean`)
}

// TestSanitizerItself: a sanitizer's own failure is no report, a test that an architecture lacks
// passes, parts are spread over the GPUs, and a part that fails is retried alone.
func TestSanitizerItself(t *testing.T) {
	for out, want := range map[string]string{
		"===== Internal Sanitizer Error: while launching\n===== ERROR SUMMARY: 24 errors": bad,
		"testing: warning: no tests to run\n===== Error: Target application terminated":   good,
		"===== ERROR SUMMARY: 24 errors":                                                  reports, "===== ERROR SUMMARY: 0 errors": good,
		"===== Error: Race reported between Read access at nvjet_sm90_tst_64x8+0xab0\n===== RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)":   good,
		"===== Error: Race reported between Read access at nvjet_sm90_tst_64x8+0xab0\n===== RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)": reports,
		"===== Error: process didn't terminate successfully\n===== RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)":                          bad,
	} {
		if got, note := judge("synccheck", out, true, nil, nil, nil); got != want {
			t.Errorf("%q: %s (%s), want %s", out, got, note, want)
		}
	}
	if got, _ := judge("racecheck", "testing: warning: no tests to run", false, nil, nil, nil); got != bad {
		t.Errorf("a test that is to be there, and is not: %s", got)
	}
	r := newRig(t)
	r.gpus = 2
	r.do(true, stage{name: "memcheck", tool: "memcheck", seconds: 100, parts: []part{{name: "a", run: []string{"probe", "a"}}, {name: "b", run: []string{"probe", "b"}}}})
	log, err := os.ReadFile(filepath.Join(r.out, "memcheck.log"))
	if err != nil {
		t.Fatal(err)
	}
	r.has(string(log), `CUDA_VISIBLE_DEVICES=0 probe a`, `CUDA_VISIBLE_DEVICES=1 probe b`)
	r.called()
	t.Setenv("FAKE_FAILS", "probe c")
	r.do(false, stage{name: "synccheck", tool: "synccheck", seconds: 100, parts: []part{{name: "c", run: []string{"probe", "c"}}, {name: "d", run: []string{"probe", "d"}}}})
	got := r.called()
	if slices.Sort(got); !slices.Equal(got, []string{"probe c", "probe c", "probe d"}) {
		t.Errorf("what failed beside others is not tried by itself: %v", got)
	}
}

// TestLeftOut: a stage that needs something missing is left out and fails nothing.
func TestLeftOut(t *testing.T) {
	r := newRig(t)
	t.Setenv("FAKE_FAILS", "python3 -c*")
	said := r.do(true, stage{name: "torch", seconds: 1, python: "torch", parts: []part{{name: "x", run: []string{"probe"}}}},
		stage{name: "pair", seconds: 1, gpus: 2, parts: []part{{name: "x", run: []string{"probe"}}}})
	r.has(said, "left out, no torch in python3", "left out, it needs 2 GPUs")
}

// TestOptions: options that need no GPU.
func TestOptions(t *testing.T) {
	newRig(t)
	var b strings.Builder
	if _, err := run(t.Context(), []string{"--list", "--stage", "decode,probe", "hf"}, &b); err != nil || strings.Count(b.String(), "\n") != 3 || !strings.HasPrefix(b.String(), "probe") {
		t.Errorf("%v\n%s", err, b.String())
	}
	if _, err := run(t.Context(), []string{"nothing"}, &b); err == nil {
		t.Error("a stage that is none")
	}
	if name, n, err := devices(t.Context()); err != nil || n != 1 || name != "NVIDIA H100 80GB HBM3" {
		t.Errorf("%q %d %v", name, n, err)
	}
}

// TestLoads: a library that the loader lacks is looked for in Python's packages.
func TestLoads(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"probe": "echo probe: error while loading shared libraries", "python3": "echo $FAKE_WHERE"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+text+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	t.Setenv("LD_LIBRARY_PATH", "/mine")
	if err := loads(t.Context(), dir); err == nil || !strings.Contains(err.Error(), "LD_LIBRARY_PATH") {
		t.Error(err)
	}
	t.Setenv("FAKE_WHERE", "/theirs")
	if err := loads(t.Context(), dir); err != nil || os.Getenv("LD_LIBRARY_PATH") != "/mine:/theirs" {
		t.Errorf("%q, %v", os.Getenv("LD_LIBRARY_PATH"), err)
	}
}

// testsOf returns the tests of a package, and those of them that need a GPU.
func testsOf(t *testing.T, dir string) (names, tagged []string) {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
	if err != nil || len(paths) == 0 {
		t.Fatalf("%s: %v", dir, err)
	}
	for _, path := range paths {
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		before := len(names)
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil && strings.HasPrefix(fn.Name.Name, "Test") && fn.Name.Name != "TestMain" {
				names = append(names, fn.Name.Name)
			}
		}
		if len(f.Comments) > 0 && strings.HasPrefix(f.Comments[0].List[0].Text, "//go:build cuda ") {
			tagged = append(tagged, names[before:]...)
		}
	}
	return names, tagged
}

// TestNames: every test that a stage names exists, every GPU test of the CUDA backend is in one
// family, and the architectures are complete.
func TestNames(t *testing.T) {
	there := map[string][]string{}
	for _, b := range goTests {
		all, tagged := testsOf(t, filepath.Join("../..", b.path))
		if there[b.name] = all; b.name == "cuda.test" {
			there[b.name] = tagged
		}
	}
	named := slices.Concat(alone, figureTests)
	for _, f := range append(slices.Clone(families), ranks) {
		named = append(named, f.tests...)
		for _, n := range slices.Concat(f.split, f.processes) {
			if !slices.Contains(f.tests, n) {
				t.Errorf("%s is not among the tests of %s", n, f.name)
			}
		}
	}
	slices.Sort(named)
	slices.Sort(there["cuda.test"])
	if !slices.Equal(named, there["cuda.test"]) {
		t.Errorf("families and others name\n%v, there are\n%v", named, there["cuda.test"])
	}
	list := regexp.MustCompile(`^\^\((.*)\)\$`)
	for _, s := range plan() {
		seen := map[string]bool{}
		for _, p := range s.parts {
			if seen[p.name] {
				t.Errorf("%s has two parts %s", s.name, p.name)
			}
			seen[p.name] = true
			i := slices.Index(p.run, "-test.run")
			if i < 0 || p.run[i+1] == "^$" {
				continue
			}
			m := list.FindStringSubmatch(p.run[i+1])
			if m == nil {
				t.Fatalf("%s: %v", s.name, p.run)
			}
			for name := range strings.SplitSeq(m[1], "|") {
				if !slices.Contains(there[p.run[0]], name) {
					t.Errorf("stage %s, part %s: %s has no %s", s.name, p.name, p.run[0], name)
				}
			}
		}
	}
	rig, err := os.ReadFile("../../kernels/cuda/rig_test.go")
	if err != nil {
		t.Fatal(err)
	}
	var known []string
	for _, m := range regexp.MustCompile(`(?m)^\t\t"(.*)": +shape\(`).FindAllStringSubmatch(string(rig), -1) {
		known = append(known, strings.ReplaceAll(m[1], " ", "_"))
	}
	if got := slices.Sorted(slices.Values(architectures)); !slices.Equal(got, slices.Sorted(slices.Values(known))) {
		t.Errorf("architectures are %v, the tests' %v", got, known)
	}
}

// TestScript: the script runs the sources in a checkout, and the program beside it in a pack.
func TestScript(t *testing.T) {
	if out, err := exec.Command("../cuda-test", "--list", "decode").CombinedOutput(); err != nil || !strings.HasPrefix(string(out), "decode ") {
		t.Errorf("%v\n%s", err, out)
	}
	dir := t.TempDir()
	text, err := os.ReadFile("../cuda-test")
	if err != nil {
		t.Fatal(err)
	}
	for name, what := range map[string]string{"cuda-test": string(text), "cudatest": "#!/bin/sh\necho \"$#:$*\"\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(what), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	out, err := exec.Command(filepath.Join(dir, "cuda-test"), "--budget", "560", "decode").Output()
	if err != nil || string(out) != "3:--budget 560 decode\n" {
		t.Errorf("%q, %v", out, err)
	}
}

// TestUnpack: a pack's programs come out as they went in.
func TestUnpack(t *testing.T) {
	dir, from := t.TempDir(), t.TempDir()
	for i, name := range compiled {
		if err := os.WriteFile(filepath.Join(from, name), fmt.Appendf(nil, "program %d", i), 0o755); err != nil {
			t.Fatal(err)
		}
		if _, err := compress(filepath.Join(from, name), filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if err := unpack(dir); err != nil {
			t.Fatal(err)
		}
	}
	for i, name := range compiled {
		raw, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil || string(raw) != fmt.Sprintf("program %d", i) {
			t.Errorf("%s: %q, %v", name, raw, err)
		}
	}
}
