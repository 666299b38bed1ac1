package pick

import "time"

// line is y = a + b·x, fitted to what was seen lately: least squares with weights that fade by
// forget with each point. The zero value knows nothing.
type line struct {
	w, x, y, xx, xy float64
	n               int
}

const (
	forget    = 0.98
	enough    = 8    // points that make a node's own line better than its class's
	guessBase = 5e-3 // seconds, before anything is known
	guessRate = 1e-4 // seconds a token
)

func (l *line) add(x, y float64) {
	l.w, l.x, l.y, l.xx, l.xy = l.w*forget+1, l.x*forget+x, l.y*forget+y, l.xx*forget+x*x, l.xy*forget+x*y
	l.n++
}

// fit returns a and b, neither below zero: more work never takes less time.
func (l *line) fit() (a, b float64) {
	if l.n == 0 {
		return guessBase, guessRate
	}
	if spread := l.xx - l.x*l.x/l.w; spread > 1e-6*l.xx {
		b = (l.xy - l.x*l.y/l.w) / spread
		a = (l.y - b*l.x) / l.w
	} else { // all points at one place: by proportion
		a, b = -1, 0
	}
	switch {
	case b < 0:
		return l.y / l.w, 0
	case a < 0 && l.xx > 0:
		return 0, l.xy / l.xx
	case a < 0:
		return l.y / l.w, 0
	}
	return a, b
}

func (l *line) at(x float64) float64 {
	a, b := l.fit()
	return a + b*x
}

// The lines of a node and a class: prefill's time by the work before its end, decode's by the
// tokens that it lacks, and decode's alone by the work.
const (
	linePrefill = iota
	lineDecode
	lineLocal
)

// time predicts by a node's own line, or its class's while that knows more.
func (n *node) time(kind int, x float64) float64 {
	own, class := &n.lines[kind], &n.class.lines[kind]
	if own.n >= enough || own.n >= class.n {
		return own.at(x)
	}
	return class.at(x)
}

// learn adds a point to a node's line and its class's; compared: it counts for ejection too.
func (n *node) learn(kind int, x float64, took time.Duration, compared bool) {
	if n.class == nil || took < 0 {
		return
	}
	if compared {
		n.took(&n.class.lines[kind], x, took)
	}
	n.lines[kind].add(x, took.Seconds())
	n.class.lines[kind].add(x, took.Seconds())
}

// Answered tells the picker how long the first token took from dispatch, and how much of that was
// prefill's leg; 0 if that is unknown.
func (c *Choice) Answered(prefill, first time.Duration) {
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	compared := c.p.times()
	c.succeeded(&c.decode)
	if c.Local != "" || c.prefill.n == c.decode.n {
		c.decode.n.learn(lineLocal, c.work, first, compared)
		return
	}
	if prefill <= 0 || prefill > first {
		prefill = first
	}
	c.prefill.n.learn(linePrefill, c.work, prefill, compared)
	c.decode.n.learn(lineDecode, c.moved, first-prefill, compared)
}
