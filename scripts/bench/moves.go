package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/internal/model"
	"github.com/xpyd/xpyd/internal/model/modeltest"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/scripts/bench/harness"
)

// moves measures what streams see when their decode worker is drained or gets another role, and how
// long that takes. On a GPU it measures single moves and takeovers at a long context (moves_long.go);
// on the CPU those are a rehearsal.
type moves struct {
	takeover
	shape, device, library, large string
	prompt, rest, context         int // tokens
	positions, each               int
}

const (
	moveBegun = 16 // answer tokens of each stream when its worker is left
	moved     = "moved"
	waitOnly  = "wait only"
)

func (b *moves) flags(f *flag.FlagSet) {
	f.IntVar(&b.streams, "streams", 64, "streams at once, in drain and flip")
	f.IntVar(&b.threads, "threads", 1, "CPU threads of each worker")
	f.IntVar(&b.prompt, "prompt", 128, "tokens of each prompt, in drain and flip")
	f.IntVar(&b.rest, "rest", 500, "tokens that each stream has to go, in drain and flip")
	f.IntVar(&b.context, "context", 0, "tokens of a prompt, in move and takeover (8192, on the CPU 256)")
	f.IntVar(&b.each, "each", 4, "moves of a round, in move")
	f.StringVar(&b.shape, "shape", "", "110M, 15M or 8B (110M, on a GPU 8B)")
	f.StringVar(&b.device, "device", "cpu", "cpu, or cuda: all three workers on one GPU")
	f.StringVar(&b.library, "library", os.Getenv("XPYD_CUDA_LIB"), "libxpyd_cuda.so; built by scripts/build-cuda if empty")
	f.StringVar(&b.large, "dir", os.TempDir(), "a folder for the 8B model, which stays there for the next run")
}

func (b *moves) parts() []part {
	return []part{{"drain", b.drain}, {"flip", b.flip}, {"move", b.longMoves}, {"takeover", b.longTakeovers}}
}

func (b *moves) open(ctx context.Context) error {
	gpu := b.device == "cuda"
	if b.context == 0 {
		b.context = map[bool]int{true: 8192, false: 256}[gpu]
	}
	if b.shape == "" {
		b.shape = map[bool]string{true: "8B", false: "110M"}[gpu]
	}
	if gpu {
		if err := buildForGPU(ctx, b.Bench, &b.library); err != nil {
			return err
		}
		b.Book.On(gpuName(ctx))
	}
	tiny, err := model.Open(ctx, "", model.Options{})
	if err != nil {
		return err
	}
	defer tiny.Close()
	c, options := modeltest.Stories110M(), modeltest.HFOptions{Seed: 1, DType: kernels.F32}
	b.model = filepath.Join(b.Dir, "model")
	switch b.shape {
	case "110M":
	case "15M":
		c = modeltest.Stories15M()
		c.MaxPositions = 1024
	case "8B":
		b.model = filepath.Join(b.large, "xpyd-bench-moves-8b", "model") // it is served by this name
		c, options.DType = shape8B(tiny.Config), kernels.BF16
		options.Shards = c.Layers
	default:
		return fmt.Errorf("shape %q: 110M, 15M or 8B", b.shape)
	}
	b.positions = c.MaxPositions
	made := filepath.Join(b.model, "made")
	if _, err := os.Stat(made); err == nil {
		return nil
	}
	tokens, config, _ := tiny.TokenizerFiles()
	if tokens, err = enlarged(tokens, c.Vocab); err != nil {
		return err
	}
	options.Files = map[string][]byte{"tokenizer.json": tokens, "tokenizer_config.json": config}
	return errors.Join(modeltest.WriteHF(b.model, c, options), os.WriteFile(made, nil, 0o644))
}

// about describes the fleet of a figure.
func (b *moves) about() string {
	where := fmt.Sprintf("%d CPU threads a worker", b.threads)
	if b.device == "cuda" {
		where = "one prefill and two decode workers on one GPU"
	}
	return fmt.Sprintf("%s shape, random weights, 1P2D, %s", b.shape, where)
}

// body is a stream's request but for max_tokens; the prompt depends on its number alone.
func (b *moves) body(i, prompt int) string {
	return bodyOf(rand.New(rand.NewPCG(uint64(i), 3)), prompt, i+1)
}

// site is the fleet of a run.
type site struct {
	*trio
	b    *moves
	data string
}

func (b *moves) start(ctx context.Context, streams, prompt int) (s *site, err error) {
	b.bodies = nil
	for i := range streams {
		b.bodies = append(b.bodies, b.body(i, prompt))
	}
	s = &site{b: b, data: filepath.Join(b.Dir, fmt.Sprint("moves-", time.Now().UnixNano()))}
	binary, err := b.Binary(ctx)
	if err != nil {
		return nil, err
	}
	argv := []string{binary, "up", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--data", s.data, "--decode", "2", "--model", b.model,
		"--device", b.device, "--threads", strconv.Itoa(b.threads)}
	env := plainEnv()
	if b.device == "cuda" {
		argv = append(argv, "--kv-memory", "6GiB", "--kv-host-memory", "12GiB")
		env = append(env, "XPYD_CUDA_LIB="+b.library)
	} else {
		argv = append(argv, "--kv-memory", map[string]string{"110M": "4GiB", "15M": "512MiB"}[b.shape])
	}
	p, url, _, err := b.Saying(ctx, "ready ", harness.Spec{Name: "up", Argv: argv, Env: env})
	if err != nil {
		return nil, err
	}
	s.trio = &trio{p: p, addr: strings.TrimPrefix(url, "http://")}
	if err = s.read(s.data); err == nil {
		err = s.serve(ctx, "decode-0", "decode-1", "prefill-0")
	}
	if err != nil {
		p.Kill()
		return nil, err
	}
	return s, nil
}

// serve waits until workers serve.
func (s *site) serve(ctx context.Context, ids ...string) error {
	for _, id := range ids {
		if err := s.p.Until(ctx, patience, func() error { return s.serves(ctx, id) }); err != nil {
			return err
		}
	}
	return nil
}

// order gives one by the admin API.
func (s *site) order(ctx context.Context, id, action, body string) error {
	h := s.bearer()
	h.Set("Content-Type", "application/json")
	return call(ctx, http.MethodPost, s.admin+"/admin/v1/instances/"+id+"/"+action, h, body, discard)
}

// cli runs a command of xpyd.
func (s *site) cli(ctx context.Context, args ...string) error {
	_, err := harness.Run(ctx, []string{"XPYD_ADMIN_TOKEN=" + s.token}, append([]string{s.b.XPYD}, append(args, "--admin", s.admin)...)...)
	return err
}

// left is a run in which one of two decode workers, which has all streams, is left.
type left struct {
	took   float64   // s: what the command took
	behind float64   // s: of that, what came after the last move
	pauses []float64 // ms
	step   float64   // ms: the median gap between two tokens before
	ids    [][]string
}

func (l left) p50() float64 { return figures.Median(l.pauses) }
func (l left) p99() float64 { return figures.Quantile(l.pauses, 0.99) }

func (l left) String() string {
	if len(l.pauses) == 0 {
		return fmt.Sprintf("%.2f s; no stream moved; median gap before %.1f ms", l.took, l.step)
	}
	return fmt.Sprintf("%.2f s, the last %.2f s of them after the last move; %d streams moved, pauses p50 %.1f p99 %.1f ms; median gap before %.1f ms", l.took, l.behind, len(l.pauses), l.p50(), l.p99(), l.step)
}

// run has all streams told by decode-0, and then runs a command.
func (b *moves) run(ctx context.Context, args ...string) (l left, err error) {
	s, err := b.start(ctx, b.streams, b.prompt)
	if err != nil {
		return l, err
	}
	defer s.p.Kill()
	if err := s.order(ctx, "decode-1", "drain", ""); err != nil {
		return l, err
	}
	flows := make([]*flow, b.streams)
	var all errgroup.Group
	var begun sync.WaitGroup
	begun.Add(len(flows))
	for i := range flows {
		all.Go(func() (err error) {
			once := sync.OnceFunc(begun.Done)
			defer once()
			flows[i], err = b.ask(s.addr, i, moveBegun+b.rest, "", func(f *flow) {
				if len(f.ids) == moveBegun {
					once()
				}
			})
			return err
		})
	}
	begun.Wait()
	if err := errors.Join(s.order(ctx, "decode-1", "undrain", ""), s.serve(ctx, "decode-1")); err != nil {
		return l, err
	}
	began := time.Now()
	err = s.cli(ctx, args...)
	over, last := time.Now(), began
	if err := errors.Join(err, all.Wait()); err != nil {
		return l, err
	}
	var gaps []float64
	for i, f := range flows {
		if f.decode != "decode-0" || len(f.seams) > 1 {
			return l, fmt.Errorf("stream %d of %s has %d seams", i, f.decode, len(f.seams))
		}
		l.ids = append(l.ids, f.ids)
		for n := 1; n < len(f.at) && f.at[n].Before(began); n++ {
			gaps = append(gaps, ms(f.at[n].Sub(f.at[n-1])))
		}
		for _, n := range f.seams {
			l.pauses = append(l.pauses, ms(f.at[n].Sub(f.at[n-1])))
			if f.at[n].After(last) {
				last = f.at[n]
			}
		}
	}
	l.took, l.behind = over.Sub(began).Seconds(), max(over.Sub(last), 0).Seconds()
	l.step = figures.Median(gaps)
	b.Book.Logf("pauses %.1f ms", l.pauses)
	return l, s.p.Stop()
}

// same compares the tokens of two runs.
func (l left) same(want left) error {
	for i := range l.ids {
		if !slices.Equal(l.ids[i], want.ids[i]) {
			return fmt.Errorf("stream %d has other tokens than where nothing moved:\n%q\n%q", i, l.ids[i], want.ids[i])
		}
	}
	return nil
}

// drain compares a drain that moves the streams with one that waits for their ends.
func (b *moves) drain(ctx context.Context) error {
	var last [2]left
	runs, err := figures.Compare(b.Sayf, b.Rounds, [2]string{moved, waitOnly}, func(_ int, way string) (left, error) {
		args := []string{"drain", "decode-0", "--wait"}
		if way == waitOnly {
			args = append(args, "--wait-only")
		}
		l, err := b.run(ctx, args...)
		switch {
		case err != nil:
		case way == moved && len(l.pauses) != b.streams:
			err = fmt.Errorf("%d of %d streams moved", len(l.pauses), b.streams)
		case way == moved:
			last[0] = l
		default:
			last[1] = l
		}
		if err == nil && last[0].ids != nil && last[1].ids != nil && b.device == "cpu" { // else other batches may draw others
			err = last[0].same(last[1])
		}
		return l, err
	})
	if err != nil {
		return err
	}
	what := fmt.Sprintf("%s; %d streams of one decode worker, prompts of %d tokens, %d tokens to go", b.about(), b.streams, b.prompt, b.rest)
	drain := figures.Figure{Name: "stream.drain_s", Unit: "s", Peer: "--wait-only; limit 2 s", Model: what}
	pause := figures.Figure{Unit: "ms", Peer: "the median gap between two tokens before", Model: what}
	p50, p99 := pause, pause
	p50.Name, p99.Name = "stream.move_pause_ms.p50", "stream.move_pause_ms.p99"
	var fifty, most, step []float64
	for _, l := range runs[0] {
		fifty, most, step = append(fifty, l.p50()), append(most, l.p99()), append(step, l.step)
	}
	return b.Add(figures.RatiosOf(drain, runs, func(l left) float64 { return l.took }), p50.Ratios(fifty, step), p99.Ratios(most, step))
}

// flip times a change of role from the last stream's move on.
func (b *moves) flip(ctx context.Context) error {
	var took []float64
	for range b.Rounds {
		l, err := b.run(ctx, "role", "decode-0", "prefill")
		if err != nil {
			return err
		}
		b.Sayf("flip: %v", l)
		took = append(took, l.behind)
	}
	f := figures.Figure{Name: "stream.flip_s", Unit: "s", Peer: "limit: 1 s after the last move",
		Model: fmt.Sprintf("%s; %d streams of the decode worker, prompts of %d tokens, %d tokens to go", b.about(), b.streams, b.prompt, b.rest)}
	return b.Add(f.Ratios(took, slices.Repeat([]float64{1}, len(took))))
}
