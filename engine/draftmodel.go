package engine

import (
	"errors"
	"fmt"

	"github.com/xpyd/xpyd/kernels"
)

// DraftModel is the Drafter that has a smaller model of the same vocabulary draw: each token with the
// randomness that the target will draw it with, so that where the two agree on the probabilities, they
// mostly agree on the token. It has KV rows of its own, by sequence, in its own backend's pool. What it
// lacks of a sequence it computes a piece of in each call, and guesses once it has all of it. Whoever
// was asked about longest ago loses its rows to others.
type DraftModel struct {
	backend kernels.Backend
	blocks  []int32 // free
	rows    map[uint64]*draftRows
	clock   uint64

	// Of a call.
	going []*going
	seqs  []kernels.Seq
}

// draftRows are a sequence's.
type draftRows struct {
	table  []int32
	tokens []int32 // that have rows
	used   uint64
}

// going is a sequence that is being drafted.
type going struct {
	*draftRows
	ask  *Ask
	left []int32 // tokens without rows
}

// draftCatchUp is how many tokens a call computes of sequences that the draft model does not have: the
// step waits for them.
const draftCatchUp = 256

// NewDraftModel takes a backend of a vocabulary of so many tokens. The caller closes it after the
// engine.
func NewDraftModel(b kernels.Backend, vocab int) (*DraftModel, error) {
	if a := b.Arch(); a.Vocab != vocab {
		return nil, fmt.Errorf("the draft model has %d tokens, the model %d", a.Vocab, vocab)
	}
	m := &DraftModel{backend: b, rows: make(map[uint64]*draftRows)}
	for id := b.Blocks() - 1; id >= 0; id-- {
		m.blocks = append(m.blocks, int32(id))
	}
	return m, nil
}

// Name implements Drafter.
func (*DraftModel) Name() string { return "draft" }

// Slow implements Drafter.
func (*DraftModel) Slow() bool { return true }

// Forget implements Drafter.
func (m *DraftModel) Forget(id uint64) {
	if r := m.rows[id]; r != nil {
		m.blocks = append(m.blocks, r.table...)
		delete(m.rows, id)
	}
}

// Draft implements Drafter.
func (m *DraftModel) Draft(asks []Ask) {
	m.clock++
	m.going = m.going[:0]
	left := draftCatchUp
	for i := range asks {
		a := &asks[i]
		a.Drafts = a.Drafts[:0]
		r := m.hold(a)
		if r == nil {
			continue
		}
		if n := len(a.Tokens) - len(r.tokens); n > 1+a.Most { // others may do with what is left
			n = min(n, left)
			left -= n
			if n == 0 {
				continue
			}
			a.Caught = true
			m.going = append(m.going, &going{draftRows: r, ask: a, left: a.Tokens[len(r.tokens):][:n]})
			continue
		}
		m.going = append(m.going, &going{draftRows: r, ask: a, left: a.Tokens[len(r.tokens):]})
	}
	for len(m.going) > 0 {
		if err := m.step(); err != nil {
			panic(err) // the engine says so, and goes on without drafts
		}
	}
}

// hold returns the rows of a sequence with blocks for its drafts too; nil: there is no room.
func (m *DraftModel) hold(a *Ask) *draftRows {
	shape := m.backend.Arch()
	end := len(a.Tokens) + a.Most
	if end > shape.MaxPositions {
		return nil
	}
	r := m.rows[a.ID]
	if r == nil {
		r = &draftRows{}
		m.rows[a.ID] = r
	}
	r.used = m.clock
	same := 0
	for same < len(r.tokens) && same < len(a.Tokens)-1 && r.tokens[same] == a.Tokens[same] { // the last is computed for its logits
		same++
	}
	r.tokens = r.tokens[:same]
	size := m.backend.Layout().BlockTokens
	for want := (end + size - 1) / size; len(r.table) < want; {
		if len(m.blocks) == 0 && !m.evict() {
			return nil
		}
		n := len(m.blocks) - 1
		r.table, m.blocks = append(r.table, m.blocks[n]), m.blocks[:n]
	}
	return r
}

// evict frees the blocks of the sequence that was asked about longest ago, before this call.
func (m *DraftModel) evict() bool {
	var oldest uint64
	var at *draftRows
	for id, r := range m.rows {
		if r.used < m.clock && (at == nil || r.used < at.used) {
			oldest, at = id, r
		}
	}
	if at == nil {
		return false
	}
	m.Forget(oldest)
	return true
}

// step computes what goes on one step further.
func (m *DraftModel) step() error {
	m.seqs = m.seqs[:0]
	for _, g := range m.going {
		s := kernels.Seq{Tokens: g.left, Pos: len(g.tokens), Blocks: g.table}
		if len(g.tokens)+len(g.left) >= len(g.ask.Tokens) {
			sample := g.ask.Sample
			sample.Position += len(g.ask.Drafts)
			s.Samples = []kernels.Sample{sample}
		}
		m.seqs = append(m.seqs, s)
	}
	results, err := m.backend.Step(&kernels.Step{Seqs: m.seqs})
	if err != nil {
		return fmt.Errorf("draft model: %w", err)
	}
	if len(results) != len(m.seqs) {
		return errors.New("draft model: results of another step")
	}
	on := m.going[:0]
	for i, g := range m.going {
		g.tokens = append(g.tokens, g.left...)
		if len(results[i].Samples) == 0 {
			continue
		}
		id := results[i].Samples[0].Token
		if id < 0 {
			continue
		}
		g.ask.Drafts = append(g.ask.Drafts, id)
		if len(g.ask.Drafts) < g.ask.Most {
			g.left = []int32{id}
			on = append(on, g)
		}
	}
	m.going = on
	return nil
}
