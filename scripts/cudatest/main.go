// Command cudatest shows on a GPU what xpyd promises of one: it runs stages, the
// most valuable first, and ends with a table of figures, targets and verdicts. See
// scripts/cuda-test.
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
	list := o.Bool("list", false, "list the stages and end")
	names := o.String("stage", "", "stages to run, by commas; or name them behind the options (all, the most valuable first)")
	budget := o.Int("budget", 0, "seconds: a stage that takes more than is left is not begun")
	out := o.String("out", "", "where logs and figures go, and what is done already (FOLDER/out, in a checkout bin/cuda/out)")
	again := o.Bool("again", false, "also run what ended well before")
	workers := o.Int("workers", 10, "parts of a sanitizer side by side")
	into := o.String("pack", "", "only build, into this folder, all that a GPU machine without Go needs")
	table := o.String("table", "", "only print the table of these output folders, by commas")
	record := o.String("record", "", "add the table's figures to this folder's results and raw, which is bench")
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
	dir, p, err := folder(ctx, say)
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

// choose returns the stages of these names, in the plan's order; all, if none.
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

// devices asks the driver for the GPUs.
func devices(ctx context.Context) (name string, n int, err error) {
	raw, err := exec.CommandContext(ctx, "nvidia-smi", "--query-gpu=name", "--format=csv,noheader").Output()
	lines := strings.Fields(strings.ReplaceAll(string(raw), " ", "_"))
	if err != nil || len(lines) == 0 {
		return "", 0, fmt.Errorf("no GPU: nvidia-smi: %w", err)
	}
	return strings.ReplaceAll(lines[0], "_", " "), len(lines), nil
}

// loads sees to it that the loader finds cuBLASLt and NCCL: where it does not, in
// Python's packages. Without NCCL there is less to compare with, and a transport less.
func loads(ctx context.Context, dir string) error {
	said, _ := exec.CommandContext(ctx, filepath.Join(dir, "probe")).CombinedOutput()
	if strings.Contains(string(said), "error while loading shared libraries") && !packaged(ctx, "libcublasLt.so.*") {
		return fmt.Errorf("%s: name the folder of cuBLASLt in LD_LIBRARY_PATH", strings.TrimSpace(string(said)))
	}
	packaged(ctx, "libnccl.so.2")
	return nil
}

// packaged has the loader look where Python's packages have a library, unless it finds it
// anyhow, and tells whether they have it.
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
