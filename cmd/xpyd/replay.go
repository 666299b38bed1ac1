package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/requestlog"
	"github.com/xpyd/xpyd/internal/sim"
	"github.com/xpyd/xpyd/internal/steptable"
	"github.com/xpyd/xpyd/router/pick"
)

type replayFlags struct {
	table, model, slo, json string
	fleets, policies        []string
	workers, maxContext     int
	speed                   float64
	perThousand             time.Duration
	seed                    uint64
}

func newReplay() *cobra.Command {
	r := &replayFlags{}
	cmd := &cobra.Command{
		Use:   "replay LOG --table FILE",
		Args:  cobra.ExactArgs(1),
		Short: "Run a router's request log again, under another policy or with another fleet",
		Long: `Run the requests of a router's request log (its setting request_log.file) through fleets that exist
only here, as xpyd plan does: at their own times, with their lengths and with what their prompts have
in common. It prints what clients saw and what they would have seen with each fleet and policy, and the
requests that differ most. Without --fleet it is the fleet that the log shows, so that the difference
is the computation's own; without --policy it is the log's.

Workers are warm: each has served some requests before. Left out are requests of which no token came, as the length of the answer is not known; those of several
choices; and those that are longer than the table's max_context. Other clients' sessions, answers'
own KV and the KV tiers are not in the log.`,
		Example: `  xpyd up --config up.yaml       which has: request_log: {file: requests.jsonl}
  xpyd replay requests.jsonl --table h100.json
  xpyd replay requests.jsonl --table h100.json --policy prefix,round_robin --slo ttft=2s,tpot=25ms
  xpyd replay requests.jsonl --table h100.json --fleet 2P2D --fleet 1P3D --fleet 4 --json differences.json
  xpyd replay requests.jsonl --table h100.json --workers 8 --speed 2`,
	}
	f := cmd.Flags()
	f.StringVar(&r.table, "table", "", "step table, as xpyd bench step writes it")
	f.StringArrayVar(&r.fleets, "fleet", nil, "2P2D: workers for prefill and decode; 4: whole ones; 4mixed: any does any part; may be repeated")
	f.IntVar(&r.workers, "workers", 0, "instead of --fleet: all splits of so many workers")
	f.StringSliceVar(&r.policies, "policy", nil, "pick.policy of the router, or several: "+strings.Join(pick.Policies, ", "))
	f.StringVar(&r.model, "model", "", "leave out requests for other models")
	f.Float64Var(&r.speed, "speed", 1, "requests come so many times as fast")
	f.StringVar(&r.slo, "slo", "", "limits of a good request: ttft=2s,tpot=25ms,itl=50ms (longest gap)")
	f.DurationVar(&r.perThousand, "ttft-per-1000", 0, "added to the limit of ttft for each 1,000 tokens of the prompt")
	f.IntVar(&r.maxContext, "max-context", 0, "leave out requests of more tokens than this; 0: than the table says that a worker takes")
	f.Uint64Var(&r.seed, "seed", 1, "of the noise of steps and the chances of policies")
	f.StringVar(&r.json, "json", "", "write the result, with all requests, as JSON to this file; - for standard output, instead of the text")
	cmd.RunE = func(cmd *cobra.Command, args []string) error { return r.run(cmd, args[0]) }
	return cmd
}

func (r *replayFlags) run(cmd *cobra.Command, path string) error {
	promise, err := r.promise(cmd.Flags().Changed("workers"))
	if err != nil {
		return usageError{err}
	}
	table, err := openTable(r.table)
	if err != nil {
		return usageError{err}
	}
	log, err := r.read(cmd.Context(), path)
	if cmd.Context().Err() != nil {
		return errors.New("replay: interrupted")
	}
	if err != nil {
		return usageError{err}
	}
	load, err := r.load(log, table, cmd.ErrOrStderr())
	if err != nil {
		return usageError{fmt.Errorf("%s: %w", path, err)}
	}
	runs, err := r.runs(log, load)
	if err != nil {
		return usageError{err}
	}
	out, err := createJSON(r.json)
	if err != nil {
		return fmt.Errorf("replay: --json: %w", err)
	}
	began := time.Now()
	if err := replay(cmd.Context(), table, r.seed, load, runs, cmd.ErrOrStderr()); err != nil {
		out.drop()
		if errors.Is(err, context.Canceled) {
			err = errors.New("interrupted")
		}
		return fmt.Errorf("replay: %w", err)
	}
	result := r.result(log, table, load, runs, promise)
	if r.json == "-" {
		return encodeJSON(cmd.OutOrStdout(), result)
	}
	return errors.Join(result.show(cmd.OutOrStdout(), time.Since(began)),
		named("replay: --json", out.keep(func(w io.Writer) error { return encodeJSON(w, result) })))
}

// promise checks the flags.
func (r *replayFlags) promise(workersGiven bool) (out sim.Promise, err error) {
	switch {
	case !(r.speed >= 1e-3 && r.speed <= 1e3):
		return out, fmt.Errorf("--speed %v: want 0.001 to 1000", r.speed)
	case r.workers < 0 || r.workers > mostWorkers || r.workers == 0 && workersGiven:
		return out, fmt.Errorf("--workers %d: want 1 to %d", r.workers, mostWorkers)
	case r.workers > 0 && len(r.fleets) > 0:
		return out, errors.New("--workers and --fleet: give one of them")
	case r.perThousand < 0:
		return out, fmt.Errorf("--ttft-per-1000 %v: want 0 or more", r.perThousand)
	case r.maxContext < 0:
		return out, fmt.Errorf("--max-context %d: want 0 or more", r.maxContext)
	}
	for _, p := range r.policies {
		if err := pick.ValidPolicy(p); err != nil {
			return out, fmt.Errorf("--policy: %w", err)
		}
	}
	if out.SLO, err = parseSLO(r.slo); err != nil {
		return out, err
	}
	if out.PerToken = r.perThousand / 1000; out.TTFT == 0 && r.perThousand > 0 {
		return out, errors.New("--ttft-per-1000 adds to the ttft of --slo, which has none")
	}
	return out, nil
}

// read reads the log, without other models than --model.
func (r *replayFlags) read(ctx context.Context, path string) (*requestlog.Log, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	log, err := requestlog.Read(untilOver{ctx, f})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if len(log.Requests) == 0 {
		return nil, fmt.Errorf("%s: it has no request", path)
	}
	if r.model != "" {
		others := map[string]bool{}
		log.Requests = slices.DeleteFunc(log.Requests, func(q requestlog.Request) bool {
			if q.Model != r.model && q.Model != "" {
				others[q.Model] = true
			}
			return q.Model != r.model
		})
		if len(log.Requests) == 0 {
			return nil, fmt.Errorf("%s: no request is for --model %s; they are for %s", path, openai.Clip(r.model), openai.Clip(strings.Join(slices.Sorted(maps.Keys(others)), ", ")))
		}
	}
	return log, nil
}

// load makes the load. It says what is not in it.
func (r *replayFlags) load(log *requestlog.Log, t *steptable.Table, stderr io.Writer) (*sim.Logged, error) {
	most, why := room(t, r.maxContext)
	load := sim.FromLog(log, r.speed, most)
	if len(load.Requests) == 0 {
		return nil, fmt.Errorf("no request of the %d can be replayed: of %d no token came, %d have several choices, and %d have more than %d tokens, %s",
			len(log.Requests), load.Empty, load.Several, load.Long, most, why)
	}
	say := func(n int, format string, args ...any) {
		if n > 0 {
			fmt.Fprintf(stderr, "%d of %d requests %s\n", n, len(log.Requests), fmt.Sprintf(format, args...))
		}
	}
	say(load.Empty, "are left out: no token of their answers came")
	say(load.Several, "are left out: they have several choices")
	say(load.Long, "are left out: they have more than %d tokens, %s", most, why)
	estimated, models := 0, map[string]bool{}
	for _, q := range load.Lines {
		if models[q.Model] = true; q.Estimated {
			estimated++
		}
	}
	say(estimated, "have prompts of an estimated length: nobody had counted them")
	if log.Dropped > 0 {
		fmt.Fprintf(stderr, "%d more requests are not in the log: the router had no time or no disk for them\n", log.Dropped)
	}
	if log.Cut {
		fmt.Fprintln(stderr, "the last line is not whole and does not count: the log is still being written, or was cut")
	}
	if delete(models, ""); len(models) > 0 && !models[t.About.Model] {
		fmt.Fprintf(stderr, "the requests are for %s, and the table is of %s: unless that is the same model, the times are another one's\n",
			openai.Clip(strings.Join(slices.Sorted(maps.Keys(models)), ", ")), t.About.Model)
	}
	if t.HeldOut.Bad() {
		fmt.Fprintf(stderr, "the table is off by %.1f %% (median) and %.1f %% (p90) of steps that it is not made of, which makes it a bad one: %s\n", 100*t.HeldOut.Median, 100*t.HeldOut.P90, remeasure)
	}
	if len(models) > 1 {
		fmt.Fprintf(stderr, "the requests are for %d models, and all go to one fleet here; --model chooses one\n", len(models))
	}
	return load, nil
}

// replayRun is a fleet with a policy, and what its clients saw.
type replayRun struct {
	split  sim.Split
	policy string
	out    []sim.Outcome
}

// runs are those that the flags ask for.
func (r *replayFlags) runs(log *requestlog.Log, load *sim.Logged) (runs []*replayRun, err error) {
	splits := []sim.Split{shown(load.Lines)}
	switch {
	case r.workers > 0:
		splits = sim.Splits(r.workers)
	case len(r.fleets) > 0:
		splits = nil
		for _, text := range r.fleets {
			s, err := parseFleet(text)
			if err != nil {
				return nil, err
			}
			splits = append(splits, s)
		}
	case splits[0] == sim.Split{}:
		return nil, errors.New("the log names no workers: --fleet is needed")
	}
	policies := r.policies
	if len(policies) == 0 {
		if policies = []string{log.Policy}; pick.ValidPolicy(log.Policy) != nil {
			return nil, fmt.Errorf("the log's policy %q is none of this xpyd's: --policy is needed", openai.Clip(log.Policy))
		}
	}
	for _, s := range splits {
		for _, p := range policies {
			runs = append(runs, &replayRun{split: s, policy: p})
		}
	}
	return runs, nil
}

// shown is the fleet that served requests.
func shown(lines []*requestlog.Request) sim.Split {
	prefill, decode := map[string]bool{}, map[string]bool{}
	for _, q := range lines {
		if prefill[q.Prefill], decode[q.Decode] = true, true; len(decode) > mostWorkers || len(prefill) > mostWorkers {
			return sim.Split{}
		}
	}
	delete(prefill, "")
	delete(decode, "")
	if len(prefill) == 0 {
		return sim.Split{Whole: len(decode)}
	}
	return sim.Split{Prefill: len(prefill), Decode: len(decode)}
}

// parseFleet reads 2P2D, 4 or "4 whole", or "4 mixed".
func parseFleet(text string) (sim.Split, error) {
	count := func(s string) int {
		if n, err := strconv.Atoi(s); err == nil && n >= 1 && n <= mostWorkers {
			return n
		}
		return 0
	}
	prefill, rest, split := strings.Cut(strings.ToUpper(text), "P")
	decode, isDecode := strings.CutSuffix(rest, "D")
	s := sim.Split{Prefill: count(prefill), Decode: count(decode)}
	if !split {
		s = sim.Split{Whole: count(strings.TrimSpace(strings.TrimSuffix(text, "whole")))}
		if n, mixed := strings.CutSuffix(text, "mixed"); mixed {
			s = sim.Split{Mixed: count(strings.TrimSpace(n))}
		}
	}
	if s.Whole+s.Mixed == 0 && (!isDecode || s.Prefill == 0 || s.Decode == 0) {
		return s, fmt.Errorf("--fleet %q: want 2P2D, 4 for whole workers, or 4 mixed; 1 to %d of each", openai.Clip(text), mostWorkers)
	}
	return s, nil
}

// lastWait is how long the last requests may take: as long as a router lets them.
const lastWait = 10 * time.Minute

// replay runs the load through all fleets, as many at once as there are processors.
func replay(ctx context.Context, t *steptable.Table, seed uint64, load *sim.Logged, runs []*replayRun, stderr io.Writer) error {
	progress := &sim.Progress{}
	defer telling(stderr, progress)()
	all, ctx := errgroup.WithContext(ctx)
	all.SetLimit(runtime.GOMAXPROCS(0))
	until := load.Requests[len(load.Requests)-1].At + lastWait
	for _, one := range runs {
		all.Go(func() (err error) {
			cfg := twinOf(t, sim.Promise{}, seed, false) // its limits are to judge by, not to plan by
			cfg = one.split.Of(cfg)
			cfg.Pick.Policy = one.policy
			progress.Tries.Add(1)
			if one.out, err = sim.Run(ctx, cfg, sim.Load{Requests: load.Requests, Until: until, Ended: func(*sim.Outcome) bool {
				progress.Requests.Add(1)
				return true
			}}); err != nil {
				return fmt.Errorf("%v: %w", one.split, err)
			}
			for i := range one.out {
				one.out[i] = one.out[i].As(load.Lines[i])
			}
			return nil
		})
	}
	return all.Wait()
}
