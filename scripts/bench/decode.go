package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"time"

	"github.com/xpyd/xpyd/internal/model"
	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/internal/model/modeltest"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cpu"

	"github.com/xpyd/xpyd/internal/figures"
)

// shape is one model of the decode figures.
type shape struct {
	arch    arch.Config
	weights kernels.Weights
	steps   int
	what    string
}

func newShape(name string) (*shape, error) {
	var m *model.Model
	var err error
	s := &shape{}
	switch name {
	case "260k":
		m, err = model.Open(context.Background(), "", model.Options{})
		s.steps, s.what = 511, "stories260K, its own weights"
	case "15m", "110m":
		config := modeltest.Stories15M()
		s.steps, s.what = 256, "15M shape, random f32 weights"
		if name == "110m" {
			config, s.steps, s.what = modeltest.Stories110M(), 128, "110M shape, random f32 weights"
		}
		dir, derr := os.MkdirTemp("", "xpyd-shape")
		if derr != nil {
			return nil, derr
		}
		defer os.RemoveAll(dir)
		if err = modeltest.WriteHF(dir, config, modeltest.HFOptions{Seed: 1}); err == nil {
			m, err = model.Open(context.Background(), dir, model.Options{})
		}
	}
	if err != nil {
		return nil, err
	}
	s.arch, s.weights = m.Config, m.Weights(false)
	for p, t := range s.weights {
		t.Data = bytes.Clone(t.Data)
		s.weights[p] = t
	}
	return s, m.Close()
}

const blockTokens = 16

// ours decodes steps tokens greedily for each of batch sequences through the
// step interface, paged KV and digests on, and returns tokens a second.
func (s *shape) ours(b *cpu.Backend, batch int) (float64, error) {
	per := (s.arch.MaxPositions + blockTokens - 1) / blockTokens
	step := kernels.Step{Seqs: make([]kernels.Seq, batch)}
	next := make([]int32, batch)
	for i := range step.Seqs {
		table := make([]int32, per)
		for j := range table {
			table[j] = int32(i*per + j)
		}
		step.Seqs[i] = kernels.Seq{Tokens: []int32{0}, Blocks: table, Samples: []kernels.Sample{{TopP: 1, Repetition: 1, Logprobs: -1}}}
		next[i] = int32(1 + i)
	}
	var start time.Time
	for pos := range s.steps {
		for i := range step.Seqs {
			q := &step.Seqs[i]
			q.Tokens[0], q.Pos, q.Samples[0].Position = next[i], pos, pos+1
		}
		res, err := b.Step(&step)
		if err != nil {
			return 0, err
		}
		for i := range res {
			next[i] = res[i].Samples[0].Token
		}
		if pos == 0 { // as run.c: the clock starts after the first step
			start = time.Now()
		}
	}
	return float64(batch*(s.steps-1)) / time.Since(start).Seconds(), nil
}

func (s *shape) backend(batch, threads int) (*cpu.Backend, error) {
	per := (s.arch.MaxPositions + blockTokens - 1) / blockTokens
	return cpu.New(s.arch, s.weights, cpu.Options{Blocks: per * batch, BlockTokens: blockTokens, Threads: threads})
}

// decode compares batch-1 decode with llama2.c's run.
func (b *bench) decode(name string, threads int) error {
	s, err := newShape(name)
	if err != nil {
		return err
	}
	checkpoint, tokens := filepath.Join(b.tmp, name+".bin"), filepath.Join(b.tmp, name+".tok")
	if err := s.writeLlama2c(checkpoint, tokens); err != nil {
		return err
	}
	backend, err := s.backend(1, threads)
	if err != nil {
		return err
	}
	defer backend.Close()
	f := figures.Figure{Name: "cpu.decode_ratio." + name, Unit: "tokens/s", Peer: "llama2.c run, -Ofast -march=native, 1 thread", Model: s.what}
	binary, env := b.run, "OMP_NUM_THREADS=1"
	if threads > 1 {
		f.Name, f.Peer = "cpu.two_thread_ratio", "llama2.c run, -Ofast -march=native -fopenmp, 2 threads"
		binary, env = b.runOMP, "OMP_NUM_THREADS=2"
	}
	return b.pairs(f, func() (float64, error) { return s.ours(backend, 1) }, func() (float64, error) {
		cmd := exec.Command(binary, checkpoint, "-z", tokens, "-t", "0", "-n", strconv.Itoa(s.steps))
		cmd.Env = append(os.Environ(), env)
		return tokensPerSecond(cmd)
	})
}

var achieved = regexp.MustCompile(`achieved tok/s: ([0-9.]+)`)

func tokensPerSecond(cmd *exec.Cmd) (float64, error) {
	out, err := cmd.CombinedOutput()
	if err != nil {
		return 0, fmt.Errorf("%v: %w: %s", cmd.Args, err, out)
	}
	m := achieved.FindSubmatch(out)
	if m == nil {
		return 0, fmt.Errorf("%v: it did not say its speed", cmd.Args)
	}
	return strconv.ParseFloat(string(m[1]), 64)
}

// batch8 compares batch-8 decode with batch-1, both ours, at two threads.
func (b *bench) batch8() error {
	s, err := newShape("110m")
	if err != nil {
		return err
	}
	one, err := s.backend(1, 2)
	if err != nil {
		return err
	}
	defer one.Close()
	eight, err := s.backend(8, 2)
	if err != nil {
		return err
	}
	defer eight.Close()
	return b.pairs(figures.Figure{Name: "cpu.batch8_ratio", Unit: "tokens/s", Peer: "batch 1, same backend, 2 threads", Model: s.what},
		func() (float64, error) { return s.ours(eight, 8) }, func() (float64, error) { return s.ours(one, 1) })
}

// writeLlama2c writes the weights as llama2.c's legacy checkpoint, and a
// vocabulary of numbered pieces. Rotary order differs from ours, which changes
// the tokens and not the speed.
func (s *shape) writeLlama2c(checkpoint, tokens string) error {
	a := &s.arch
	f, err := os.Create(checkpoint)
	if err != nil {
		return err
	}
	defer f.Close()
	w := bufio.NewWriterSize(f, 1<<20)
	put := func(v any) {
		if err == nil {
			err = binary.Write(w, binary.LittleEndian, v)
		}
	}
	put([]int32{int32(a.Hidden), int32(a.Intermediate), int32(a.Layers), int32(a.Heads), int32(a.KVHeads), int32(a.Vocab), int32(a.MaxPositions)})
	put(s.weights[arch.Embed.At(0)].Data)
	for _, r := range []arch.Role{arch.AttnNorm, arch.Q, arch.K, arch.V, arch.O, arch.MLPNorm, arch.Gate, arch.Down, arch.Up} {
		for i := range a.Layers {
			put(s.weights[r.At(i)].Data)
		}
	}
	put(s.weights[arch.Norm.At(0)].Data)
	for range 2 { // the rotary tables, which run.c skips
		put(make([]float32, a.MaxPositions*a.HeadDim/2))
	}
	if err == nil {
		err = w.Flush()
	}
	if err != nil {
		return err
	}
	t, err := os.Create(tokens)
	if err != nil {
		return err
	}
	defer t.Close()
	w.Reset(t)
	put(int32(8))
	for i := range a.Vocab {
		piece := fmt.Sprintf("t%d", i)
		put(math.Float32bits(0))
		put(int32(len(piece)))
		put([]byte(piece))
	}
	if err != nil {
		return err
	}
	return w.Flush()
}
