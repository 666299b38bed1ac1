//go:build cgo && linux

package cuda

import (
	"errors"
	"math"
	"slices"
	"testing"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvlayout"
)

// describing is a backend without a library: it describes steps, and any call of the
// library panics.
func describing(vocab, arena int) *Backend {
	b := &Backend{blocks: 8, opt: Options{MaxTokens: 64, MaxSeqs: 8, NoGraphs: true},
		arch: arch.Config{Layers: 1, Vocab: vocab, MaxPositions: 128}, layout: kvlayout.Layout{BlockTokens: 16}}
	fold := newFolder(vocab)
	for i := range b.steps {
		s := &b.steps[i]
		s.half, s.fold = i, fold
		s.arena, s.tokens, s.logits = make([]byte, arena), make([]int32, 16), make([]float32, 2*vocab)
		s.logprobs = resize(s.logprobs, 64)
	}
	return b
}

// A step that is too large says so, and nothing has happened: nothing is to be awaited,
// and the draws before it can still be named.
func TestTooLarge(t *testing.T) {
	const vocab = 4096
	one := kernels.Sample{TopP: 1, Logprobs: -1}
	heavy, listed := one, one
	heavy.Ban = make([]int32, vocab)
	for i := range heavy.Ban {
		heavy.Ban[i] = int32(i)
	}
	listed.Logprobs = 20
	many := func(n int, p kernels.Sample) (list []kernels.Sample) {
		for range n {
			list = append(list, p)
		}
		return list
	}
	f := func(what string, seqs ...kernels.Seq) {
		t.Helper()
		b := describing(vocab, 32<<10)
		b.launched, b.awaited, b.draws = 5, 5, 3
		for i := range seqs {
			if seqs[i].Tokens == nil {
				seqs[i].Tokens = []int32{1}
			}
			seqs[i].Blocks = []int32{0, 1, 2, 3, 4}
		}
		err := b.Launch(&kernels.Step{Seqs: seqs})
		if !errors.Is(err, kernels.ErrStepTooLarge) {
			t.Errorf("%s: %v", what, err)
		}
		if b.launched != 5 || b.awaited != 5 || b.draws != 3 || b.steps[1].step != nil {
			t.Errorf("%s: %d steps launched, %d awaited, %d draws", what, b.launched, b.awaited, b.draws)
		}
		if _, err := b.describe(&b.steps[1], &kernels.Step{Seqs: []kernels.Seq{{Tokens: []int32{1}, Blocks: []int32{0}, Samples: many(1, one)}}}, 0); err != nil {
			t.Errorf("%s: then a small step: %v", what, err)
		}
	}
	f("rows", kernels.Seq{Tokens: make([]int32, 65)})
	f("draws", kernels.Seq{Samples: many(10, one)}, kernels.Seq{Samples: many(7, one)})
	f("log probabilities", kernels.Seq{Samples: many(4, listed)})
	f("logits", kernels.Seq{WantLogits: true}, kernels.Seq{WantLogits: true}, kernels.Seq{WantLogits: true})
	f("penalties", kernels.Seq{Samples: many(1, heavy)})
}

// Choices of a long prompt share what their penalties make of it, and with it one step;
// a draw with another history, or another penalty, does not.
func TestChoicesShareTheirHistory(t *testing.T) {
	const vocab = 4096
	b := describing(vocab, 40<<10)
	ids := make([]int32, 1000)
	for i := range ids {
		ids[i] = int32(3 * i)
	}
	q := kernels.Seq{Tokens: []int32{1}, Blocks: []int32{0}}
	add := func(change func(p *kernels.Sample)) {
		p := kernels.Sample{Choice: uint32(len(q.Samples)), TopP: 1, Logprobs: -1, Repetition: 1.1, Prompt: ids, Output: make([]int32, 0, 1)}
		change(&p)
		q.Samples = append(q.Samples, p)
	}
	for range 10 {
		add(func(*kernels.Sample) {})
	}
	add(func(p *kernels.Sample) { p.Temperature, p.Repetition = 1, 1.2 })
	add(func(p *kernels.Sample) { p.Output = []int32{7} })
	add(func(p *kernels.Sample) { p.Output = []int32{8} })
	add(func(p *kernels.Sample) { p.Repetition = 1 })
	add(func(p *kernels.Sample) { p.Repetition, p.Ban = 1, ids[:5] })
	add(func(p *kernels.Sample) { p.Repetition, p.Ban = 1, ids[1:6] })
	if _, err := b.describe(&b.steps[0], &kernels.Step{Seqs: []kernels.Seq{q}}, 0); !errors.Is(err, kernels.ErrStepTooLarge) {
		t.Errorf("three long lists in an arena for two: %v", err)
	}
	q.Samples = append(q.Samples[:12], q.Samples[13:]...)
	s := &b.steps[0]
	if _, err := b.describe(s, &kernels.Step{Seqs: []kernels.Seq{q}}, 0); err != nil {
		t.Fatal(err)
	}
	base, shared := int(s.samples[0].adjust), 0 // of the first list
	for i := range q.Samples {
		d := &s.samples[i]
		from, n := int(d.adjust)-base, int(d.n_adjust)
		if want := s.fold.fold(nil, &q.Samples[i]); !slices.Equal(s.adjust[from:from+n], want) {
			t.Errorf("draw %d has a list of %d tokens, want %d, or others", i, n, len(want))
		}
		if before := s.samples[max(i-1, 0)]; i > 0 && n > 0 && before.n_adjust > 0 && d.adjust == before.adjust {
			shared++
		}
	}
	if shared != 10 || len(s.adjust) != 1000+1001+5+5 {
		t.Errorf("%d draws share their list; %d entries in all", shared, len(s.adjust))
	}
}

// Top-k is off below 1, however far.
func TestTopK(t *testing.T) {
	b := describing(16, 4<<10)
	for _, c := range []struct{ topK, want int }{{0, 0}, {-1, 0}, {-1<<32 + 5, 0}, {math.MinInt, 0}, {5, 5}, {1<<32 + 5, 1 << 30}} {
		s := &b.steps[0]
		s.sample(0, &kernels.Sample{TopK: c.topK, TopP: 1}, nil)
		if got := int(s.samples[len(s.samples)-1].top_k); got != c.want {
			t.Errorf("top_k %d became %d, want %d", c.topK, got, c.want)
		}
	}
}

// Draws of a sequence share a mask, and masks lie one behind the other; a held step's are filled in later.
func TestMasks(t *testing.T) {
	const vocab, room = 70, 4
	words := kernels.MaskWords(vocab)
	mask := func(v uint32) []uint32 { return slices.Repeat([]uint32{v}, words) }
	draw := func(m []uint32) kernels.Sample { return kernels.Sample{TopP: 1, Logprobs: -1, Mask: m} }
	seq := func(p ...kernels.Sample) kernels.Seq {
		return kernels.Seq{Tokens: []int32{1}, Blocks: []int32{0}, Samples: p}
	}
	b := describing(vocab, 32<<10)
	s := &b.steps[0]
	s.masks.pinned = make([]uint32, room*words)
	one, two := mask(1), mask(2)
	st := &kernels.Step{Seqs: []kernels.Seq{seq(draw(nil), draw(one), draw(one), draw(two)), seq(draw(nil)), seq(draw(two))}}
	a, err := b.describe(s, st, 8)
	if err != nil {
		t.Fatal(err)
	}
	if want := []int32{-1, 0, 0, 1, -1, 2, -1, -1}; !slices.Equal(s.masks.of, want) || a.n_masks != 3 || a.hold != 0 {
		t.Errorf("draws have masks %v of %d, want %v", s.masks.of, a.n_masks, want)
	}
	if want := slices.Concat(one, two, two, mask(0)); !slices.Equal(s.masks.pinned, want) {
		t.Errorf("masks are %v, want %v", s.masks.pinned, want)
	}
	clear(s.masks.pinned)
	st.Hold = true
	if a, err = b.describe(s, st, 8); err != nil || a.hold != 1 {
		t.Fatal(a.hold, err)
	}
	if s.masks.pinned[0] != 0 {
		t.Error("a held step's masks were read at once")
	}
	one[0] = 9
	if s.masks.fill(); s.masks.pinned[0] != 9 {
		t.Error("what came later was not read")
	}
	st.Seqs = append(st.Seqs, seq(draw(one)), seq(draw(one)))
	if _, err = b.describe(s, st, 8); !errors.Is(err, kernels.ErrStepTooLarge) {
		t.Errorf("five masks where there is room for four: %v", err)
	}
	if a, err = b.describe(s, &kernels.Step{Seqs: []kernels.Seq{seq(draw(nil))}}, 1); err != nil || a.n_masks != 0 || a.masks != 0 {
		t.Errorf("without masks: %d at %d, %v", a.n_masks, a.masks, err)
	}
	for what, st := range map[string]*kernels.Step{
		"targets":   {Hold: true, Seqs: []kernels.Seq{{Tokens: []int32{1}, Blocks: []int32{0}, Targets: []int32{2}}}},
		"a mask":    {Seqs: []kernels.Seq{seq(draw(one[:1]))}},
		"many rows": {Hold: true, Seqs: slices.Repeat([]kernels.Seq{seq(draw(nil))}, 9)},
	} {
		if _, err := b.check(st); err == nil {
			t.Errorf("%s: a step was not refused", what)
		}
	}
	b.held = s
	if _, err := b.check(&kernels.Step{Seqs: []kernels.Seq{seq(draw(nil))}}); !errors.Is(err, errUnderWay) {
		t.Errorf("a step behind one that is held: %v", err)
	}
}
