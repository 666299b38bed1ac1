package main

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/xpyd/xpyd/internal/loadgen/arrival"
	"github.com/xpyd/xpyd/internal/loadgen/workload"
	"github.com/xpyd/xpyd/internal/steptable"
)

// twinLoad is a load, for some fleets of one machine.
type twinLoad struct {
	name    string
	closed  int // clients; 0: entries come at their times
	entries []workload.Entry
}

// sizes are those of a machine's loads.
type sizes struct {
	in, out int // tokens of the usual request
	prefix  int // blocks that several requests share
	most    int // tokens of a request
	trace   int // lengths of traces are divided by it
	batch   int // of the usual step that decodes
}

// repeated are n requests of one length.
func repeated(n, in, out int) []workload.Entry {
	return slices.Repeat([]workload.Entry{{In: in, Out: out}}, n)
}

// loads are for the fleet that was calibrated.
func (m *machine) loads() ([]twinLoad, error) {
	s, window, rate := &m.sizes, m.window, m.fit.Rate
	open := func(share, burst float64, in, out string, prefixes int) (list []workload.Entry) {
		ins, _ := workload.ParseLengths(in, 1) // these are right
		outs, _ := workload.ParseLengths(out, 1)
		times, rng := arrival.New(arrival.Config{Rate: share * rate, Burstiness: burst}, 1), rand.New(rand.NewPCG(1, 1))
		for at := times.Next(); at < window; at = times.Next() {
			e := workload.Entry{At: at, In: min(ins.Tokens(rng, 1), s.most/2), Out: min(outs.Tokens(rng, 2), s.most/4)}
			if prefixes > 0 { // blocks of many, and one of its own
				of := rng.IntN(prefixes) * s.prefix
				for b := range s.prefix {
					e.Blocks = append(e.Blocks, uint64(of+b))
				}
				e.Blocks = append(e.Blocks, uint64(prefixes*s.prefix+len(list)))
				e.In = s.prefix*workload.BlockTokens + min(e.In, workload.BlockTokens)
			}
			list = append(list, e)
		}
		return list
	}
	in, out, n := fmt.Sprint(s.in), fmt.Sprint(s.out), int(window.Seconds()*rate)
	list := []twinLoad{
		{"closed 1", 1, repeated(max(n/16, 20), s.in*3/2, s.out*4/5)},
		{"closed 4", 4, repeated(max(n/4, 40), s.in, s.out)},
		{"closed 16", 16, repeated(max(2*n/3, 80), s.in, s.out)},
		{"open 30 %", 0, open(0.3, 1, in, out, 0)},
		{"open 60 %", 0, open(0.6, 1, fmt.Sprintf("%d-%d", s.in/4, s.in*7/4), "exp:"+out, 0)},
		{"open 85 %", 0, open(0.85, 1, in, out, 0)},
		{"bursts 50 %", 0, open(0.5, 0.4, fmt.Sprintf("lognormal:%d,0.6", s.in*3/4), fmt.Sprintf("exp:%d", s.out*4/5), 0)},
		{"prefixes", 0, open(0.3, 1, "64-256", fmt.Sprintf("%d-%d", s.out*3/5, s.out*6/5), 4)},
	}
	for _, path := range m.files {
		entries, err := m.traced(path, rate/2)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		list = append(list, twinLoad{filepath.Base(path), 0, entries})
	}
	return list, nil
}

// traced is a trace's first requests, at its times but so much faster or slower that they keep the
// device as busy as so many usual ones a second.
func (m *machine) traced(path string, rate float64) (list []workload.Entry, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	all, err := workload.ReadTrace(f)
	if err != nil {
		return nil, err
	}
	s, busy := &m.sizes, 0.0
	span := m.window.Seconds() * rate * m.cost(s.in, s.out)
	for _, e := range all {
		if s.trace > 1 { // its blocks would not be whole
			e.In, e.Out, e.Blocks = max(e.In/s.trace, 1), max(e.Out/s.trace, 2), nil
		}
		if e.In+e.Out > s.most {
			continue
		}
		list = append(list, e)
		if busy += m.cost(e.In, e.Out); busy >= span {
			break
		}
	}
	if len(list) < 10 {
		return nil, fmt.Errorf("%d requests of at most %d tokens: too few", len(list), s.most)
	}
	first := list[0].At
	speed := (list[len(list)-1].At - first).Seconds() / m.window.Seconds()
	for i := range list {
		list[i].At = time.Duration(float64(list[i].At-first) / speed)
	}
	return list, nil
}

// cost is how long a request keeps the device busy among others, in seconds.
func (m *machine) cost(in, out int) float64 {
	prompt, _ := m.table.Step(steptable.Load{Pieces: []steptable.Piece{{Tokens: in}}})
	step, _ := m.table.Step(steptable.Load{Decodes: m.sizes.batch, Context: m.sizes.batch * (in + out/2)})
	return prompt.Seconds() + step.Seconds()*float64(out)/float64(m.sizes.batch)
}
