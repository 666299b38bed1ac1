package enginetest

import (
	"errors"
	"fmt"
	"reflect"
	"slices"

	"github.com/xpyd/xpyd/kernels"
)

// Pipelined is a Backend that is also a kernels.Holder. It runs a step as late as it
// can, when awaited, so that a block given away too soon is overwritten.
type Pipelined struct {
	*Backend
	// MostDraws, if not 0, is how many draws a step may ask for. Set it before the
	// engine starts.
	MostDraws int

	queue []launched
	held  bool    // the last of them waits for Draw
	drawn []int32 // by the latest step that ran
	both  int
}

// launched is a step with what it looked like when it was launched.
type launched struct{ step, then *kernels.Step }

// Overlapped returns how many steps were launched while one was under way.
func (p *Pipelined) Overlapped() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.both
}

// UnderWay returns how many steps wait to be awaited; only when the engine rests.
func (p *Pipelined) UnderWay() int { return len(p.queue) }

// Launch implements kernels.Launcher.
func (p *Pipelined) Launch(s *kernels.Step) error {
	switch {
	case len(p.queue) == 2:
		return errors.New("a third step is launched")
	case p.held:
		return errors.New("a step is launched behind one whose draws wait")
	}
	draws := 0
	for i := range s.Seqs {
		draws += len(s.Seqs[i].Samples)
	}
	if p.MostDraws > 0 && draws > p.MostDraws {
		return fmt.Errorf("%w: %d draws, at most %d", kernels.ErrStepTooLarge, draws, p.MostDraws)
	}
	spoil(p.last)
	p.last = nil
	if len(p.queue) == 1 {
		p.mu.Lock()
		p.both++
		p.mu.Unlock()
	}
	p.queue, p.held = append(p.queue, launched{s, snapshot(s)}), s.Hold
	return nil
}

// Draw implements kernels.Holder.
func (p *Pipelined) Draw() {
	if !p.held {
		panic("no step's draws wait")
	}
	last := &p.queue[len(p.queue)-1]
	now := snapshot(last.step)
	for i := range now.Seqs {
		for j := range now.Seqs[i].Samples { // only masks may have changed
			last.then.Seqs[i].Samples[j].Mask = now.Seqs[i].Samples[j].Mask
		}
	}
	p.held = false
}

// Await implements kernels.Launcher.
func (p *Pipelined) Await() ([]kernels.Result, error) {
	if len(p.queue) == 0 {
		return nil, errors.New("no step is under way")
	}
	if p.held && len(p.queue) == 1 {
		return nil, errors.New("the step's draws wait")
	}
	l := p.queue[0]
	p.queue = p.queue[1:]
	if !reflect.DeepEqual(snapshot(l.step), l.then) {
		return nil, errors.New("the step was changed while it was under way")
	}
	s := *l.step
	s.Seqs = slices.Clone(s.Seqs)
	for i := range s.Seqs {
		q := &s.Seqs[i]
		if q.After == 0 {
			continue
		}
		if q.After < 0 || q.After > len(p.drawn) || len(q.Tokens) != 1 {
			return nil, fmt.Errorf("sequence %d: %d tokens after draw %d of %d", i, len(q.Tokens), q.After, len(p.drawn))
		}
		q.Tokens = p.drawn[q.After-1 : q.After]
	}
	results, err := p.Step(&s)
	if err != nil {
		return nil, err
	}
	p.drawn = nil
	for _, r := range results {
		for _, d := range r.Samples {
			p.drawn = append(p.drawn, max(d.Token, 0)) // NoToken is the host's alone
		}
	}
	return results, nil
}

// snapshot copies what a step refers to, but for OnLayer.
func snapshot(s *kernels.Step) *kernels.Step {
	c := &kernels.Step{Seqs: slices.Clone(s.Seqs)}
	for i := range c.Seqs {
		q := &c.Seqs[i]
		q.Tokens, q.Blocks, q.Targets = slices.Clone(q.Tokens), slices.Clone(q.Blocks), slices.Clone(q.Targets)
		q.Samples = slices.Clone(q.Samples)
		for j := range q.Samples {
			d := &q.Samples[j]
			d.Prompt, d.Output, d.Bias, d.Ban = slices.Clone(d.Prompt), slices.Clone(d.Output), slices.Clone(d.Bias), slices.Clone(d.Ban)
			d.Mask = slices.Clone(d.Mask)
		}
	}
	return c
}
