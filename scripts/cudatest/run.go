package main

import (
	"cmp"
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
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/xpyd/xpyd/internal/figures"
)

// Verdicts of a part.
const (
	good    = "ok"
	bad     = "FAILED"
	reports = "REPORTS" // a sanitizer's
	late    = "NOT ENDED"
	absent  = "left out"
)

// entry is a line of OUT/parts.jsonl: the outcome of a part. The newest of a part counts.
type entry struct {
	Build   string  `json:"build"`
	Stage   string  `json:"stage"`
	Part    string  `json:"part"`
	Verdict string  `json:"verdict"`
	Note    string  `json:"note,omitempty"`
	Seconds float64 `json:"seconds"`
	At      string  `json:"at"`
}

// figure is a line of OUT/figures.jsonl: what a program printed as RESULT or PEER.
type figure struct {
	Kind      string  `json:"kind"`
	Build     string  `json:"build"`
	Commit    string  `json:"commit"`
	Device    string  `json:"device"`
	Date      string  `json:"date"`
	Stage     string  `json:"stage"`
	Verdict   string  `json:"verdict"` // of its part
	Name      string  `json:"name"`
	Unit      string  `json:"unit"`
	Value     float64 `json:"value"`
	P1        float64 `json:"p1"`
	P99       float64 `json:"p99"`
	Runs      int     `json:"runs"`
	Device1   float64 `json:"device_value"` // by the device's clock
	Note      string  `json:"note"`
	Peer      string  `json:"peer"`
	PeerValue float64 `json:"peer_value"`
	Spread    string  `json:"spread"`
}

// runner runs stages with the programs in dir and keeps the outcome in out.
type runner struct {
	dir, out string
	pack     pack
	device   string
	gpus     int
	budget   time.Duration // 0: unlimited
	workers  int           // for a sanitizer's parts
	again    bool
	elapsed  func() time.Duration
	say      io.Writer

	mu   sync.Mutex
	done map[string]entry // of this build, by stage and part
}

// run runs stages in order and reports whether all passed.
func (r *runner) run(ctx context.Context, stages []stage) (bool, error) {
	entries, err := read[entry](filepath.Join(r.out, "parts.jsonl"))
	if err != nil {
		return false, err
	}
	r.done = map[string]entry{}
	for _, e := range entries {
		if e.Build == r.pack.Build {
			r.done[e.Stage+"/"+e.Part] = e
		}
	}
	all := true
	for _, s := range stages {
		ok, err := r.stage(ctx, &s)
		if err := errors.Join(err, context.Cause(ctx)); err != nil {
			return false, err
		}
		all = all && ok
	}
	return all, nil
}

// missing returns why a stage cannot run here, or "".
func (r *runner) missing(ctx context.Context, s *stage) string {
	if s.gpus > r.gpus {
		return fmt.Sprintf("it needs %d GPUs", s.gpus)
	}
	if s.tool != "" {
		if _, err := exec.LookPath("compute-sanitizer"); err != nil {
			return "no compute-sanitizer here"
		}
	}
	find := "import sys, importlib.util as i; sys.exit(not all(map(i.find_spec, sys.argv[1:])))"
	if s.python != "" && exec.CommandContext(ctx, "python3", append([]string{"-c", find}, strings.Fields(s.python)...)...).Run() != nil {
		return "no " + s.python + " in python3"
	}
	return ""
}

func (r *runner) stage(ctx context.Context, s *stage) (ok bool, err error) {
	var parts []part
	for _, p := range s.parts {
		if r.again || r.done[s.name+"/"+p.name].Verdict != good {
			parts = append(parts, p)
		}
	}
	head := fmt.Sprintf("== %s: %s", s.name, s.about)
	if len(parts) == 0 {
		fmt.Fprintf(r.say, "%s: done before\n", head)
		return true, nil
	}
	if why := r.missing(ctx, s); why != "" {
		fmt.Fprintf(r.say, "%s: %s, %s\n", head, absent, why)
		return true, r.note(s, &parts[0], absent, why, 0)
	}
	need, left := time.Duration(s.seconds)*time.Second, time.Hour
	if r.budget > 0 {
		left = r.budget - r.elapsed()
	}
	if left < need {
		fmt.Fprintf(r.say, "%s: not begun: it takes %d s, %d are left\n", head, s.seconds, int(left.Seconds()))
		return false, nil
	}
	fmt.Fprintf(r.say, "%s (%d of %d parts, about %d s)\n", head, len(parts), len(s.parts), s.seconds)
	ctx, cancel := context.WithTimeout(ctx, min(2*need, left))
	defer cancel()
	log, err := figures.Append(filepath.Join(r.out, s.name+".log"))
	if err != nil {
		return false, err
	}
	defer log.Close()
	workers := 1
	if s.tool != "" {
		workers = min(r.workers, cmp.Or(s.beside, r.workers))
	}
	if s.tool != "" && r.gpus > 1 { // spread the parts over the GPUs
		for i := range parts {
			parts[i].env = append(slices.Clone(parts[i].env), fmt.Sprintf("CUDA_VISIBLE_DEVICES=%d", i%r.gpus))
		}
	}
	ok = true
	failed, err := r.beside(ctx, s, parts, workers, log, &ok)
	if err == nil && workers > 1 { // again one by one, with all of the memory for the tool
		_, err = r.beside(ctx, s, failed, 1, log, &ok)
	}
	return ok, errors.Join(err, log.Sync())
}

// beside runs parts on workers and clears ok unless they pass. With several workers, failed parts
// are returned instead: they may fail for lack of memory.
func (r *runner) beside(ctx context.Context, s *stage, parts []part, workers int, log *os.File, ok *bool) (failed []part, err error) {
	var all errgroup.Group
	all.SetLimit(max(workers, 1))
	for i := range parts {
		all.Go(func() error {
			verdict, err := r.part(ctx, s, &parts[i], log)
			r.mu.Lock()
			defer r.mu.Unlock()
			if verdict == bad && workers > 1 {
				failed = append(failed, parts[i])
			} else {
				*ok = *ok && verdict == good
			}
			return err
		})
	}
	return failed, all.Wait()
}

// leftOut keeps a tool from looking at the probe's oracle, at calls that tests make fail on
// purpose, and at cuBLASLt's kernels where they take so much of its memory that few processes
// fit a device. racecheck fails if it must skip cuBLASLt's kernels, so judge ignores what it reports
// of them.
var leftOut = map[string][]string{
	"memcheck":  {"--kernel-name-exclude", "kernel_substring=reference_kernel", "--report-api-errors", "no"},
	"synccheck": {"--kernel-name-exclude", "kernel_substring=reference_kernel", "--kernel-name-exclude", "kernel_substring=nvjet"},
	"racecheck": {"--kernel-name-exclude", "kernel_substring=reference_kernel", "--kernel-name-exclude", "kernel_substring=mass_kernel", "--print-limit", "100000"},
}

// command is a part's program under the stage's tool, in dir.
func (r *runner) command(ctx context.Context, s *stage, p *part, limit time.Duration) *exec.Cmd {
	run := slices.Clone(p.run)
	if strings.HasSuffix(run[0], ".test") { // shows where it hangs
		run = append(run, "-test.timeout", max(limit*9/10, time.Second).String())
	}
	if run[0] != "python3" {
		run[0] = filepath.Join(r.dir, run[0])
	}
	if s.tool != "" && p.run[0] == "probe" { // line by line, so that a cut log shows the cases done
		run = append([]string{"stdbuf", "-oL"}, run...)
	}
	if s.tool != "" {
		run = slices.Concat([]string{"compute-sanitizer", "--tool", s.tool, "--error-exitcode", "9"}, leftOut[s.tool], run)
	}
	cmd := exec.CommandContext(ctx, run[0], run[1:]...)
	cmd.Dir = r.dir
	cmd.Env = append(os.Environ(), "XPYD_CUDA_LIB="+filepath.Join(r.dir, "libxpyd_cuda.so"), "PYTHONUNBUFFERED=1")
	for _, e := range p.env {
		if name, _, _ := strings.Cut(e, "="); os.Getenv(name) == "" {
			cmd.Env = append(cmd.Env, e)
		}
	}
	if s.tool != "" {
		cmd.Env = append(cmd.Env, "GOMAXPROCS=2") // many run in parallel
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // tools have children
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

func (r *runner) part(ctx context.Context, s *stage, p *part, log *os.File) (string, error) {
	limit := time.Hour
	if p.seconds > 0 {
		limit = time.Duration(p.seconds) * time.Second
	}
	if end, ok := ctx.Deadline(); ok {
		limit = min(limit, time.Until(end))
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	began := r.elapsed()
	cmd := r.command(ctx, s, p, limit)
	out, err := cmd.CombinedOutput()
	took := r.elapsed() - began
	verdict, note := judge(s.tool, string(out), p.maybe, cmd.ProcessState, ctx.Err(), err)
	text := fmt.Sprintf("$ %s %s  # %s\n%s# %s %s after %.1f s\n\n", strings.Join(p.env, " "), strings.Join(p.run, " "), p.name, out, verdict, note, took.Seconds())
	r.mu.Lock()
	defer r.mu.Unlock()
	fmt.Fprintf(r.say, "%-9s %-9s %6.1f s  %s %s\n", verdict, s.name, took.Seconds(), p.name, note)
	if verdict == bad { // a cut log would lose it
		fmt.Fprintln(r.say, tail(string(out), 12))
	}
	if _, err := log.WriteString(text); err != nil {
		return verdict, err
	}
	if s.tool == "" {
		if err := r.figures(s, verdict, string(out)); err != nil {
			return verdict, err
		}
	}
	return verdict, r.note(s, p, verdict, note, took)
}

var (
	summary = regexp.MustCompile(`(?m)^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) .*$`)
	cases   = regexp.MustCompile(`(?m)^(?:ok |\s*--- PASS)`)
	theirs  = regexp.MustCompile(`(?m)^=+ Error: Race reported between \w+ access at nvjet_`) // in cuBLASLt's kernels
	failing = regexp.MustCompile(`(?m)^(?:\s*--- FAIL: .*|FAIL.*|panic: .*)$`)
)

// judge returns the verdict on a process; with maybe, the test may not exist.
func judge(tool, out string, maybe bool, state *os.ProcessState, ended, err error) (verdict, note string) {
	if ended != nil || strings.Contains(out, "panic: test timed out after") {
		return late, fmt.Sprintf("%d cases were done", len(cases.FindAllString(out, -1)))
	}
	sums := summary.FindAllStringSubmatch(out, -1)
	found := 0
	for _, m := range sums {
		n, _ := strconv.Atoi(m[1])
		found += n
	}
	others := len(theirs.FindAllString(out, -1))
	found -= others
	switch {
	case tool != "" && strings.Contains(out, "warning: no tests to run"):
		return map[bool]string{true: good, false: bad}[maybe], "no such test"
	case strings.Contains(out, "Internal Sanitizer Error"), strings.Contains(out, "Error: process didn't terminate successfully"): // none of ours
		return bad, "the tool itself failed, perhaps for lack of memory beside the others"
	case found > 0 || tool != "" && others == 0 && state != nil && state.ExitCode() == 9:
		return reports, fmt.Sprintf("%d", found)
	case err != nil && (others == 0 || failing.MatchString(out)):
		return bad, strings.TrimSpace(err.Error() + " " + strings.TrimSpace(failing.FindString(out)))
	case tool != "" && len(sums) == 0:
		return bad, "the tool gave no summary"
	case others > 0:
		return good, fmt.Sprintf("but %d in cuBLASLt's kernels", others)
	}
	return good, ""
}

func tail(text string, n int) string {
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	return "    " + strings.Join(lines[max(0, len(lines)-n):], "\n    ")
}

var printed = regexp.MustCompile(`(?m)^(RESULT|PEER) (\{.*\})$`)

// figures records what a part printed.
func (r *runner) figures(s *stage, verdict, out string) error {
	for _, m := range printed.FindAllStringSubmatch(out, -1) {
		f := figure{Kind: m[1], Build: r.pack.Build, Commit: r.pack.Commit, Device: r.device, Date: time.Now().UTC().Format(time.DateOnly), Stage: s.name, Verdict: verdict}
		if s.gpus > 1 {
			f.Device = fmt.Sprintf("%d x %s", s.gpus, r.device)
		}
		if err := json.Unmarshal([]byte(m[2]), &f); err != nil {
			return fmt.Errorf("%s printed %s: %w", s.name, m[0], err)
		}
		if err := add(filepath.Join(r.out, "figures.jsonl"), f); err != nil {
			return err
		}
	}
	return nil
}

func (r *runner) note(s *stage, p *part, verdict, note string, took time.Duration) error {
	return add(filepath.Join(r.out, "parts.jsonl"), entry{Build: r.pack.Build, Stage: s.name, Part: p.name, Verdict: verdict, Note: note,
		Seconds: took.Seconds(), At: time.Now().UTC().Format(time.RFC3339)})
}

// add appends a line to a file of JSON lines, and makes its folder.
func add(path string, v any) error {
	line, err := json.Marshal(v)
	if err != nil {
		return err
	}
	f, err := figures.Append(path)
	if err != nil {
		return err
	}
	_, err = f.Write(append(line, '\n'))
	return errors.Join(err, f.Close())
}

// read reads a file of JSON lines; a missing file has none.
func read[T any](path string) (list []T, err error) {
	raw, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	for line := range strings.Lines(string(raw)) {
		var v T
		if err := json.Unmarshal([]byte(line), &v); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		list = append(list, v)
	}
	return list, nil
}
