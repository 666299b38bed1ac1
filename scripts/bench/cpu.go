package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/scripts/bench/harness"
)

// cpuBench measures decode on the CPU beside llama2.c's run, and what a pair of workers
// costs over a single one.
type cpuBench struct {
	*harness.Bench
	llama2c, llama2cOMP string // llama2.c's run
	decoder             string // our decode benchmark
}

func (b *cpuBench) flags(f *flag.FlagSet) {
	const build = "karpathy/llama2.c's run.c, made with gcc -Ofast -march=native run.c -lm"
	f.StringVar(&b.llama2c, "run", "", build+"; without it the decode figures are left out")
	f.StringVar(&b.llama2cOMP, "run-omp", "", "the same with -fopenmp")
}

func (b *cpuBench) open(ctx context.Context) error {
	b.decoder = filepath.Join(b.Dir, "decode")
	return buildDecode(ctx, ".", b.decoder)
}

func (b *cpuBench) parts() []part {
	decode := func(s *shape, threads int) func(context.Context) error {
		return func(ctx context.Context) error { return b.decode(ctx, s, threads) }
	}
	return []part{
		{"cpu.decode_ratio.260k", decode(&shapes[0], 1)},
		{"cpu.decode_ratio.15m", decode(&shapes[1], 1)},
		{"cpu.decode_ratio.110m", decode(&shapes[2], 1)},
		{"cpu.two_thread_ratio", decode(&shapes[2], 2)},
		{"cpu.batch8_ratio", b.batch8},
		{"e2e.ready_s", b.ready},
		{"e2e.ttft_overhead_ms", b.ttft},
	}
}

// pairs runs the peer and ours in turn; the first pair is not counted.
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

// shape is a model of the decode figures, by its name in kernels/cpu's BenchmarkDecode,
// which decodes with paged KV and digests, from an empty context to a full one.
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

// decode runs a decode benchmark: tokens a second of so many sequences at once, each from
// an empty context to a full one. CPU is for taskset; "": any.
func (s *shape) decode(ctx context.Context, binary, cpu string, threads, batch int) (float64, error) {
	argv := []string{binary, "-test.run", "^$", "-test.benchtime", strconv.Itoa(s.context) + "x", "-test.bench",
		fmt.Sprintf("^BenchmarkDecode$/^%s$/^f32$/^threads=%d$/^batch=%d$", s.name, threads, batch)}
	if cpu != "" {
		argv = append([]string{"taskset", "-c", cpu}, argv...)
	}
	return speed(ctx, decoded, argv, nil)
}

// speed runs a program that prints what it reached.
func speed(ctx context.Context, reached *regexp.Regexp, argv, env []string) (float64, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env = append(os.Environ(), env...)
	out, err := cmd.CombinedOutput()
	m := reached.FindSubmatch(out)
	if err != nil || m == nil {
		return 0, fmt.Errorf("%v: %v: %s", argv, err, out)
	}
	return strconv.ParseFloat(string(m[1]), 64)
}

var achieved = regexp.MustCompile(`achieved tok/s: ([0-9.]+)`)

// decode compares batch-1 decode with llama2.c's run.
func (b *cpuBench) decode(ctx context.Context, s *shape, threads int) error {
	f := figures.Figure{Name: "cpu.decode_ratio." + s.name, Unit: "tokens/s", Peer: "llama2.c run, -Ofast -march=native, 1 thread", Model: s.about()}
	program := b.llama2c
	if threads > 1 {
		f.Name, f.Peer, program = "cpu.two_thread_ratio", "llama2.c run, -Ofast -march=native -fopenmp, 2 threads", b.llama2cOMP
	}
	if program == "" {
		b.Sayf("%s: left out: -run or -run-omp is not given", f.Name)
		return nil
	}
	checkpoint, tokens := filepath.Join(b.Dir, s.name+".bin"), filepath.Join(b.Dir, s.name+".tok")
	if err := errors.Join(s.writeCheckpoint(checkpoint), s.writeTokens(tokens)); err != nil {
		return err
	}
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

// writeCheckpoint writes random weights as llama2.c's legacy checkpoint: its header, the
// weights in any order, for the speed is the same, and the rotary tables, which it skips.
func (s *shape) writeCheckpoint(path string) error {
	kvDim, dim := s.hidden/s.heads*s.kv, s.hidden
	floats := s.vocab*dim + s.layers*(2*dim+2*dim*dim+2*dim*kvDim+3*dim*s.inner) + dim + s.context*dim/s.heads
	return write(path, func(w *bufio.Writer) error {
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
		return nil
	})
}

// writeTokens writes a vocabulary of numbered pieces as llama2.c has it.
func (s *shape) writeTokens(path string) error {
	return write(path, func(w *bufio.Writer) error {
		err := binary.Write(w, binary.LittleEndian, int32(8)) // the longest piece
		for i := range s.vocab {
			piece := fmt.Sprintf("t%d", i)
			err = errors.Join(err, binary.Write(w, binary.LittleEndian, struct {
				Score  float32
				Length int32
			}{0, int32(len(piece))}))
			_, e := w.WriteString(piece)
			err = errors.Join(err, e)
		}
		return err
	})
}

func write(path string, put func(*bufio.Writer) error) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	w := bufio.NewWriterSize(f, 1<<20)
	return errors.Join(put(w), w.Flush(), f.Close())
}

// up starts `xpyd up`, and returns its URL and how long that took.
func up(ctx context.Context, b *harness.Bench, args ...string) (p *harness.Process, url string, took time.Duration, err error) {
	binary, err := b.Binary(ctx)
	if err != nil {
		return nil, "", 0, err
	}
	argv := append([]string{binary, "up", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"}, args...)
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

// ttft compares the first token of a stream through router, prefill, push and
// decode with a single worker's that does both phases, p50 of 100 requests one
// after the other. The figure's value is the difference.
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
	var both, alone []float64
	for i := range 120 {
		var ms [2]float64
		for k, to := range []string{url, "http://" + addr} { // no prompt is like another: no prefix hit on either side
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

// firstToken is the time to the first data line of a stream, in ms.
func firstToken(ctx context.Context, url, prompt string) (float64, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	body := fmt.Sprintf(`{"model":"stories260k","prompt":%q,"max_tokens":4,"temperature":0,"stream":true}`, prompt)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions", strings.NewReader(body))
	if err != nil {
		return 0, err
	}
	req.Header.Set("Content-Type", "application/json")
	start := time.Now()
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	first := 0.0
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); { // to the end, for the connection's sake
		if first == 0 && bytes.HasPrefix(lines.Bytes(), []byte("data: {")) {
			first = float64(time.Since(start).Microseconds()) / 1000
		}
	}
	if first == 0 {
		return 0, fmt.Errorf("%s: no token, status %d", url, resp.StatusCode)
	}
	return first, nil
}
