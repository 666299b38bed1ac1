package steptable

// line is a function given by points, straight between them.
type line struct{ x, y []float64 }

// add appends a point, right of the others.
func (l *line) add(x, y float64) { l.x, l.y = append(l.x, x), append(l.y, y) }

// at is level before the first point. Beyond the last it goes on as from half its x on: the last
// stretch alone would say more of noise and of a tile's edge.
func (l *line) at(x float64) float64 {
	n := len(l.x)
	switch {
	case n == 0:
		return 0
	case n == 1 || x <= l.x[0]:
		return l.y[0]
	}
	i := stretch(l.x, x)
	from := i - 1
	if x > l.x[n-1] {
		from = min(stretch(l.x, l.x[n-1]/2), n-2)
	}
	return l.y[i] + (l.y[i]-l.y[from])*(x-l.x[i])/(l.x[i]-l.x[from])
}

// within is level beyond the last point too.
func (l *line) within(x float64) float64 {
	if n := len(l.x); n > 0 && x >= l.x[n-1] {
		return l.y[n-1]
	}
	return l.at(x)
}

// rise makes a line that nowhere falls: points that do, by noise, become their mean (least squares,
// pooling adjacent violators).
func (l *line) rise() {
	type pool struct {
		sum float64
		n   int
	}
	var pools []pool
	for _, y := range l.y {
		p := pool{y, 1}
		for n := len(pools); n > 0 && pools[n-1].sum*float64(p.n) > p.sum*float64(pools[n-1].n); n = len(pools) {
			p.sum, p.n = p.sum+pools[n-1].sum, p.n+pools[n-1].n
			pools = pools[:n-1]
		}
		pools = append(pools, p)
	}
	i := 0
	for _, p := range pools {
		for range p.n {
			if p.n > 1 {
				l.y[i] = p.sum / float64(p.n)
			}
			i++
		}
	}
}

// sheet is a function of two variables, given by lines over the second: straight between them.
type sheet struct {
	x    []float64
	rows []line
}

func (s *sheet) add(x float64, row line) { s.x, s.rows = append(s.x, x), append(s.rows, row) }

// last is x of the last row.
func (s *sheet) last() float64 { return s.x[len(s.x)-1] }

// at is level before the first row and beyond the last.
func (s *sheet) at(x, y float64) float64 {
	n := len(s.x)
	switch {
	case n == 0:
		return 0
	case x <= s.x[0]:
		return s.rows[0].at(y)
	case x >= s.x[n-1]:
		return s.rows[n-1].at(y)
	}
	i := stretch(s.x, x)
	low := s.rows[i-1].at(y)
	return low + (s.rows[i].at(y)-low)*(x-s.x[i-1])/(s.x[i]-s.x[i-1])
}

// stretch returns the end of the stretch between points that x lies in, or of the nearest one.
func stretch(points []float64, x float64) int {
	low, high := 1, len(points)-1
	for low < high {
		if mid := (low + high) / 2; points[mid] < x {
			low = mid + 1
		} else {
			high = mid
		}
	}
	return low
}
