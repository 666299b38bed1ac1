package pick_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router/pick"
)

// mixing is a fleet of our own workers, whose roles do not count, and their reports.
type mixing struct {
	p    *pick.Picker
	list []fleet.Member
	view pick.View
}

func newMixing(prefill, decode int) *mixing {
	cfg := pick.DefaultConfig()
	cfg.Policy, cfg.Disaggregate, cfg.SlowStart = pick.KVEvents, pick.Mixed, 0
	m := &mixing{p: pick.New(cfg, rand.New(rand.NewPCG(1, 2))), list: fleetOf(prefill, decode).Members, view: pick.View{Now: time.Unix(100, 0)}}
	for i := range m.list {
		w := &m.list[i]
		w.KVEvents, w.Blocks, w.MaxBatch, w.Gap = "e", 10000, 64, 0.025
	}
	for range 40 { // what steps cost: 5 ms, and 20 us a prompt's token and 60 us a sequence
		m.report(func(_ int, l *fleet.Load) {
			more(l, 10, 0, 500)
			more(l, 10, 20, 0)
		})
	}
	return m
}

// more are steps that a worker has made.
func more(l *fleet.Load, steps, decodes, prompt int) {
	l.Steps.Count += int64(steps)
	l.Steps.Decodes += int64(steps * decodes)
	l.Steps.Context += int64(steps * decodes * 1000)
	l.Steps.Prompt += int64(steps * prompt)
	l.Steps.Positions += float64(steps*prompt*prompt) / 2
	l.Steps.Seconds += float64(steps) * (5e-3 + 6e-5*float64(decodes) + 2e-5*float64(prompt))
}

// report has all workers report.
func (m *mixing) report(change func(i int, l *fleet.Load)) {
	list := make([]fleet.Member, len(m.list))
	for i := range m.list {
		m.list[i].Load.GPU.Watts++ // it is another report
		change(i, &m.list[i].Load)
		list[i] = m.list[i]
	}
	version := uint64(1)
	if m.view.Snapshot != nil {
		version = m.view.Snapshot.Version + 1
	}
	m.view.Now = m.view.Now.Add(250 * time.Millisecond)
	m.view.Snapshot = fleet.NewSnapshot(version, m.view.Now, list)
	m.p.Refresh(m.view)
}

// rest has all workers rest for some time.
func (m *mixing) rest() {
	for range 40 {
		m.report(func(int, *fleet.Load) {})
	}
}

func (m *mixing) pick(t *testing.T, req pick.Request) *pick.Choice {
	t.Helper()
	req.Model, req.Seqs, req.Tokenized, req.Local = "m", 1, true, func(string) bool { return true }
	c, err := m.p.Pick(m.view, &req)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// TestMixed: any worker does any part, and which does is what costs least.
func TestMixed(t *testing.T) {
	t.Run("idle workers serve alone, whatever their role, one after the other", func(t *testing.T) {
		m := newMixing(1, 2)
		m.rest()
		seen := map[string]bool{}
		for range 3 {
			c := m.pick(t, pick.Request{Tokens: 1000, Output: 100})
			if c.Prefill != c.Decode || c.Local != pick.LocalMixed {
				t.Fatalf("%s and %s, %q", c.Prefill.ID, c.Decode.ID, c.Local)
			}
			seen[c.Decode.ID] = true
		}
		if len(seen) != 3 {
			t.Errorf("three requests went to %v", seen)
		}
	})
	t.Run("who has the prefix, unless it has too much to do", func(t *testing.T) {
		m := newMixing(1, 2)
		m.rest()
		warm := []pick.Warm{{ID: m.list[1].ID, Epoch: m.list[1].Epoch, Tokens: 7000}}
		ask := pick.Request{Tokens: 8000, Output: 10, Warm: warm}
		c := m.pick(t, ask)
		if c.Decode.ID != warm[0].ID {
			t.Errorf("%s, though %s has the prompt", c.Decode.ID, warm[0].ID)
		}
		c.EndPrefill()
		c.EndDecode()
		m.report(func(i int, l *fleet.Load) {
			if i == 1 {
				l.QueuedTokens = 50_000
			}
		})
		if c := m.pick(t, ask); c.Prefill.ID == warm[0].ID {
			t.Error("who has the prompt has a second's work before it")
		}
	})
	t.Run("a stream does not go where prompts are computed, if another worker decodes already", func(t *testing.T) {
		m := newMixing(2, 0)
		for range 40 {
			m.report(func(i int, l *fleet.Load) {
				if l.QueuedTokens, l.Running = 0, 40; i == 0 { // busy with prompts alone
					l.QueuedTokens, l.Running = 4000, 2
					more(l, 4, 0, 3000)
					return
				}
				more(l, 20, 40, 300)
			})
		}
		// Computed by the second it would be late: it has a third of its time for prompts, and many of them.
		m.report(func(i int, l *fleet.Load) {
			if i == 1 {
				more(l, 20, 40, 300)
				l.QueuedTokens = 12_000
			} else {
				more(l, 4, 0, 3000)
			}
		})
		c := m.pick(t, pick.Request{Tokens: 1000, Output: 400})
		if c.Prefill.ID != m.list[0].ID || c.Decode.ID != m.list[1].ID || c.Local != "" {
			t.Errorf("%s and %s, %q", c.Prefill.ID, c.Decode.ID, c.Local)
		}
	})
	t.Run("nobody gets a stream whose gaps are full", func(t *testing.T) {
		m := newMixing(1, 1)
		m.rest()
		m.report(func(i int, l *fleet.Load) {
			if i == 0 {
				more(l, 10, 400, 0)
			}
		})
		for range 5 {
			if c := m.pick(t, pick.Request{Tokens: 100, Output: 400}); c.Decode.ID == m.list[0].ID {
				t.Fatalf("a step of %s takes longer than its gaps may be", c.Decode.ID)
			}
		}
	})
	t.Run("a key's own promise counts, stricter or laxer", func(t *testing.T) {
		m := newMixing(2, 0)
		for i := range m.list {
			m.list[i].MaxBatch = 256
		}
		m.rest()
		m.report(func(i int, l *fleet.Load) {
			if i == 0 {
				more(l, 14, 200, 0) // steps of 17 ms
			} else {
				l.QueuedTokens = 20_000 // 0.4 s
			}
		})
		at := func(gap float64) string {
			c := m.pick(t, pick.Request{Tokens: 10, Output: 100, Gap: gap})
			defer end(c)
			return c.Decode.ID
		}
		if busy := m.list[0].ID; at(0) != busy || at(0.1) != busy || at(0.01) == busy {
			t.Errorf("%s by the workers' 25 ms, %s by 100 ms, %s by 10 ms", at(0), at(0.1), at(0.01))
		}
	})
	t.Run("it says why", func(t *testing.T) {
		m := newMixing(1, 1)
		m.rest()
		c := m.pick(t, pick.Request{Tokens: 1000, Output: 100, Explain: true})
		e := c.Explain
		if e == nil || len(e.Prefill) != 2 || len(e.Decode) != 2 || e.Split == nil || e.Split.LocalMS <= 0 || e.Split.LocalMS >= e.Split.PairMS || e.Reason == "" {
			t.Errorf("%+v", e)
		}
	})
	t.Run("one that is left out, or drains", func(t *testing.T) {
		m := newMixing(1, 1)
		m.rest()
		if c := m.pick(t, pick.Request{Tokens: 1000, Exclude: []string{m.list[0].ID}}); c.Prefill.ID == m.list[0].ID || c.Decode.ID == m.list[0].ID {
			t.Error("an excluded worker was chosen")
		}
		m.list[1].Draining = true
		m.report(func(int, *fleet.Load) {})
		if c := m.pick(t, pick.Request{Tokens: 1000}); c.Decode.ID != m.list[0].ID {
			t.Errorf("%s drains", c.Decode.ID)
		}
	})
}

func BenchmarkMixed(b *testing.B) {
	for _, n := range []int{2, 16, 1000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			m := newMixing(n, n)
			text := []byte(strings.Repeat("All happy families are alike. ", 60))
			local := func(string) bool { return true }
			b.ReportAllocs()
			for b.Loop() {
				req := pick.Request{Model: "m", Tokens: 450, Output: 100, Seqs: 1, Chain: pick.NewChain(text), Local: local}
				c, err := m.p.Pick(m.view, &req)
				if err != nil {
					b.Fatal(err)
				}
				end(c)
			}
		})
	}
}

// TestMixedLarge: of many workers some are compared, with the warm one among them.
func TestMixedLarge(t *testing.T) {
	m := newMixing(40, 40)
	m.rest()
	for i := range 20 {
		warm := m.list[3*i]
		c := m.pick(t, pick.Request{Tokens: 4000, Output: 10, Warm: []pick.Warm{{ID: warm.ID, Epoch: warm.Epoch, Tokens: 3900}}})
		if c.Decode.ID != warm.ID {
			t.Fatalf("%s, though %s has the prompt", c.Decode.ID, warm.ID)
		}
	}
}
