package pick

import (
	"math"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
)

// kind is what workers have in common whose steps take as long.
type kind struct{ model, fingerprint, numerics string }

func (p *Picker) costsOf(id *classID) *costs {
	k := kind{id.Model, id.ModelFingerprint, id.Numerics}
	if p.kinds[k] == nil {
		p.kinds[k] = newCosts()
	}
	return p.kinds[k]
}

// newCosts guesses, until reports come.
func newCosts() *costs {
	c := &costs{}
	for i, guess := range [features]float64{perStep: guessBase, perDecode: guessDecode, perPrompt: guessRate} {
		c.is[i] = guess * scales[i]
	}
	return c
}

const guessDecode = 1e-4 // seconds of a step, for each sequence in it

// report takes in a worker's new report.
func (n *node) report(load *fleet.Load, c *costs, at time.Time) {
	was, now := &n.said.Steps, &load.Steps
	if now.Count > was.Count && was.Count > 0 {
		c.add(was, now)
		n.many = float64(now.Decodes-was.Decodes) / float64(now.Count-was.Count)
		if d := now.Decodes - was.Decodes; d > 0 {
			n.long = float64(now.Context-was.Context) / float64(d)
		}
		if dt := at.Sub(n.heard).Seconds(); dt > 0 && !n.heard.IsZero() {
			n.busy += (min(1, (now.Seconds-was.Seconds)/dt) - n.busy) * (1 - math.Exp(-dt/busyMemory))
		}
	}
	if now.Count == was.Count { // it rests
		n.many = 0
	}
	n.heard, n.said, n.then = at, *load, n.own
}

// decodes is how many sequences decode at n in a step: as its last steps had, and what has come from here and
// has ended since.
func (n *node) decodes() float64 { return max(0, n.many+float64(n.own.Seqs-n.then.Seqs)) }

// queued is how many prompt tokens wait at n: by its report, and by what has come from here and has been
// answered since.
func (n *node) queued() float64 {
	return float64(max(0, n.said.QueuedTokens+n.own.Tokens-n.then.Tokens))
}

const busyMemory = 2 // seconds

// costs is how long steps of one kind of workers take, learnt from their reports: a step's seconds are
//
//	base + decodes·Decode + context·Context + prompt·Prompt + positions·Position
//
// fitted by least squares over what was seen lately, relative to the times, where no coefficient is below
// zero. Reports are sums over steps, and so are their features: a mean step's time is the same line's.
type costs struct {
	a    [features][features]float64 // weighted sums of products
	b    [features]float64
	is   [features]float64 // the coefficients, in units of scales
	near float64           // the mean position of a prompt's token
}

const features = 5

// The coefficients.
const (
	perStep = iota
	perDecode
	perContext
	perPrompt
	perPosition
)

// scales make the features of a usual step about one.
var scales = [features]float64{1, 64, 64 << 10, 512, 512 << 11}

const (
	fades = 0.999 // weight of the past, at each report
	ridge = 1e-4  // of a report's weight: holds what nothing was seen of where it was
)

// add learns from the difference of two reports.
func (c *costs) add(before, now *fleet.Steps) {
	n := float64(now.Count - before.Count)
	seconds := now.Seconds - before.Seconds
	prompt := float64(now.Prompt - before.Prompt)
	if n < 1 || seconds <= 0 || prompt < 0 {
		return
	}
	positions := now.Positions - before.Positions
	x := [features]float64{n, float64(now.Decodes - before.Decodes), float64(now.Context - before.Context), prompt, positions}
	for i := range x {
		x[i] /= scales[i] * seconds // relative errors count: the line is fitted to one
	}
	for i := range x {
		for j := range x {
			c.a[i][j] = fades*c.a[i][j] + x[i]*x[j]
		}
		c.b[i] = fades*c.b[i] + x[i]
	}
	if prompt > 0 {
		c.near += (positions/prompt - c.near) / 64
	}
	c.fit()
}

// fit solves the normal equations, leaving out features as long as they would have negative coefficients.
func (c *costs) fit() {
	var out [features]bool
	for range features {
		x := c.solve(&out)
		worst := -1
		for i := range x {
			if x[i] < 0 && (worst < 0 || x[i] < x[worst]) {
				worst = i
			}
		}
		if worst < 0 {
			c.is = x
			return
		}
		out[worst] = true
	}
}

// solve is Gauss' elimination of a symmetric positive definite system: no pivots are needed.
func (c *costs) solve(out *[features]bool) (x [features]float64) {
	var m [features][features + 1]float64
	hold := ridge
	for i := range features {
		hold += ridge * c.a[i][i] / features
	}
	for i := range features {
		if out[i] {
			m[i][i] = 1
			continue
		}
		for j := range features {
			if !out[j] {
				m[i][j] = c.a[i][j]
			}
		}
		m[i][i] += hold
		m[i][features] = c.b[i] + hold*c.is[i]
	}
	for i := range features {
		for r := i + 1; r < features; r++ {
			f := m[r][i] / m[i][i]
			for k := i; k <= features; k++ {
				m[r][k] -= f * m[i][k]
			}
		}
	}
	for i := features - 1; i >= 0; i-- {
		x[i] = m[i][features]
		for j := i + 1; j < features; j++ {
			x[i] -= m[i][j] * x[j]
		}
		x[i] /= m[i][i]
	}
	return x
}

// per is a coefficient, in seconds.
func (c *costs) per(feature int) float64 { return c.is[feature] / scales[feature] }

// decoding is how long a step takes in which so many sequences decode, of so many tokens together.
func (c *costs) decoding(seqs, context float64) float64 {
	if seqs <= 0 {
		return 0
	}
	return c.per(perStep) + seqs*c.per(perDecode) + context*c.per(perContext)
}

// computing is what a prompt's tokens, from a position on, add to steps.
func (c *costs) computing(tokens, at float64) float64 {
	return tokens * (c.per(perPrompt) + (at+tokens/2)*c.per(perPosition))
}

// queue is what tokens of other prompts add to them.
func (c *costs) queue(tokens float64) float64 {
	return tokens * (c.per(perPrompt) + c.near*c.per(perPosition))
}
