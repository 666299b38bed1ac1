// Package stepbench times steps of a backend, as an engine would have it run them, and makes a
// steptable.Table of them.
//
// What is timed is the backend's part alone: what an engine does between two steps is not in it.
// Tokens are random, each step gets other random blocks of a pool that is full, and a draw is one
// at temperature 1 without truncation or penalties.
package stepbench

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/internal/steptable"
	"github.com/xpyd/xpyd/kernels"
)

// Config says how far to measure, and for how long.
type Config struct {
	MaxBatch   int           // sequences that decode in a step
	StepTokens int           // tokens of a step
	MaxContext int           // positions of a sequence
	Time       time.Duration // for all; the coarsest points are measured whatever it takes
	HeldOut    int           // random steps to check the table with
	Seed       uint64        // of tokens, blocks and those steps
	Progress   io.Writer     // a line a second; may be nil
}

// Result is what came of it.
type Result struct {
	Table   *steptable.Table // without About's texts and KV's speed, which the caller knows
	Points  int              // steps that it is made of
	LeftOut int              // finer ones, for which there was no time
	Runs    int              // the least of any
}

const (
	leastContext = 16
	enough       = 200 // runs of each step
)

// Measure measures b, of which it uses all blocks.
func Measure(ctx context.Context, b kernels.Backend, cfg Config) (*Result, error) {
	if err := cfg.Check(b); err != nil {
		return nil, err
	}
	begin := time.Now()
	m := newMeter(b, cfg)
	if err := m.fill(); err != nil {
		return nil, fmt.Errorf("fill the pool: %w", err)
	}
	points := slices.Concat(m.prefill(), m.decode())
	for i := range cfg.HeldOut {
		points = append(points, m.random(i))
	}
	all := len(points)
	points, err := m.run(ctx, points, begin)
	if err != nil {
		return nil, err
	}
	r := &Result{Points: len(points) - cfg.HeldOut, LeftOut: all - len(points), Runs: enough, Table: table(points)}
	for _, p := range points {
		r.Runs = min(r.Runs, len(p.took))
	}
	r.Table.About.BlockTokens, r.Table.About.Blocks = m.blockTokens, b.Blocks()
	r.Table.About.MaxBatch, r.Table.About.StepTokens, r.Table.About.MaxContext = cfg.MaxBatch, cfg.StepTokens, cfg.MaxContext
	r.Table.KV.BytesPerToken = b.Layout().BlockBytes() / m.blockTokens
	if err := r.Table.Fit(); err != nil {
		return nil, err
	}
	r.Table.HeldOut = check(r.Table, points)
	return r, nil
}

// Check refuses what b has no room for.
func (c *Config) Check(b kernels.Backend) error {
	positions, room := b.Arch().MaxPositions, b.Blocks()*b.Layout().BlockTokens
	switch {
	case c.MaxContext > positions:
		return fmt.Errorf("max-context %d: the model's longest is %d", c.MaxContext, positions)
	case c.MaxContext > room:
		return fmt.Errorf("max-context %d: the KV pool has room for %d tokens; kv-memory or blocks give it more", c.MaxContext, room)
	case c.MaxContext < 2*leastContext:
		return fmt.Errorf("max-context %d: want %d at least", c.MaxContext, 2*leastContext)
	case c.MaxBatch < 1 || c.StepTokens < 1:
		return fmt.Errorf("max-batch %d, step-tokens %d: want 1 at least", c.MaxBatch, c.StepTokens)
	}
	return nil
}

// point is a step that is timed again and again.
type point struct {
	load     steptable.Load
	contexts []int // of what decodes
	undrawn  bool
	rank     int // coarser points have lower ones
	held     bool
	took     []float64 // seconds
}

// median is the table's form of what it took.
func (p *point) median() steptable.Time {
	mid := figures.Median(p.took)
	off := make([]float64, len(p.took))
	for i, s := range p.took {
		off[i] = max(s-mid, mid-s)
	}
	return steptable.Time{Seconds: mid, Spread: 1.4826 * figures.Median(off), Runs: len(p.took)}
}

// run times all points in rounds, each in a new order, so that what disturbs the machine disturbs
// all. The first round goes from coarse to fine, and leaves out what a third of the time is too short
// for.
func (m *meter) run(ctx context.Context, points []*point, begin time.Time) ([]*point, error) {
	slices.SortStableFunc(points, func(a, b *point) int { return cmp.Compare(a.rank, b.rank) })
	said := begin
	visit := func(round, i int) error {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		p := points[i]
		if err := m.visit(p); err != nil {
			return fmt.Errorf("a step of %d sequences: %w", len(p.contexts)+len(p.load.Pieces), err)
		}
		if now := time.Now(); m.cfg.Progress != nil && now.Sub(said) >= time.Second {
			said = now
			fmt.Fprintf(m.cfg.Progress, "round %d: %d of %d steps, %.0f of %.0f s\n", round, i+1, len(points), now.Sub(begin).Seconds(), m.cfg.Time.Seconds())
		}
		return nil
	}
	for i := range points {
		if points[i].rank > 0 && time.Since(begin) > m.cfg.Time/3 {
			points = points[:i]
			break
		}
		if err := visit(1, i); err != nil {
			return nil, err
		}
	}
	for round, timed := 2, true; timed; round++ {
		timed = false
		m.rng.Shuffle(len(points), func(i, j int) { points[i], points[j] = points[j], points[i] })
		for i, p := range points {
			if time.Since(begin) > m.cfg.Time {
				return points, nil
			}
			if len(p.took) >= enough {
				continue
			}
			timed = true
			if err := visit(round, i); err != nil {
				return nil, err
			}
		}
	}
	return points, nil
}

// table makes a table of what was timed.
func table(points []*point) *steptable.Table {
	t := &steptable.Table{Version: steptable.Version}
	for _, p := range points {
		switch {
		case p.held:
		case len(p.load.Pieces) > 0:
			t.Prefill = append(t.Prefill, steptable.Prefill{Tokens: p.load.Pieces[0].Tokens, Position: p.load.Pieces[0].Position, Time: p.median()})
		case p.undrawn:
			t.Undrawn = append(t.Undrawn, steptable.Decode{Batch: len(p.contexts), Context: p.contexts[0], Time: p.median()})
		default:
			t.Decode = append(t.Decode, steptable.Decode{Batch: len(p.contexts), Context: p.contexts[0], Time: p.median()})
		}
	}
	slices.SortFunc(t.Prefill, func(a, b steptable.Prefill) int {
		return cmp.Or(cmp.Compare(a.Tokens, b.Tokens), cmp.Compare(a.Position, b.Position))
	})
	for _, list := range [][]steptable.Decode{t.Decode, t.Undrawn} {
		slices.SortFunc(list, func(a, b steptable.Decode) int {
			return cmp.Or(cmp.Compare(a.Batch, b.Batch), cmp.Compare(a.Context, b.Context))
		})
	}
	return t
}

// check compares the table with the steps that were held out.
func check(t *steptable.Table, points []*point) (h steptable.HeldOut) {
	var off, signed []float64
	for _, p := range points {
		if !p.held {
			continue
		}
		said, _ := t.Step(p.load)
		e := said.Seconds()/p.median().Seconds - 1
		off, signed = append(off, max(e, -e)), append(signed, e)
	}
	if h.Steps = len(off); h.Steps > 0 {
		h.Median, h.P90, h.Worst, h.Bias = figures.Median(off), figures.Quantile(off, 0.9), slices.Max(off), figures.Median(signed)
	}
	return h
}

// meter runs steps on a pool that it has filled.
type meter struct {
	b           kernels.Backend
	cfg         Config
	blockTokens int
	rng         *rand.Rand
	tokens      []int32 // random
	blocks      []int32 // all, in random order, twice: a step takes them from anywhere on
	seqs        []kernels.Seq
	samples     []kernels.Sample
}

func newMeter(b kernels.Backend, cfg Config) *meter {
	m := &meter{b: b, cfg: cfg, blockTokens: b.Layout().BlockTokens, rng: rand.New(rand.NewPCG(cfg.Seed, 0))}
	m.tokens = make([]int32, cfg.StepTokens+cfg.MaxBatch)
	for i := range m.tokens {
		m.tokens[i] = m.rng.Int32N(int32(b.Arch().Vocab))
	}
	for _, id := range m.rng.Perm(b.Blocks()) {
		m.blocks = append(m.blocks, int32(id))
	}
	m.blocks = append(m.blocks, m.blocks...)
	return m
}

// fill writes a computed block to all others: memory that nobody wrote to reads faster.
func (m *meter) fill() error {
	n := min(m.blockTokens, m.cfg.MaxContext, m.cfg.StepTokens)
	if _, err := m.b.Step(&kernels.Step{Seqs: []kernels.Seq{{Tokens: m.tokens[:n], Blocks: m.blocks[:1]}}}); err != nil {
		return err
	}
	for _, id := range m.blocks[1:m.b.Blocks()] {
		m.b.CopyBlock(id, m.blocks[0], 0, n)
	}
	return nil
}

// needs is how many blocks so many positions take.
func (m *meter) needs(positions int) int { return (positions + m.blockTokens - 1) / m.blockTokens }

// build describes a point's step, in blocks from a random one on.
func (m *meter) build(p *point) *kernels.Step {
	m.seqs, m.samples = m.seqs[:0], m.samples[:0]
	at, token := m.rng.IntN(m.b.Blocks()), 0
	add := func(pos, n, draws int) {
		s := kernels.Seq{Tokens: m.tokens[token : token+n], Pos: pos, Blocks: m.blocks[at : at+m.needs(pos+n)]}
		token, at = token+n, at+len(s.Blocks)
		from := len(m.samples)
		for i := range draws {
			m.samples = append(m.samples, kernels.Sample{Seed: m.rng.Uint64(), Choice: uint32(i), Position: pos + n, Temperature: 1, TopP: 1, Repetition: 1, Logprobs: -1})
		}
		s.Samples = m.samples[from:len(m.samples):len(m.samples)]
		m.seqs = append(m.seqs, s)
	}
	drawn := 1
	if p.undrawn {
		drawn = 0
	}
	for _, c := range p.contexts {
		add(c-1, 1, drawn)
	}
	for _, q := range p.load.Pieces {
		add(q.Position, q.Tokens, q.Draws)
	}
	return &kernels.Step{Seqs: m.seqs}
}

// visit runs a point's step a few times, after what warms the device up.
func (m *meter) visit(p *point) error {
	const long, most, few = 20 * time.Millisecond, 30 * time.Millisecond, 5
	step := m.build(p)
	if l, ok := m.b.(kernels.Launcher); ok {
		return p.follow(l, step, few)
	}
	begin := time.Now()
	for i := range few + 1 {
		from := time.Now()
		if _, err := m.b.Step(step); err != nil {
			return err
		}
		took := time.Since(from)
		if i > 0 || took > long {
			p.took = append(p.took, took.Seconds())
		}
		if i > 0 && time.Since(begin) > most || took > long {
			break
		}
	}
	return nil
}

// follow runs steps back to back, as an engine launches them: what each adds is from the end of the
// one before to its own. The first two are for the device to get going.
func (p *point) follow(l kernels.Launcher, step *kernels.Step, few int) error {
	const lead = 2
	var last time.Time
	for i := range few + lead + 1 {
		if i < few+lead {
			if err := l.Launch(step); err != nil {
				return err
			}
		}
		if i == 0 {
			continue
		}
		if _, err := l.Await(); err != nil {
			return err
		}
		now := time.Now()
		if i > lead {
			p.took = append(p.took, now.Sub(last).Seconds())
		}
		last = now
	}
	return nil
}
