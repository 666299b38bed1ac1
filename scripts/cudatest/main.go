// Command cudatest checks on a GPU what xpyd promises of one. It runs stages, the most valuable
// first, and ends with a table of figures, targets and verdicts. See scripts/cuda-test.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	ok, err := run(ctx, os.Args[1:], os.Stdout)
	if err != nil {
		fmt.Fprintln(os.Stderr, "cuda-test:", err)
		os.Exit(2)
	}
	if !ok {
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, say io.Writer) (bool, error) {
	began := time.Now()
	o := flag.NewFlagSet("cuda-test", flag.ContinueOnError)
	list := o.Bool("list", false, "list the stages and exit")
	names := o.String("stage", "", "stages to run, comma separated, or name them after the options (default all, the most valuable first)")
	budget := o.Int("budget", 0, "seconds; a stage that needs more than is left is not started")
	out := o.String("out", "", "folder of logs, figures and the record of finished parts (FOLDER/out, in a checkout bin/cuda/out)")
	again := o.Bool("again", false, "also run parts that have passed before")
	workers := o.Int("workers", 10, "sanitizer parts to run in parallel")
	into := o.String("pack", "", "only build, into this folder, what a GPU machine without Go needs")
	table := o.String("table", "", "only print the table of these output folders, comma separated")
	record := o.String("record", "", "add the table's figures and logs to results/ and raw/ of this folder, such as bench")
	if err := o.Parse(args); errors.Is(err, flag.ErrHelp) {
		return true, nil
	} else if err != nil {
		return false, err
	}
	stages, err := choose(plan(), append(o.Args(), strings.FieldsFunc(*names, func(r rune) bool { return r == ',' })...))
	switch {
	case err != nil:
		return false, err
	case *list:
		for _, s := range stages {
			fmt.Fprintf(say, "%-13s %4d s  %3d parts  %s\n", s.name, s.seconds, len(s.parts), s.about)
		}
		return true, nil
	case *table != "":
		return true, report(say, *record, strings.Split(*table, ",")...)
	case *into != "":
		return true, packed(ctx, say, *into)
	}
	dir, p, err := programs(ctx, say)
	if err != nil {
		return false, err
	}
	r := &runner{dir: dir, out: *out, pack: p, budget: time.Duration(*budget) * time.Second, workers: *workers, again: *again, say: say,
		elapsed: func() time.Duration { return time.Since(began) }}
	if r.out == "" {
		r.out = filepath.Join(dir, "out")
	}
	if r.device, r.gpus, err = devices(ctx); err != nil {
		return false, err
	}
	if err := loads(ctx, dir); err != nil {
		return false, err
	}
	fmt.Fprintf(say, "%d x %s, commit %s, build %s; logs in %s\n", r.gpus, r.device, p.Commit, p.Build, r.out)
	ok, err := r.run(ctx, stages)
	if err != nil {
		return false, err
	}
	return ok, report(say, *record, r.out)
}

// choose returns the named stages in the plan's order, or all if none are named.
func choose(stages []stage, names []string) ([]stage, error) {
	for _, n := range names {
		if !slices.ContainsFunc(stages, func(s stage) bool { return s.name == n }) {
			return nil, fmt.Errorf("no stage %q: see --list", n)
		}
	}
	if len(names) == 0 {
		return stages, nil
	}
	return slices.DeleteFunc(stages, func(s stage) bool { return !slices.Contains(names, s.name) }), nil
}

// devices returns the GPUs' name and number.
func devices(ctx context.Context) (name string, n int, err error) {
	raw, err := exec.CommandContext(ctx, "nvidia-smi", "--query-gpu=name", "--format=csv,noheader").Output()
	if err != nil || len(raw) == 0 {
		return "", 0, fmt.Errorf("no GPU: nvidia-smi: %w", err)
	}
	lines := strings.Split(strings.TrimSpace(string(raw)), "\n")
	return strings.TrimSpace(lines[0]), len(lines), nil
}

// loads makes the loader find cuBLASLt and NCCL, if need be in Python's packages. NCCL may be
// missing: it is a peer to compare with and one of the transports.
func loads(ctx context.Context, dir string) error {
	said, _ := exec.CommandContext(ctx, filepath.Join(dir, "probe")).CombinedOutput()
	if strings.Contains(string(said), "error while loading shared libraries") && !packaged(ctx, "libcublasLt.so.*") {
		return fmt.Errorf("%s: add the folder of cuBLASLt to LD_LIBRARY_PATH", strings.TrimSpace(string(said)))
	}
	packaged(ctx, "libnccl.so.2")
	return nil
}

// packaged reports whether Python's packages have a library that the loader lacks, and adds its
// folder to the loader's path.
func packaged(ctx context.Context, pattern string) bool {
	const find = `import ctypes, glob, os, sys
try: ctypes.CDLL(sys.argv[1])
except OSError: print(*sorted({os.path.dirname(f) for p in sys.path for f in glob.glob(p + '/nvidia/*/lib/' + sys.argv[1])}), sep=':')`
	where, err := exec.CommandContext(ctx, "python3", "-c", find, pattern).Output()
	at, path := strings.TrimSpace(string(where)), os.Getenv("LD_LIBRARY_PATH")
	if err != nil || at == "" {
		return false
	}
	return slices.Contains(strings.Split(path, ":"), at) || os.Setenv("LD_LIBRARY_PATH", strings.TrimPrefix(path+":"+at, ":")) == nil
}
