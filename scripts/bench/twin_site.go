package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/loadgen/report"
	"github.com/xpyd/xpyd/internal/loadgen/workload"
	"github.com/xpyd/xpyd/internal/model/modeltest"
	"github.com/xpyd/xpyd/internal/sim"
	"github.com/xpyd/xpyd/internal/steptable"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/scripts/bench/harness"
	"github.com/xpyd/xpyd/worker"
)

// machine is what a fleet's workers run on, with its step table.
type machine struct {
	*twinBench
	about string
	args  []string // of a worker
	timed []string // of xpyd bench step besides: KV stays on the GPU
	env   []string
	sizes sizes
	write func(ctx context.Context, dir string) error // the model
	gpu   bool                                        // all workers share it
	model string
	table *steptable.Table
	fit   fitted
}

// fitted is what the table does not have, measured by loads of its own.
type fitted struct {
	Front  time.Duration `json:"front"`  // of a request to a worker and back, at least
	Jitter time.Duration `json:"jitter"` // what comes to it, in the mean
	Host   time.Duration `json:"host"`   // between two steps
	Turns  float64       `json:"turns"`  // what workers lose that share a device
	Rate   float64       `json:"rate"`   // usual requests a second that the fleet takes
}

func (b *twinBench) onCPU() *machine {
	return &machine{twinBench: b, about: "CPU, a thread a worker; 15M shape, 512 tokens, 2,048 positions, random f32 weights",
		args: []string{"--threads", "1", "--device", "cpu"}, sizes: sizes{in: 200, out: 50, prefix: 1, most: 2000, trace: 16, batch: 8},
		write: func(_ context.Context, dir string) (err error) {
			c := modeltest.Stories15M()
			c.Vocab, c.MaxPositions = 512, 2048
			files := map[string][]byte{}
			for _, name := range []string{"tokenizer.json", "tokenizer_config.json"} {
				if files[name], err = os.ReadFile(filepath.Join("internal/model/stories260k", name)); err != nil {
					return err
				}
			}
			return modeltest.WriteHF(dir, c, modeltest.HFOptions{Seed: 1, DType: kernels.F32, Files: files})
		}}
}

func (b *twinBench) onGPU() *machine {
	return &machine{twinBench: b, about: "one GPU; Llama-3-8B shape, 512 tokens, random bf16 weights", gpu: true,
		args: []string{"--device", "cuda"}, timed: []string{"--max-context", "16384", "--kv-bandwidth", "300GB", "--kv-latency", "300us"}, env: []string{"XPYD_CUDA_LIB=" + b.library},
		sizes: sizes{in: 1000, out: 128, prefix: 4, most: 16000, trace: 1, batch: 64},
		write: func(ctx context.Context, dir string) error { _, err := make8B(ctx, dir); return err }}
}

// folder is where the model is, its table, and what fleets were measured to do.
func (m *machine) folder() string { return cmp.Or(m.keep, m.Dir) }

// prepare makes the model and times its steps, unless that was done before.
func (m *machine) prepare(ctx context.Context) error {
	if m.table != nil {
		return nil
	}
	m.model = filepath.Join(m.folder(), m.device+"-model")
	path := filepath.Join(m.folder(), m.device+".json")
	if _, err := os.Stat(path); err != nil {
		if err := m.write(ctx, m.model); err != nil {
			return err
		}
		argv := append([]string{m.XPYD, "bench", "step", "--model", m.model, "--time", m.stepTime.String(), "--out", path}, slices.Concat(m.args, m.timed)...)
		out, err := harness.Run(ctx, m.env, argv...)
		if err != nil {
			return err
		}
		m.Sayf("%s", out)
	}
	var err error
	m.table, err = steptable.Open(path)
	return err
}

// start starts a fleet with a router; stop ends it.
func (m *machine) start(ctx context.Context, s sim.Split) (url string, stop func() error, err error) {
	var list []*harness.Process
	stop = func() (err error) {
		for _, p := range slices.Backward(list) {
			err = errors.Join(err, p.Stop())
		}
		return err
	}
	env, common := append(plainEnv(), m.env...), append([]string{"--model", m.model}, m.args...)
	saying := func(prefix string, argv ...string) (rest string, err error) {
		var p *harness.Process
		p, rest, _, err = m.Saying(ctx, prefix, harness.Spec{Name: argv[0], Env: env, Argv: append([]string{m.XPYD}, argv...)})
		if err == nil {
			list = append(list, p)
		}
		return rest, err
	}
	if s.Whole == 0 {
		url, err := saying("ready ", append([]string{"up", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0",
			"--data", filepath.Join(m.Dir, "pair"), "--prefill", strconv.Itoa(s.Prefill), "--decode", strconv.Itoa(s.Decode)}, common...)...)
		return url, stop, err
	}
	addr, err := harness.FreeAddr()
	if err != nil {
		return "", stop, err
	}
	w, err := m.Listening(ctx, addr, harness.Spec{Name: "whole", Env: env, Argv: append([]string{m.XPYD, "decode", "--listen", addr, "--trust-everyone", "--served-name", "m"}, common...)})
	if err != nil {
		return "", stop, err
	}
	list = append(list, w)
	file := filepath.Join(m.Dir, "router.yaml")
	yaml := fmt.Sprintf("static: [{id: whole, role: decode, url: \"http://%s\", dialect: openai, model: m}]\nfleet: {listen: \"127.0.0.1:0\"}\n", addr)
	if err := os.WriteFile(file, []byte(yaml), 0o600); err != nil {
		return "", stop, err
	}
	url, err = saying("listening ", "router", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--data", filepath.Join(m.Dir, "whole"), "--config", file)
	if err != nil {
		return "", stop, err
	}
	return url, stop, harness.Until(ctx, 2*time.Minute, func() error { _, err := m.send(ctx, url, twinLoad{"first", 1, repeated(1, 10, 2)}); return err }, list...)
}

// calibrate fits what the table does not have to one client's short requests, and to as many as the fleet takes.
func (m *machine) calibrate(ctx context.Context, s sim.Split, url string) error {
	l := twinLoad{"calibration", 1, repeated(100, 64, 60)}
	got, err := m.send(ctx, url, l)
	if err != nil {
		return err
	}
	m.fit = fitted{}
	bare, err := m.simulate(ctx, s, l, 0)
	if err != nil {
		return err
	}
	ms := func(v float64) time.Duration { return max(0, time.Duration(v*float64(time.Millisecond))) }
	front := got.TTFT - bare.TTFT
	// An exponential distribution has its median and its 90th percentile ln 5 times its mean apart.
	jitter := min(max(0, got.Upper-bare.Upper)/math.Log(5), max(0, front))
	m.fit.Front, m.fit.Jitter = ms(front-jitter), ms(jitter)
	if !m.gpu { // which computes meanwhile
		m.fit.Host = ms(got.TPOT - bare.TPOT)
	}
	clients := 2 * m.sizes.batch
	l = twinLoad{"capacity", clients, repeated(6*clients, m.sizes.in, m.sizes.out)}
	top, err := m.send(ctx, url, l)
	if err != nil {
		return err
	}
	m.fit.Rate = top.Rate / float64(m.sizes.out)
	if m.gpu && s.Whole == 0 {
		const guess = 0.1
		var rates [2]float64
		for i := range rates {
			m.fit.Turns = guess * float64(i)
			out, err := m.simulate(ctx, s, l, 0)
			if err != nil {
				return err
			}
			rates[i] = out.Rate
		}
		m.fit.Turns = max(0, guess*(rates[0]-top.Rate)/(rates[0]-rates[1]))
	}
	m.Sayf("%s, %v: one client: real %v; twin %v; at most %v; so %+v", m.device, s, got, bare, top, m.fit)
	return nil
}

// send runs a load against a server.
func (m *machine) send(ctx context.Context, url string, l twinLoad) (got measured, err error) {
	argv := sending(m.XPYD, url, m.sent)
	m.sent++
	if l.closed > 0 {
		e := l.entries[0]
		argv = append(argv, "--concurrency", strconv.Itoa(l.closed), "--requests", strconv.Itoa(len(l.entries)), "--input", strconv.Itoa(e.In), "--output", strconv.Itoa(e.Out))
	} else {
		file := filepath.Join(m.Dir, "load.jsonl")
		if err := writeTrace(file, l.entries); err != nil {
			return got, err
		}
		argv = append(argv, "--trace", file)
	}
	p, err := benched(ctx, m.Bench, 10*m.window+time.Minute, argv...)
	if err != nil {
		return got, err
	}
	if p.Requests.Failed > 0 {
		return got, fmt.Errorf("the report: %+v", p)
	}
	return measuredBy(p), nil
}

// benched runs a command line of `xpyd bench` that has one phase, and returns that.
func benched(ctx context.Context, b *harness.Bench, limit time.Duration, argv ...string) (*report.Phase, error) {
	var all report.Report
	if _, err := b.Output(ctx, limit, &all, nil, argv...); err != nil {
		return nil, err
	}
	if len(all.Phases) != 1 || all.Phases[0].Requests.Completed == 0 {
		return nil, fmt.Errorf("the report: %+v", all)
	}
	return &all.Phases[0], nil
}

func measuredBy(p *report.Phase) measured {
	return measured{TTFT: p.Latency.TTFT.Mean, TPOT: p.Latency.TPOT.Mean, P99: p.Latency.TTFT.P99, Rate: p.Throughput.OutputTokens,
		Upper: p.Latency.TTFT.P90 - p.Latency.TTFT.P50}
}

// sending are the flags of an `xpyd bench` whose prompts are of token ids and not those of another seed's, which
// caches may have.
func sending(xpyd, url string, seed uint64) []string {
	return []string{xpyd, "bench", "--url", url, "--endpoint", "completions", "--prompt-ids", "3-500", "--ignore-eos", "--progress", "off", "--json", "-",
		"--seed", strconv.FormatUint(seed, 10)}
}

// writeTrace writes a Mooncake trace.
func writeTrace(path string, entries []workload.Entry) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	enc := json.NewEncoder(f)
	for i := range entries {
		e := &entries[i]
		line := map[string]any{"timestamp": float64(e.At) / float64(time.Millisecond), "input_length": e.In, "output_length": e.Out, "hash_ids": e.Blocks}
		if err := enc.Encode(line); err != nil {
			return errors.Join(err, f.Close())
		}
	}
	return f.Close()
}

// config is a fleet's twin.
func (m *machine) config(s sim.Split, seed uint64) sim.Config {
	w := worker.DefaultConfig(fleet.Decode)
	w.MaxBatch, w.StepTokens = m.table.About.MaxBatch, m.table.About.StepTokens
	cfg := sim.On(m.table, worker.EngineConfig(&w, m.gpu))
	cfg.Whole, cfg.Prefill, cfg.Decode, cfg.Seed = s.Whole, s.Prefill, s.Decode, seed
	cfg.Front, cfg.Back, cfg.Worker.Host = m.fit.Front/2, m.fit.Front-m.fit.Front/2, m.fit.Host
	cfg.OneDevice, cfg.Turns, cfg.Jitter = m.gpu, m.fit.Turns, m.fit.Jitter
	return cfg
}
