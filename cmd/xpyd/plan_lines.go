package main

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/xpyd/xpyd/internal/model"
	"github.com/xpyd/xpyd/internal/sim"
	"github.com/xpyd/xpyd/internal/steptable"
	"github.com/xpyd/xpyd/worker"
)

// runLines are the commands that start a fleet of workers as planned, on this machine.
func runLines(about *steptable.About, s sim.Split, p sim.Promise, shed bool) []string {
	flags, others := workerFlags(about)
	told := promises(p)
	for _, f := range []struct {
		name  string
		limit time.Duration
	}{{"ttft", told.TTFTPromise}, {"tpot", told.TPOTPromise}, {"itl", told.ITLPromise}} {
		if f.limit > 0 {
			flags = append(flags, "--"+f.name+"-promise", f.limit.String())
		}
	}
	if shed {
		flags = append(flags, "--shed-late")
	}
	ranks := max(about.Ranks, 1)
	if ranks > 1 {
		flags = append(flags, "--tensor-parallel", fmt.Sprint(ranks))
	}
	with, gpus := strings.Join(flags, " "), 0 // of a worker
	if about.Backend == "cuda" {
		gpus = ranks
	}
	var lines []string
	config := ""
	if s.Mixed > 0 { // the roles are what workers are mainly for: some are of either
		config = " --config mixed.yaml"
		lines = []string{"cat >mixed.yaml <<'END'", "pick: {policy: kv_events, disaggregate: mixed}", "END"}
		s = sim.Split{Prefill: s.Mixed / 2, Decode: s.Mixed - s.Mixed/2}
	}
	switch {
	case s.Whole > 0:
		lines = wholeLines(about.Model, s.Whole, gpus, with)
	case max(s.Prefill, s.Decode) > maxWorkers: // more than `up` starts
		lines = append(lines, "xpyd router --data fleet"+config+" &", "until test -e fleet/join-url; do sleep 0.1; done",
			startEach("prefill", 0, s.Prefill, gpus, "--join-file fleet/join-url --id prefill-$i "+with),
			startEach("decode", s.Prefill, s.Decode, gpus, "--join-file fleet/join-url --id decode-$i "+with))
	case gpus > 0:
		lines = append(lines, strings.TrimSpace(fmt.Sprintf("xpyd up%s --gpus %d --prefill %d --decode %d %s", config, gpus*(s.Prefill+s.Decode), s.Prefill, s.Decode, with)))
	default:
		lines = append(lines, strings.TrimSpace(fmt.Sprintf("xpyd up%s --prefill %d --decode %d %s", config, s.Prefill, s.Decode, with)),
			fmt.Sprintf("# or, with its settings in configs/compose: docker compose up --build --scale prefill=%d --scale decode=%d", s.Prefill, s.Decode))
	}
	if len(others) > 0 {
		lines = append(lines, "# the table is of workers with "+strings.Join(others, " ")+": say so in each worker's configuration")
	}
	return lines
}

// wholeLines start whole workers, in no fleet, and a router that knows them as engines.
func wholeLines(name string, n, gpus int, with string) []string {
	const port = 8101
	lines := []string{"cat >whole.yaml <<'END'", "static:"}
	for i := range n {
		lines = append(lines, fmt.Sprintf("- {id: whole-%d, role: decode, url: \"http://127.0.0.1:%d\", dialect: openai, model: %q}", i, port+i, name))
	}
	return append(lines, "END",
		startEach("decode", 0, n, gpus, fmt.Sprintf("--trust-everyone --listen 127.0.0.1:$((%d+i)) --served-name %s %s", port, quoted(name), with)),
		"# --trust-everyone: any user of this machine may use these workers; docs/security.md has other ways",
		"xpyd router --config whole.yaml")
}

// startEach starts workers, each with so many GPUs of its own.
func startEach(role string, from, n, gpus int, args string) string {
	own := "" // the last of several --device counts
	switch {
	case gpus == 1:
		own = " --device cuda:$i"
	case gpus > 1:
		var list []string
		for k := range gpus {
			list = append(list, fmt.Sprintf("cuda:$((%d*i+%d))", gpus, k))
		}
		own = " --device " + strings.Join(list, ",")
	}
	return fmt.Sprintf("for i in $(seq %d %d); do xpyd %s %s%s & done", from, from+n-1, role, strings.TrimSpace(args), own)
}

// workerFlags are the flags of a table's workers: those of the command that made it, of which `up` does
// not have the others.
func workerFlags(about *steptable.About) (flags, others []string) {
	ups := pflag.NewFlagSet("", pflag.ContinueOnError)
	computeFlags(ups, &worker.Compute{}, "")
	made := newBenchStep()
	args := strings.Fields(about.Command)
	if err := made.ParseFlags(args[slices.Index(args, "step")+1:]); err != nil {
		made = newBenchStep() // the command was not kept as it was; then the table says the rest
	}
	given := map[string]string{}
	made.Flags().Visit(func(f *pflag.Flag) {
		given[f.Name] = f.Value.String()
		if f.Name == "blocks" || f.Name == "max-batch" || f.Name == "step-tokens" {
			others = append(others, "--"+f.Name+" "+f.Value.String())
		}
	})
	if strings.HasPrefix(given["device"], "cuda:") { // the one that was timed: each worker gets its own
		given["device"] = "cuda"
	}
	if given["model"] == "" && about.Model != model.EmbeddedName {
		given["model"] = about.Model
	}
	if given["threads"] == "" && about.Threads > 0 {
		given["threads"] = fmt.Sprint(about.Threads)
	}
	ups.VisitAll(func(f *pflag.Flag) {
		switch v := given[f.Name]; {
		case v == "" || v == "false":
		case f.Value.Type() == "bool":
			flags = append(flags, "--"+f.Name)
		default:
			flags = append(flags, "--"+f.Name, quoted(v))
		}
	})
	return flags, others
}

// plainWord needs no quotes in a shell.
var plainWord = regexp.MustCompile(`^[A-Za-z0-9_@%+=:,./-]+$`)

func quoted(s string) string {
	if plainWord.MatchString(s) {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
