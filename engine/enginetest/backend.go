// Package enginetest has a small deterministic backend for tests of the engine and its
// users. It is no model, but its KV pool is real: each layer mixes what it reads from the
// rows that the block table names, so a stale, foreign or missing row changes every later
// token.
package enginetest

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvlayout"
)

// Config is the fake's shape. Zero fields get small defaults.
type Config struct {
	Layers, Vocab, MaxPositions int
	Blocks, BlockTokens         int
}

// Layered is an arrival that a step of the fake can wait for.
type Layered interface {
	kernels.Arrival
	AwaitLayer(layer int)
}

// Backend implements kernels.Backend.
type Backend struct {
	cfg Config
	// OnStep, when set, runs before each step; an error or panic is the
	// step's. Set it before the engine starts.
	OnStep func(*kernels.Step) error
	// Spoil, when set, may change what a sequence's step yields.
	Spoil func(*kernels.Seq, *kernels.Result)

	last []kernels.Result // of the latest step; spoiled by the next

	mu    sync.Mutex // guards the fields below
	rows  []uint64   // [layer][block][row]
	steps int
	peak  int // most sequences in a step
}

// New makes a backend whose pool holds garbage.
func New(cfg Config) *Backend {
	cfg.Layers = cmp.Or(cfg.Layers, 2)
	cfg.Vocab = cmp.Or(cfg.Vocab, 48)
	cfg.MaxPositions = cmp.Or(cfg.MaxPositions, 512)
	cfg.Blocks = cmp.Or(cfg.Blocks, 64)
	cfg.BlockTokens = cmp.Or(cfg.BlockTokens, 16)
	b := &Backend{cfg: cfg, rows: make([]uint64, cfg.Layers*cfg.Blocks*cfg.BlockTokens)}
	for i := range b.rows {
		b.rows[i] = rand.Uint64()
	}
	return b
}

// Info implements kernels.Backend.
func (b *Backend) Info() kernels.Info {
	return kernels.Info{Name: "fake", Numerics: "fake-1", Hidden: true, Verify: true}
}

// Arch implements kernels.Backend.
func (b *Backend) Arch() arch.Config {
	return arch.Config{
		Layers: b.cfg.Layers, Hidden: 1, Heads: 1, KVHeads: 1, HeadDim: 2,
		Vocab: b.cfg.Vocab, MaxPositions: b.cfg.MaxPositions,
	}
}

// Layout implements kernels.Backend.
func (b *Backend) Layout() kvlayout.Layout {
	return kvlayout.Plain(b.cfg.Layers, 1, 2, b.cfg.BlockTokens, kvlayout.F32)
}

// Blocks implements kernels.Backend.
func (b *Backend) Blocks() int { return b.cfg.Blocks }

// Close implements kernels.Backend.
func (b *Backend) Close() error { return nil }

// Steps returns how many steps ran, and the most sequences one had.
func (b *Backend) Steps() (n, peak int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.steps, b.peak
}

// Step implements kernels.Backend. It spoils the previous step's results,
// which callers must not read any more.
func (b *Backend) Step(s *kernels.Step) ([]kernels.Result, error) {
	spoil(b.last)
	if b.OnStep != nil {
		if err := b.OnStep(s); err != nil {
			return nil, err
		}
	}
	if err := b.check(s); err != nil {
		return nil, err
	}
	hidden := make([][]uint64, len(s.Seqs)) // [seq][token]
	for i, q := range s.Seqs {
		for j, t := range q.Tokens {
			hidden[i] = append(hidden[i], mix(uint64(t)+1, uint64(q.Pos+j)))
		}
	}
	for layer := range b.cfg.Layers {
		for _, a := range s.Arrivals {
			a.(Layered).AwaitLayer(layer)
		}
		b.layer(layer, s, hidden)
		if s.OnLayer != nil {
			s.OnLayer(layer)
		}
	}
	b.mu.Lock()
	b.steps++
	b.peak = max(b.peak, len(s.Seqs))
	b.mu.Unlock()
	results := make([]kernels.Result, len(s.Seqs))
	for i := range s.Seqs {
		results[i] = b.draw(&s.Seqs[i], hidden[i])
		if b.Spoil != nil {
			b.Spoil(&s.Seqs[i], &results[i])
		}
	}
	b.last = results
	return results, nil
}

func spoil(results []kernels.Result) {
	for _, r := range results {
		for i := range r.Samples {
			clear(r.Samples[i].Top)
			r.Samples[i] = kernels.Sampled{Token: -1}
		}
		for i := range r.Prompt {
			clear(r.Prompt[i].Top)
			r.Prompt[i] = kernels.PromptLogprob{}
		}
		for _, row := range r.Hidden {
			clear(row)
		}
	}
}

// layer writes this layer's rows of all sequences, then lets each position
// look at all rows up to its own.
func (b *Backend) layer(layer int, s *kernels.Step, hidden [][]uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, q := range s.Seqs {
		for j := range q.Tokens {
			b.rows[b.at(layer, q.Blocks, q.Pos+j)] = mix(hidden[i][j], uint64(layer))
		}
	}
	for i, q := range s.Seqs {
		var sum uint64
		for pos := range q.Pos + len(q.Tokens) {
			sum += mix(b.rows[b.at(layer, q.Blocks, pos)], uint64(pos))
			if j := pos - q.Pos; j >= 0 {
				hidden[i][j] = mix(hidden[i][j], sum)
			}
		}
	}
}

// at is the index in rows of a position of a block table.
func (b *Backend) at(layer int, table []int32, pos int) int {
	return layer*b.cfg.Blocks*b.cfg.BlockTokens + int(table[pos/b.cfg.BlockTokens])*b.cfg.BlockTokens + pos%b.cfg.BlockTokens
}

// block is the rows of one block.
func (b *Backend) block(layer int, id int32) []uint64 {
	return b.rows[b.at(layer, []int32{id}, 0):][:b.cfg.BlockTokens]
}

// check refuses what no backend should be asked to do.
func (b *Backend) check(s *kernels.Step) error {
	written := make(map[int]bool) // rows of layer 0
	for i, q := range s.Seqs {
		end := q.Pos + len(q.Tokens)
		switch {
		case len(q.Tokens) == 0:
			return fmt.Errorf("sequence %d has no tokens", i)
		case end > b.cfg.MaxPositions:
			return fmt.Errorf("sequence %d ends at %d of %d positions", i, end, b.cfg.MaxPositions)
		case len(q.Blocks)*b.cfg.BlockTokens < end:
			return fmt.Errorf("sequence %d: %d blocks for %d positions", i, len(q.Blocks), end)
		case q.Verify && len(q.Samples) != len(q.Tokens):
			return fmt.Errorf("sequence %d: %d draws for %d tokens", i, len(q.Samples), len(q.Tokens))
		case q.Targets != nil && len(q.Targets) != len(q.Tokens):
			return fmt.Errorf("sequence %d: %d targets for %d tokens", i, len(q.Targets), len(q.Tokens))
		}
		for pos := q.Pos; pos < end; pos++ {
			at := b.at(0, q.Blocks, pos)
			if written[at] {
				return fmt.Errorf("sequence %d: block %d is written twice in one step", i, at/b.cfg.BlockTokens)
			}
			written[at] = true
		}
	}
	for i, q := range s.Seqs { // nobody may read what another writes in this step
		for pos := range q.Pos {
			if at := b.at(0, q.Blocks, pos); written[at] {
				return fmt.Errorf("sequence %d reads block %d while it is written", i, at/b.cfg.BlockTokens)
			}
		}
	}
	return nil
}

// Gather implements kernels.Pool.
func (b *Backend) Gather(layer int, block int32, row, n int, dst []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, v := range b.block(layer, block)[row : row+n] { // [2][1][n][8]
		binary.LittleEndian.PutUint64(dst[8*i:], v)
		binary.LittleEndian.PutUint64(dst[8*(n+i):], ^v)
	}
}

// Scatter implements kernels.Pool.
func (b *Backend) Scatter(layer int, block int32, row, n int, src []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, dst := 0, b.block(layer, block)[row:]; i < n; i++ {
		dst[i] = binary.LittleEndian.Uint64(src[8*i:])
	}
}

// Digest implements kernels.Pool: the sum of the whole block's rows.
func (b *Backend) Digest(layer int, block int32, dst []uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	dst[0] = 0
	for _, v := range b.block(layer, block) {
		dst[0] += v
	}
}

// SetDigest implements kernels.Pool; the fake keeps none.
func (b *Backend) SetDigest(int, int32, int, []uint64) {}

// CopyBlock implements kernels.Pool.
func (b *Backend) CopyBlock(dst, src int32, _, n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for layer := range b.cfg.Layers {
		copy(b.block(layer, dst), b.block(layer, src)[:n])
	}
}

// mix is a 64-bit finaliser over two words (constants of splitmix64).
func mix(a, b uint64) uint64 {
	x := a + 0x9e3779b97f4a7c15*(b+1)
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// draw answers a sequence's samples and targets.
func (b *Backend) draw(q *kernels.Seq, hidden []uint64) kernels.Result {
	var r kernels.Result
	for i, target := range q.Targets {
		var p kernels.PromptLogprob
		if target >= 0 {
			logits := b.logits(hidden[i])
			p.Self = logprob(logits, target)
			p.Top = top(logits, q.TargetLogprobs)
		}
		r.Prompt = append(r.Prompt, p)
	}
	last := b.logits(hidden[len(hidden)-1])
	for i := range q.Samples {
		if q.Verify {
			last = b.logits(hidden[i])
		}
		r.Samples = append(r.Samples, sample(&q.Samples[i], last))
	}
	if q.WantLogits {
		r.Logits = last
	}
	for _, h := range hidden[len(hidden)-q.Hidden.Rows(len(hidden)):] {
		r.Hidden = append(r.Hidden, []float32{float32(h>>40)/(1<<23) - 1})
	}
	return r
}

func (b *Backend) logits(hidden uint64) []float32 {
	l := make([]float32, b.cfg.Vocab)
	for v := range l {
		l[v] = float32(mix(hidden, uint64(v))>>44) / (1 << 17) // 0..8
	}
	return l
}

// sample draws with temperature, bias, bans and penalties: enough to see whether the
// engine passes them on.
func sample(s *kernels.Sample, raw []float32) kernels.Sampled {
	l := slices.Clone(raw)
	for _, bias := range s.Bias {
		l[bias.ID] += bias.Value
	}
	for _, t := range s.Output {
		l[t] -= s.Frequency
	}
	if s.Repetition != 1 {
		for _, t := range s.Prompt {
			l[t] /= s.Repetition
		}
	}
	for i := range l {
		if s.Temperature > 0 { // Gumbel-like noise fixed by seed, choice, position
			noise := mix(mix(s.Seed, uint64(s.Choice)), mix(uint64(s.Position), uint64(i)))
			l[i] += s.Temperature * float32(noise>>44) / (1 << 17)
		}
		if slices.Contains(s.Ban, int32(i)) {
			l[i] = -1e9
		}
	}
	best := int32(0)
	if s.Mask != nil {
		best = -1
	}
	for i := range l {
		if s.Mask != nil && s.Mask[i/32]>>(i%32)&1 == 0 {
			continue
		}
		if best < 0 || l[i] > l[best] {
			best = int32(i)
		}
	}
	out := kernels.Sampled{Token: best}
	if s.Logprobs >= 0 && best >= 0 {
		out.Self, out.Top = logprob(raw, best), top(raw, s.Logprobs)
	}
	return out
}

// logprob stands in for one: the raw logit, with the right rank.
func logprob(l []float32, id int32) kernels.TokenLogprob {
	rank := int32(1)
	for i, v := range l {
		if v > l[id] || v == l[id] && int32(i) < id {
			rank++
		}
	}
	return kernels.TokenLogprob{ID: id, Logprob: l[id], Rank: rank}
}

func top(l []float32, n int) []kernels.TokenLogprob {
	all := make([]kernels.TokenLogprob, len(l))
	for i := range l {
		all[i] = logprob(l, int32(i))
	}
	slices.SortFunc(all, func(a, b kernels.TokenLogprob) int { return int(a.Rank - b.Rank) })
	return all[:n]
}
