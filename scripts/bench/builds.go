package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/scripts/bench/harness"
)

// turns is how often the two routers alternate in a round. A shared machine is slow for
// seconds at a time; short turns make that hit both.
const turns = 10

// builds compares this tree with an earlier commit, which it builds: the router's processor
// time per request, and decode on the CPU.
type builds struct {
	*router                     // for its engines
	before, routerName, cpuName string
	tree                        string    // work tree of the earlier commit
	routerBefore                string    // its xpyd
	decoders                    [2]string // decode benchmarks: this tree's, the earlier commit's
}

func (b *builds) flags(f *flag.FlagSet) {
	f.StringVar(&b.before, "before", "", "the earlier commit")
	f.StringVar(&b.routerName, "router-name", "router.build_ratio", "name of the router's figures, less .nonstream and .stream16")
	f.StringVar(&b.cpuName, "cpu-name", "cpu.build_ratio", "name of decode's figure, less .110m")
	f.IntVar(&b.requests, "requests", 6000, "to each router in a round")
}

func (b *builds) parts() []part {
	routers := func(name string, stream bool) part {
		return part{"router." + name, func(ctx context.Context) error { return b.routers(ctx, name, stream) }}
	}
	return []part{routers("nonstream", false), routers("stream16", true), {"cpu.110m", b.decoding}}
}

// open builds the earlier commit in a work tree of its own.
func (b *builds) open(ctx context.Context) error {
	if b.before == "" {
		return errors.New("name the earlier commit: -before")
	}
	if err := b.checkOut(ctx); err != nil {
		return err
	}
	b.routerBefore, b.decoders = filepath.Join(b.Dir, "xpyd-before"), [2]string{filepath.Join(b.Dir, "decode"), filepath.Join(b.Dir, "decode-before")}
	if b.Wants("router.nonstream") || b.Wants("router.stream16") {
		if err := errors.Join(harness.Build(ctx, b.tree, b.routerBefore, "0"), b.engines(ctx)); err != nil {
			return err
		}
	}
	if b.Wants("cpu.110m") {
		return errors.Join(buildDecode(ctx, b.tree, b.decoders[1]), buildDecode(ctx, ".", b.decoders[0]))
	}
	return nil
}

// checkOut makes a work tree of the earlier commit.
func (b *builds) checkOut(ctx context.Context) error {
	commit, err := harness.Run(ctx, nil, "git", "rev-parse", "--short=12", b.before+"^{commit}")
	if err != nil {
		return err
	}
	hash := strings.TrimSpace(commit)
	b.Command = strings.Replace(b.Command, " "+b.before, " "+hash, 1)
	b.before = hash
	b.tree = filepath.Join(b.Dir, "before")
	_, err = harness.Run(ctx, nil, "git", "worktree", "add", "--detach", b.tree, hash)
	return err
}

func (b *builds) close() error {
	if b.tree == "" {
		return nil
	}
	_, err := harness.Run(context.Background(), nil, "git", "worktree", "remove", "--force", b.tree)
	return err
}

// add records the ratio of now over before by the worse end of its median's 95 % interval:
// the upper end where less is better, the lower end where more is.
func (b *builds) add(name, unit, model, peer string, now, before []float64, more bool) error {
	f := figures.Figure{Name: name}.Ratios(now, before)
	ratios := make([]float64, len(now))
	for i := range ratios {
		ratios[i] = now[i] / before[i]
	}
	low, high := figures.MedianWithin(ratios)
	end, which := high, "upper"
	if more {
		end, which = low, "lower"
	}
	return b.Add(figures.Figure{Name: name, Value: end, PeerValue: 1, Ratio: end, Unit: "x", Peer: peer, Runs: f.Runs,
		Model:  fmt.Sprintf("%s; %s end of the median's 95 %% interval", model, which),
		Spread: fmt.Sprintf("median %.4f, 95 %% interval %.4f..%.4f; now %.4g %s, before %.4g %s", f.Ratio, low, high, f.Value, unit, f.PeerValue, unit)})
}

func (b *builds) earlier() string { return "the build before, " + b.before }

// routers compares the processor time per request. Each round starts both builds afresh.
func (b *builds) routers(ctx context.Context, name string, stream bool) error {
	now, err := b.Binary(ctx)
	if err != nil {
		return err
	}
	req := post("/v1/completions", completion(words(2<<10), stream, 16, ""))
	n := max(b.requests/turns, 1)
	us := map[string][]float64{}
	for round := range b.Rounds {
		used, err := b.alternate(ctx, []target{b.build(b.routerBefore), b.build(now)}, round, n, req)
		if err != nil {
			return err
		}
		for binary, took := range used {
			us[binary] = append(us[binary], float64(took.Nanoseconds())/1e3/float64(turns*n))
		}
		b.Sayf("%s round %d: now %.2f, before %.2f us of processor a request, %d requests in %d turns", name, round, us[now][round], us[b.routerBefore][round], turns*n, turns)
	}
	return b.add(b.routerName+"."+name, "us", "mock engines, 2 KB prompt, c=32", b.earlier(), us[now], us[b.routerBefore], false)
}

// build is the router of a binary.
func (b *builds) build(binary string) target {
	return target{name: binary, start: func(ctx context.Context) (*harness.Process, error) { return b.routerOf(ctx, binary) }}
}

// alternate starts the routers, drives them in turns of n requests, each turn with another
// one first, and returns each router's processor time.
func (b *builds) alternate(ctx context.Context, routers []target, round, n int, req []byte) (map[string]time.Duration, error) {
	var started []*harness.Process
	used := map[string]time.Duration{}
	for _, r := range routers {
		p, err := r.start(ctx)
		if err == nil {
			defer p.Kill()
			_, err = drive(p.Addr, 32, max(b.requests/5, 1), req)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", r.name, err)
		}
		started = append(started, p)
	}
	for turn := range turns * len(started) {
		at := (turn + turn/len(started) + round) % len(started)
		p := started[at]
		before := p.CPU()
		if _, err := drive(p.Addr, 32, n, req); err != nil {
			return nil, fmt.Errorf("%s: %w", routers[at].name, err)
		}
		used[routers[at].name] += p.CPU() - before
	}
	return used, nil
}

// decoding compares decode of the 110M shape, one thread, batch 1, by both trees'
// BenchmarkDecode of kernels/cpu. Which runs first alternates.
func (b *builds) decoding(ctx context.Context) error {
	speeds := map[string][]float64{}
	for round := range b.Rounds + 1 {
		for i := range b.decoders {
			binary := b.decoders[(i+round)%2]
			v, err := shapes[2].decode(ctx, binary, proxyCPU, 1, 1)
			if err != nil {
				return err
			}
			if round > 0 { // round 0 warms up
				speeds[binary] = append(speeds[binary], v)
			}
		}
		if round > 0 {
			b.Sayf("decode round %d: now %.2f, before %.2f tokens/s", round, speeds[b.decoders[0]][round-1], speeds[b.decoders[1]][round-1])
		}
	}
	return b.add(b.cpuName+".110m", "tokens/s", "110M shape, random f32 weights, 1 thread, batch 1", b.earlier(), speeds[b.decoders[0]], speeds[b.decoders[1]], true)
}
