package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/internal/loadgen/client"
	"github.com/xpyd/xpyd/scripts/bench/harness"
)

// cpuBench measures decode on the CPU beside llama2.c's run, and what a pair of workers
// costs over a single one.
type cpuBench struct {
	base
	llama2c, llama2cOMP string // llama2.c's run
	decoder             string // our decode benchmark
}

func (b *cpuBench) flags(f *flag.FlagSet) {
	f.StringVar(&b.llama2c, "run", "", "karpathy/llama2.c's run.c, built with gcc -Ofast -march=native run.c -lm; without it there are no decode figures")
	f.StringVar(&b.llama2cOMP, "run-omp", "", "the same with -fopenmp")
}

func (b *cpuBench) open(ctx context.Context) error {
	b.decoder = filepath.Join(b.Dir, "decode")
	return buildDecode(ctx, ".", b.decoder)
}

func (b *cpuBench) parts() []part {
	decode := func(name string, s *shape, threads int) part {
		return part{name, func(ctx context.Context) error { return b.decode(ctx, name, s, threads) }}
	}
	return []part{
		decode("cpu.decode_ratio.260k", &shapes[0], 1),
		decode("cpu.decode_ratio.15m", &shapes[1], 1),
		decode("cpu.decode_ratio.110m", &shapes[2], 1),
		decode("cpu.two_thread_ratio", &shapes[2], 2),
		{"cpu.batch8_ratio", b.batch8},
		{"e2e.ready_s", b.ready},
		{"e2e.ttft_overhead_ms", b.ttft},
	}
}

// pairs alternates the peer and ours; the first pair only warms up.
func (b *cpuBench) pairs(f figures.Figure, ours, peer func() (float64, error)) error {
	var mine, theirs []float64
	for round := range b.Rounds + 1 {
		p, err := peer()
		if err != nil {
			return fmt.Errorf("peer: %w", err)
		}
		o, err := ours()
		if err != nil {
			return err
		}
		b.Sayf("%s round %d: ours %.4f peer %.4f %s ratio %.4f", f.Name, round, o, p, f.Unit, o/p)
		if round > 0 {
			mine, theirs = append(mine, o), append(theirs, p)
		}
	}
	return b.Add(f.Ratios(mine, theirs))
}

// shape is a model of the decode figures, named as in kernels/cpu's BenchmarkDecode, which
// decodes with paged KV and digests from an empty context to a full one.
type shape struct {
	name                                    string
	layers, hidden, inner, heads, kv, vocab int
	context                                 int
}

var shapes = []shape{{"260k", 5, 64, 172, 8, 4, 512, 256}, {"15m", 6, 288, 768, 6, 6, 32000, 256}, {"110m", 12, 768, 2048, 12, 12, 32000, 128}}

// buildDecode builds the decode benchmark of the tree at root.
func buildDecode(ctx context.Context, root, out string) error {
	return harness.BuildTest(ctx, root, out, "./kernels/cpu")
}

var decoded = regexp.MustCompile(`([0-9.e+]+) tok/s`)

// decode runs a decode benchmark and returns tokens a second over batch sequences. cpu is
// for taskset; "" means any.
func (s *shape) decode(ctx context.Context, binary, cpu string, threads, batch int) (float64, error) {
	argv := []string{binary, "-test.run", "^$", "-test.benchtime", strconv.Itoa(s.context) + "x", "-test.bench",
		fmt.Sprintf("^BenchmarkDecode$/^%s$/^f32$/^threads=%d$/^batch=%d$", s.name, threads, batch)}
	if cpu != "" {
		argv = append([]string{"taskset", "-c", cpu}, argv...)
	}
	return speed(ctx, decoded, argv, nil)
}

// speed runs a program and returns the number that pattern finds in its output.
func speed(ctx context.Context, pattern *regexp.Regexp, argv, env []string) (float64, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	out, err := harness.Run(ctx, env, argv...)
	if err != nil {
		return 0, err
	}
	m := pattern.FindStringSubmatch(out)
	if m == nil {
		return 0, fmt.Errorf("%v printed no figure: %s", argv, out)
	}
	return strconv.ParseFloat(m[1], 64)
}

var achieved = regexp.MustCompile(`achieved tok/s: ([0-9.]+)`)

// decode compares batch-1 decode with llama2.c's run.
func (b *cpuBench) decode(ctx context.Context, name string, s *shape, threads int) error {
	program, peer := b.llama2c, "llama2.c run, -Ofast -march=native, 1 thread"
	if threads > 1 {
		program, peer = b.llama2cOMP, "llama2.c run, -Ofast -march=native -fopenmp, 2 threads"
	}
	if program == "" {
		b.Sayf("%s: skipped without -run or -run-omp", name)
		return nil
	}
	checkpoint, tokens := filepath.Join(b.Dir, s.name+".bin"), filepath.Join(b.Dir, s.name+".tok")
	if err := errors.Join(s.writeCheckpoint(checkpoint), s.writeTokens(tokens)); err != nil {
		return err
	}
	f := figures.Figure{Name: name, Unit: "tokens/s", Peer: peer, Model: s.about()}
	return b.pairs(f, func() (float64, error) { return s.decode(ctx, b.decoder, "", threads, 1) }, func() (float64, error) {
		return speed(ctx, achieved, []string{program, checkpoint, "-z", tokens, "-t", "0", "-n", strconv.Itoa(s.context)}, []string{"OMP_NUM_THREADS=" + strconv.Itoa(threads)})
	})
}

func (s *shape) about() string {
	return fmt.Sprintf("%s shape, random f32 weights, %d steps", strings.ToUpper(s.name), s.context)
}

// batch8 compares batch-8 decode with batch-1, both ours, at two threads.
func (b *cpuBench) batch8(ctx context.Context) error {
	s := &shapes[2]
	return b.pairs(figures.Figure{Name: "cpu.batch8_ratio", Unit: "tokens/s", Peer: "batch 1, same backend, 2 threads", Model: s.about()},
		func() (float64, error) { return s.decode(ctx, b.decoder, "", 2, 8) }, func() (float64, error) { return s.decode(ctx, b.decoder, "", 2, 1) })
}

// writeCheckpoint writes llama2.c's legacy checkpoint: a header, random weights, and the
// rotary tables, which it skips.
func (s *shape) writeCheckpoint(path string) error {
	kvDim, dim := s.hidden/s.heads*s.kv, s.hidden
	floats := s.vocab*dim + s.layers*(2*dim+2*dim*dim+2*dim*kvDim+3*dim*s.inner) + dim + s.context*dim/s.heads
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	w := bufio.NewWriterSize(f, 1<<20)
	header := []int32{int32(dim), int32(s.inner), int32(s.layers), int32(s.heads), int32(s.kv), int32(s.vocab), int32(s.context)}
	if err := binary.Write(w, binary.LittleEndian, header); err != nil {
		return err
	}
	rnd, four := rand.New(rand.NewPCG(1, 2)), make([]byte, 4)
	for range floats {
		binary.LittleEndian.PutUint32(four, math.Float32bits(float32(rnd.NormFloat64()*0.02)))
		if _, err := w.Write(four); err != nil {
			return err
		}
	}
	return errors.Join(w.Flush(), f.Close())
}

// writeTokens writes a vocabulary of numbered pieces in llama2.c's format.
func (s *shape) writeTokens(path string) error {
	text := binary.LittleEndian.AppendUint32(nil, 8) // the longest piece
	for i := range s.vocab {
		piece := fmt.Sprintf("t%d", i)
		text = binary.LittleEndian.AppendUint32(text, 0) // its score
		text = binary.LittleEndian.AppendUint32(text, uint32(len(piece)))
		text = append(text, piece...)
	}
	return os.WriteFile(path, text, 0o644)
}

// up starts `xpyd up` on the CPU and returns its URL and how long it took to get ready.
func up(ctx context.Context, b *harness.Bench, args ...string) (p *harness.Process, url string, took time.Duration, err error) {
	binary, err := b.Binary(ctx)
	if err != nil {
		return nil, "", 0, err
	}
	argv := append([]string{binary, "up", "--device", "cpu", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"}, args...)
	return b.Saying(ctx, "ready ", harness.Spec{Name: "up", Argv: argv})
}

// ready times `xpyd up` from exec to its ready line; the limit is 2 s.
func (b *cpuBench) ready(ctx context.Context) error {
	if _, err := b.Binary(ctx); err != nil { // builds it
		return err
	}
	return b.pairs(figures.Figure{Name: "e2e.ready_s", Unit: "s", Peer: "limit: ready within 2 s", Model: "stories260k"},
		func() (float64, error) {
			p, _, took, err := up(ctx, b.Bench, "--data", filepath.Join(b.Dir, "data"))
			if err != nil {
				return 0, err
			}
			return took.Seconds(), p.Stop()
		}, func() (float64, error) { return 2, nil })
}

// ttft compares the first token of a stream through router, prefill, push and decode with
// that of a single worker which does both phases: p50 of 100 sequential requests. The
// figure's value is the difference.
func (b *cpuBench) ttft(ctx context.Context) (err error) {
	pair, url, _, err := up(ctx, b.Bench, "--data", filepath.Join(b.Dir, "data"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, pair.Stop()) }()
	addr, err := harness.FreeAddr()
	if err != nil {
		return err
	}
	single, err := b.Listening(ctx, addr, harness.Spec{Name: "single", Argv: []string{b.XPYD, "decode", "--trust-everyone", "--listen", addr, "--log-level", "warn"}})
	if err != nil {
		return err
	}
	defer single.Kill()
	var clients [2]*client.Client
	for i, to := range []string{url, "http://" + addr} {
		if clients[i], err = client.New(client.Config{URLs: []string{to}, Path: "completions", Stream: true, Timeout: time.Minute}); err != nil {
			return err
		}
		defer clients[i].Abort()
	}
	var both, alone []float64
	for i := range 120 {
		var ms [2]float64
		for k, to := range clients { // each prompt is new: no prefix hits
			if ms[k], err = firstToken(ctx, to, fmt.Sprintf("%d: Once upon a time, there was a little girl named Lily. She loved to play outside in the park.", 2*i+k+1)); err != nil {
				return err
			}
		}
		b.Book.Logf("e2e.ttft_overhead_ms request %d: pair %.3f ms, single %.3f ms", i, ms[0], ms[1])
		if i >= 20 {
			both, alone = append(both, ms[0]), append(alone, ms[1])
		}
	}
	return b.Add(figures.Figure{Name: "e2e.ttft_overhead_ms", Unit: "ms", Peer: "single worker, p50 ms; limit 3 ms over it", Model: "stories260k",
		Value: figures.Median(both) - figures.Median(alone), PeerValue: figures.Median(alone), Ratio: figures.Median(both) / figures.Median(alone), Runs: len(both),
		Spread: fmt.Sprintf("pair p50 %.3f p90 %.3f, single p50 %.3f p90 %.3f ms", figures.Median(both), figures.Quantile(both, 0.9), figures.Median(alone), figures.Quantile(alone, 0.9))})
}

// firstToken is the time to the first token of a stream, in ms.
func firstToken(ctx context.Context, c *client.Client, prompt string) (float64, error) {
	var res client.Result
	c.Do(ctx, &client.Request{Body: fmt.Appendf(nil, `{"model":"stories260k","prompt":%q,"max_tokens":4,"temperature":0,"stream":true}`, prompt)}, &res)
	if !res.OK() {
		return 0, fmt.Errorf("%s: %s", res.Kind, res.Message)
	}
	return float64(res.FirstToken.Microseconds()) / 1000, nil
}
