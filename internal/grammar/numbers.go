package grammar

import (
	"math/big"
	"strings"
)

// bound is an end of a range of numbers.
type bound struct {
	at   *big.Rat
	open bool // at itself is outside
}

// maxDigits bounds the digits of a number in a schema, on either side of the point.
const maxDigits = 400

// decimal reads a number of a schema; false: it has too many digits.
func decimal(text string) (*big.Rat, bool) {
	if i := strings.IndexAny(text, "eE"); i >= 0 {
		exp := strings.TrimLeft(strings.TrimLeft(text[i+1:], "+-"), "0")
		if len(exp) > 3 || len(exp) == 3 && exp > "400" {
			return nil, false
		}
	}
	if len(text) > maxDigits {
		return nil, false
	}
	r, ok := new(big.Rat).SetString(text)
	return r, ok
}

// parts are the digits of |r| in front of and behind the point, the latter without zeros at the end.
func parts(r *big.Rat) (whole, frac string) {
	n, _ := r.FloatPrec()
	text := new(big.Rat).Abs(r).FloatString(n)
	whole, frac, _ = strings.Cut(text, ".")
	return whole, strings.TrimRight(frac, "0")
}

// numbers is the numbers between lo and hi, either of which may be nil, without exponents.
func (j *jsonTexts) numbers(lo, hi *bound, integer bool) *expr {
	g := j.g
	if lo != nil && hi != nil {
		c := lo.at.Cmp(hi.at)
		if c > 0 || c == 0 && (lo.open || hi.open) {
			return g.none
		}
		if c == 0 && !integer || c == 0 && lo.at.IsInt() {
			return g.lit(shortest(lo.at))
		}
	}
	if integer {
		return j.integers(floor(lo), ceil(hi))
	}
	zero := new(big.Rat)
	kids := []*expr{}
	// From zero up.
	if hi == nil || hi.at.Sign() > 0 || hi.at.Sign() == 0 && !hi.open {
		from := &bound{at: zero}
		if lo != nil && lo.at.Sign() >= 0 {
			from = lo
		}
		kids = append(kids, j.magnitudes(from, hi))
	}
	// Below zero; -0 is left out.
	if lo == nil || lo.at.Sign() < 0 {
		from := &bound{at: zero, open: true}
		if hi != nil && hi.at.Sign() < 0 {
			from = minus(hi)
		}
		kids = append(kids, g.cat(g.lit("-"), j.magnitudes(from, minus(lo))))
	}
	return g.alt(kids...)
}

// shortest is r in the spelling without an exponent and zeros at the end.
func shortest(r *big.Rat) string {
	whole, frac := parts(r)
	if r.Sign() < 0 {
		whole = "-" + whole
	}
	if frac != "" {
		whole += "." + frac
	}
	return whole
}

func minus(b *bound) *bound {
	if b == nil {
		return nil
	}
	return &bound{at: new(big.Rat).Neg(b.at), open: b.open}
}

// floor is the first integer of a range that begins at b, ceil the last of one that ends there.
func floor(b *bound) *big.Int {
	if b == nil {
		return nil
	}
	n := new(big.Int).Div(b.at.Num(), b.at.Denom()) // rounds down
	if !b.at.IsInt() || b.open {
		n.Add(n, big.NewInt(1))
	}
	return n
}

func ceil(b *bound) *big.Int {
	if b == nil {
		return nil
	}
	n := new(big.Int).Div(b.at.Num(), b.at.Denom())
	if b.at.IsInt() && b.open {
		n.Sub(n, big.NewInt(1))
	}
	return n
}

// integers is the integers from lo to hi; nil: no end. -0 is there if there are numbers on
// both of its sides.
func (j *jsonTexts) integers(lo, hi *big.Int) *expr {
	g := j.g
	if lo == nil && hi == nil {
		return g.cat(g.opt(g.lit("-")), j.natural())
	}
	if lo != nil && hi != nil && lo.Cmp(hi) > 0 {
		return g.none
	}
	var kids []*expr
	if hi == nil || hi.Sign() >= 0 {
		from := "0"
		if lo != nil && lo.Sign() > 0 {
			from = lo.String()
		}
		kids = append(kids, j.naturals(from, text(hi)))
	}
	if lo == nil || lo.Sign() < 0 {
		from := "1"
		if hi != nil && hi.Sign() < 0 {
			from = new(big.Int).Neg(hi).String()
		} else if lo != nil && hi != nil && hi.Sign() > 0 {
			from = "0"
		}
		to := ""
		if lo != nil {
			to = new(big.Int).Neg(lo).String()
		}
		kids = append(kids, g.cat(g.lit("-"), j.naturals(from, to)))
	}
	return g.alt(kids...)
}

func text(n *big.Int) string {
	if n == nil {
		return ""
	}
	return n.String()
}

// naturals is the numbers from lo to hi, both as digits; an empty hi is no end.
func (j *jsonTexts) naturals(lo, hi string) *expr {
	g := j.g
	digit := j.digit('0', '9')
	if hi != "" && (len(lo) > len(hi) || len(lo) == len(hi) && lo > hi) {
		return g.none
	}
	if len(lo) == len(hi) {
		return j.sameLength(lo, hi)
	}
	kids := []*expr{j.sameLength(lo, strings.Repeat("9", len(lo)))}
	// All lengths between.
	most := -1
	if hi != "" {
		most = len(hi) - 2
	}
	if most < 0 || most >= len(lo) {
		kids = append(kids, g.cat(j.digit('1', '9'), g.rep(digit, len(lo), most)))
	}
	if hi != "" {
		kids = append(kids, j.sameLength("1"+strings.Repeat("0", len(hi)-1), hi))
	}
	return g.alt(kids...)
}

// sameLength is the digits from lo to hi, which are equally long.
func (j *jsonTexts) sameLength(lo, hi string) *expr {
	g := j.g
	if lo == "" {
		return g.empty
	}
	digit := j.digit('0', '9')
	if strings.Trim(lo, "0") == "" && strings.Trim(hi, "9") == "" {
		return g.rep(digit, len(lo), len(lo))
	}
	if lo[0] == hi[0] {
		return g.cat(j.digit(lo[0], lo[0]), j.sameLength(lo[1:], hi[1:]))
	}
	rest := len(lo) - 1
	nines, zeros := strings.Repeat("9", rest), strings.Repeat("0", rest)
	kids := []*expr{
		g.cat(j.digit(lo[0], lo[0]), j.sameLength(lo[1:], nines)),
		g.cat(j.digit(hi[0], hi[0]), j.sameLength(zeros, hi[1:])),
	}
	if lo[0]+1 <= hi[0]-1 {
		kids = append(kids, g.cat(j.digit(lo[0]+1, hi[0]-1), g.rep(digit, rest, rest)))
	}
	return g.alt(kids...)
}

// magnitudes is the numbers from lo, which is not below zero, to hi, without a sign.
func (j *jsonTexts) magnitudes(lo, hi *bound) *expr {
	g := j.g
	digit := j.digit('0', '9')
	anyFrac := g.opt(g.cat(g.lit("."), g.rep(digit, 1, -1)))
	lw, lf := parts(lo.at)
	above := g.cat(g.lit("."), j.fracAbove(lf, lo.open))
	if lf == "" && !lo.open {
		above = anyFrac
	}
	next := new(big.Int)
	next.SetString(lw, 10)
	next.Add(next, big.NewInt(1))
	if hi == nil {
		return g.alt(g.cat(g.lit(lw), above), g.cat(j.naturals(next.String(), ""), anyFrac))
	}
	hw, hf := parts(hi.at)
	below := g.none // of the whole part hw
	if hf != "" {
		below = g.opt(g.cat(g.lit("."), j.fracBelow(hf, hi.open, true)))
	} else if !hi.open {
		below = g.opt(g.cat(g.lit("."), g.rep(j.digit('0', '0'), 1, -1)))
	}
	if lw == hw {
		both := g.product(g.compile(above), g.compile(below), false)
		return g.cat(g.lit(lw), g.automaton(both, 0, -1))
	}
	last := new(big.Int)
	last.SetString(hw, 10)
	last.Sub(last, big.NewInt(1))
	return g.alt(g.cat(g.lit(lw), above), g.cat(j.naturals(next.String(), last.String()), anyFrac), g.cat(g.lit(hw), below))
}

// fracAbove is the digits behind a point whose value is at least that of digits f; with open, above it.
func (j *jsonTexts) fracAbove(f string, open bool) *expr {
	g := j.g
	digit := j.digit('0', '9')
	if f == "" {
		if open {
			return g.cat(g.rep(j.digit('0', '0'), 0, -1), j.digit('1', '9'), g.rep(digit, 0, -1))
		}
		return g.rep(digit, 0, -1)
	}
	kids := []*expr{g.cat(j.digit(f[0], f[0]), j.fracAbove(f[1:], open))}
	if f[0] < '9' {
		kids = append(kids, g.cat(j.digit(f[0]+1, '9'), g.rep(digit, 0, -1)))
	}
	return g.alt(kids...)
}

// fracBelow is the digits behind a point, one at least if some, whose value is at most that of f;
// with open, below it.
func (j *jsonTexts) fracBelow(f string, open, some bool) *expr {
	g := j.g
	if f == "" {
		if open {
			return g.none
		}
		return g.rep(j.digit('0', '0'), 0, -1)
	}
	var kids []*expr
	if !some {
		kids = append(kids, g.empty) // less: f does not end in zeros
	}
	if f[0] > '0' {
		kids = append(kids, g.cat(j.digit('0', f[0]-1), g.rep(j.digit('0', '9'), 0, -1)))
	}
	kids = append(kids, g.cat(j.digit(f[0], f[0]), j.fracBelow(f[1:], open, false)))
	return g.alt(kids...)
}

// maxMultiple bounds the states of an automaton that divides.
const maxMultiple = 10_000

// multiples is the automaton of the numbers without exponents that m divides, with as many
// digits behind the point as m has at most; nil: m has too many digits.
func (j *jsonTexts) multiples(m *big.Rat) *auto {
	g := j.g
	places, exact := m.FloatPrec()
	scaled := new(big.Rat).Mul(m, new(big.Rat).SetInt(new(big.Int).Exp(big.NewInt(10), big.NewInt(int64(places)), nil)))
	if !exact || !scaled.IsInt() || !scaled.Num().IsInt64() || places > 30 {
		return nil
	}
	mod := scaled.Num().Int64()
	if mod <= 0 || mod*int64(places+1) > maxMultiple {
		return nil
	}
	// Classes: 0 to 9 the digits, 10 the sign, 11 the point, 12 the rest.
	a := &auto{}
	for b := range a.class {
		switch {
		case b >= '0' && b <= '9':
			a.class[b] = uint8(b - '0')
		case b == '-':
			a.class[b] = 10
		case b == '.':
			a.class[b] = 11
		default:
			a.class[b] = 12
		}
	}
	// State 0 is the start, 1 behind the sign, 2+p*mod+r behind p digits of the fraction with
	// remainder r; a point leads to the state of p = 0 again, with a flag: 2+(places+1)*mod+r.
	size := 2 + (places+2)*int(mod)
	pointed := 2 + (places+1)*int(mod)
	row := func() []int32 {
		r := make([]int32, 13)
		for i := range r {
			r[i] = -1
		}
		return r
	}
	a.trans, a.fin = make([][]int32, size), make([]bool, size)
	for s := range size {
		g.spend(2)
		a.trans[s] = row()
		if s < 2 {
			for d := range 10 {
				a.trans[s][d] = 2 + int32(int64(d)%mod)
			}
			if s == 0 {
				a.trans[s][10] = 1
			}
			continue
		}
		p, r := (s-2)/int(mod), int64(s-2)%mod
		point := s >= pointed
		if point {
			p = 0
		}
		left := r // remainder once the fraction is filled up with zeros
		for range places - p {
			left = left * 10 % mod
		}
		a.fin[s] = left == 0 && !point
		if p == 0 && !point {
			for d := range 10 {
				a.trans[s][d] = 2 + int32((r*10+int64(d))%mod)
			}
			if places > 0 {
				a.trans[s][11] = int32(pointed) + int32(r)
			}
			continue
		}
		if p < places {
			for d := range 10 {
				a.trans[s][d] = 2 + int32(p+1)*int32(mod) + int32((r*10+int64(d))%mod)
			}
		}
	}
	return g.trimmed(a)
}
