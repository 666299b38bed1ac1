package sim

import (
	"cmp"
	"slices"
	"sort"
	"time"

	"github.com/xpyd/xpyd/internal/loadgen/workload"
	"github.com/xpyd/xpyd/internal/steptable"
)

// Bound returns a rate, in requests a second, that no fleet of so many workers keeps up, however its
// requests are placed: what the devices compute if they take whatever mix of steps is best, always
// full, and if everybody has in cache what anybody has computed. It is the optimum of a linear program:
//
//	most   r
//	over   x[k] >= 0, the part of the devices' time that goes to steps of kind k, of n[k] tokens
//	       that decode and m[k] of prompts, which take t[k]
//	where  sum x[k] <= workers
//	       r * (tokens of a prompt that are new) <= sum x[k] m[k] / t[k]
//	       r * (tokens of an answer but the first) <= sum x[k] n[k] / t[k]
//	       sum x[k] n[k] (t[k] - TPOT) / t[k] <= 0, the mean gap; with ITL, t[k] <= ITL where n[k] > 0
//
// Times to first tokens are not in it. Of the requests those that cost most need not be good, and are not
// served: by the prices of a prompt's token and an answer's that the program's dual has where they are left out.
func Bound(w *Worker, workers int, load []Request, p Promise) float64 {
	all := needs(load)
	if len(all) == 0 {
		return 0
	}
	share := cmp.Or(p.Share, 1)
	kept := max(1, int(share*float64(len(all))))
	rate, prices := served(w, workers, all, p)
	for n := 0; n < rounds && kept < len(all); n++ {
		slices.SortStableFunc(all, func(a, b needed) int {
			return cmp.Compare(a.fresh*prices[1]+a.answer*prices[2], b.fresh*prices[1]+b.answer*prices[2])
		})
		rate, prices = served(w, workers, all[:kept], p)
	}
	return rate / share
}

// rounds are enough for prices, and who is left out by them, to fit each other.
const rounds = 3

// served is the rate of requests with such needs of which all are served, and the prices of the program's rows.
func served(w *Worker, workers int, list []needed, p Promise) (rate float64, prices []float64) {
	need := mean(list)
	// Rows: devices, prompts, answers, gaps. Columns: the kinds of steps, and the rate.
	limits := []float64{float64(workers), 0, 0, 0}
	var columns [][]float64
	room := float64(w.Blocks*w.BlockTokens) / max(need.context, 1)
	most := int(min(float64(w.Engine.MaxRunning), room))
	takes := func(n, m int) time.Duration {
		s := steptable.Load{Decodes: n, Context: int(float64(n) * need.context)}
		if m > 0 {
			s.Pieces = []steptable.Piece{{Tokens: m, Position: int(max(0, need.position-float64(m)/2)), Draws: 1}}
		}
		mean, _ := w.Steps.Step(s)
		return mean
	}
	for _, m := range grid(max(w.Engine.StepTokens, w.Engine.PrefillTokens)) {
		list := grid(most)
		if p.ITL > 0 { // the grid may miss the largest of those that keep it
			list = append(list, max(0, sort.Search(most+1, func(n int) bool { return takes(n, m) > p.ITL })-1))
		}
		for _, n := range list {
			mean := takes(n, m)
			t := mean.Seconds()
			if n+m == 0 || t <= 0 || n > 0 && p.ITL > 0 && mean > p.ITL {
				continue
			}
			gap := 0.0
			if p.TPOT > 0 {
				gap = float64(n) * (t - p.TPOT.Seconds()) / t
			}
			columns = append(columns, []float64{1, -float64(m) / t, -float64(n) / t, gap})
		}
	}
	columns = append(columns, []float64{0, need.fresh, need.answer, 0})
	gain := make([]float64, len(columns))
	gain[len(gain)-1] = 1
	return maximise(gain, columns, limits)
}

// needed is what a request needs, or requests do on the average.
type needed struct {
	fresh, answer float64 // tokens to compute of a prompt, and to decode
	position      float64 // of the former
	context       float64 // of the latter
}

// mean weighs positions and contexts by the tokens that have them.
func mean(list []needed) (m needed) {
	for _, n := range list {
		m.fresh += n.fresh
		m.answer += n.answer
		m.position += n.fresh * n.position
		m.context += n.answer * n.context
	}
	m.position /= max(m.fresh, 1)
	m.context /= max(m.answer, 1)
	m.fresh, m.answer = m.fresh/float64(len(list)), m.answer/float64(len(list))
	return m
}

// needs counts a piece that several prompts have in common once.
func needs(load []Request) (list []needed) {
	seen := map[uint64]bool{}
	for i := range load {
		q := &load[i]
		at := 0
		for _, id := range q.Prompt.blocks {
			if !seen[id] {
				break
			}
			at += workload.BlockTokens
		}
		for _, id := range q.Prompt.blocks {
			seen[id] = true
		}
		tokens := q.Prompt.Tokens()
		fresh := max(tokens-at, 1) // one is computed, for its logits
		list = append(list, needed{float64(fresh), float64(q.Output - 1), float64(tokens-fresh+tokens) / 2, float64(tokens) + float64(q.Output)/2})
	}
	return list
}

// grid is sizes of a step's part, up to most.
func grid(most int) []int {
	var list []int
	for n := 0.0; int(n) < most; n = max(n+1, n*1.15) {
		list = append(list, int(n))
	}
	return append(list, most)
}

// maximise returns the most that gain*x reaches, and the price of each limit, over x >= 0 whose columns add up to no more than the
// limits, which are not negative: by the simplex method with Bland's rule (New finite pivoting rules
// for the simplex method, 1977), which ends also where vertices coincide. The optimum must be bounded.
func maximise(gain []float64, columns [][]float64, limits []float64) (most float64, prices []float64) {
	const zero = 1e-12
	rows, cols := len(limits), len(columns)
	table := make([][]float64, rows+1) // a slack for each row; the last is the gain, negated
	for r := range table {
		table[r] = make([]float64, cols+rows+1)
		for c := range columns {
			if r < rows {
				table[r][c] = columns[c][r]
			} else {
				table[r][c] = -gain[c]
			}
		}
		if r < rows {
			table[r][cols+r], table[r][cols+rows] = 1, limits[r]
		}
	}
	basis := make([]int, rows)
	for r := range basis {
		basis[r] = cols + r
	}
	for {
		enters := 0
		for enters < cols+rows && table[rows][enters] >= -zero {
			enters++
		}
		if enters == cols+rows {
			return table[rows][cols+rows], table[rows][cols : cols+rows]
		}
		leaves, best := -1, 0.0
		for r := range rows {
			if a := table[r][enters]; a > zero {
				ratio := table[r][cols+rows] / a
				if leaves < 0 || ratio < best || ratio == best && basis[r] < basis[leaves] {
					leaves, best = r, ratio
				}
			}
		}
		if leaves < 0 {
			return table[rows][cols+rows], table[rows][cols : cols+rows]
		}
		pivot(table, leaves, enters)
		basis[leaves] = enters
	}
}

// pivot makes a column that of a unit vector.
func pivot(table [][]float64, row, col int) {
	by := table[row][col]
	for c := range table[row] {
		table[row][c] /= by
	}
	for r := range table {
		if f := table[r][col]; r != row && f != 0 {
			for c := range table[r] {
				table[r][c] -= f * table[row][c]
			}
		}
	}
}
