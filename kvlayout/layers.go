package kvlayout

import (
	"fmt"
	"strconv"
	"strings"
)

// Layers are model layers by number, ascending. As text they are runs, with a
// step where it is not 1: "0-31", "1-35/2", "0-4,6-10".
type Layers []int

// Run is n layers from first on.
func Run(first, n int) Layers { return Every(first, 1, n) }

// Every is n layers from first on, step apart.
func Every(first, step, n int) Layers {
	l := make(Layers, max(n, 0))
	for i := range l {
		l[i] = first + i*step
	}
	return l
}

func (l Layers) String() string {
	var b strings.Builder
	for len(l) > 0 {
		n, step := 1, 1 // the longest run with one step
		if len(l) > 1 {
			step = l[1] - l[0]
		}
		for n < len(l) && l[n]-l[n-1] == step {
			n++
		}
		if n == 2 && step != 1 {
			n = 1
		}
		if b.Len() > 0 {
			b.WriteByte(',')
		}
		b.WriteString(strconv.Itoa(l[0]))
		if n > 1 {
			b.WriteString("-" + strconv.Itoa(l[n-1]))
			if step != 1 {
				b.WriteString("/" + strconv.Itoa(step))
			}
		}
		l = l[n:]
	}
	return b.String()
}

// MarshalText implements encoding.TextMarshaler.
func (l Layers) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler. It accepts at most
// MaxLayers layers, ascending.
func (l *Layers) UnmarshalText(b []byte) error {
	*l = nil
	next := 0
	for part := range strings.SplitSeq(string(b), ",") {
		run, by, stepped := strings.Cut(part, "/")
		from, to, ranged := strings.Cut(run, "-")
		if !ranged {
			to = from
		}
		if !stepped {
			by = "1"
		}
		first, err1 := strconv.ParseUint(from, 10, 16)
		last, err2 := strconv.ParseUint(to, 10, 16)
		step, err3 := strconv.ParseUint(by, 10, 16)
		if err1 != nil || err2 != nil || err3 != nil || int(first) < next || last < first || last >= MaxLayers || step < 1 {
			return fmt.Errorf("layers: %q", clip(part))
		}
		for n := first; n <= last; n += step {
			*l = append(*l, int(n))
		}
		next = int(last) + 1
	}
	return nil
}
