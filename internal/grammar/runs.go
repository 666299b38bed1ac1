package grammar

// runSets are sets of bytes that patterns often repeat: letters and digits, small letters and digits.
var runSets = [...]byteSet{runSet("AZaz09"), runSet("az09")}

func runSet(ranges string) (set byteSet) {
	for i := 0; i < len(ranges); i += 2 {
		set.add(ranges[i], ranges[i+1])
	}
	return set
}

// runSlice parts the tokens for a place where any number of bytes of a set may come, by what is
// behind those that they begin with.
type runSlice struct {
	mask  []uint32 // of bytes of the set alone
	tails trie     // token is an index of heads
	heads []heads
}

func (v *Vocabulary) runSlice(set byteSet, texts [][]byte, ids []int32) runSlice {
	r := runSlice{mask: make([]uint32, v.words)}
	byTail := map[string]*heads{}
	for i, text := range texts {
		size := 0
		for size < len(text) && set.has(text[size]) {
			size++
		}
		if size == len(text) {
			v.set(r.mask, ids[i])
		} else {
			v.addTail(byTail, text[size:], int32(size), ids[i])
		}
	}
	r.tails, r.heads = newTails(byTail)
	return r
}

// run says that behind a state any number of bytes of a set, or of plain characters, may come.
type run struct {
	slice int    // of the vocabulary's runs, or plainRun, or noRun
	next  *state // behind one of them or more, whichever
}

const (
	noRun    = -1
	plainRun = len(runSets)
)

// run finds the run of s.
func (w *walker) run(s *state) *run {
	r := s.run.Load()
	if r == nil {
		r = w.findRun(s)
		s.run.Store(r)
	}
	return r
}

func (w *walker) findRun(s *state) *run {
	if t := w.behindPlain(s); t != nil && w.behindPlain(t) == t {
		return &run{plainRun, t}
	}
	for i := range runSets {
		if t := w.behindAny(s, &runSets[i]); t != nil && w.behindAny(t, &runSets[i]) == t {
			return &run{i, t}
		}
	}
	return &run{slice: noRun}
}

// behindAny is the state behind s and any byte of the set; nil if it is not always the same.
func (w *walker) behindAny(s *state, set *byteSet) *state {
	var t *state
	var seen byteSet // of classes
	for b := range 256 {
		c := w.m.class[b]
		if !set.has(byte(b)) || seen.has(c) {
			continue
		}
		seen.add(c, c)
		next := w.m.step(s, c)
		if next == w.m.dead || t != nil && next != t {
			return nil
		}
		t = next
	}
	return t
}

// behindPlain is the state behind s and any plain character; nil if it is not always the same.
func (w *walker) behindPlain(s *state) *state {
	t := w.m.step(s, w.m.class['~'])
	if t == w.m.dead {
		return nil
	}
	for _, row := range utf8Rows {
		from := s
		for _, r := range row {
			var set byteSet
			set.add(r[0], r[1])
			if from = w.behindAny(from, &set); from == nil || from.busy || from.final && from != t {
				return nil
			}
		}
		if from != t {
			return nil
		}
	}
	return t
}

// byRun visits the tokens: all of them from s, or where s has a run what is behind it.
func (w *walker) byRun(s config, visit func(t *trie, s config)) {
	r := w.run(s.at)
	if r.slice == noRun || r.next.busy || r.next.final && s.top != w.bottom {
		visit(&w.v.all, s)
		return
	}
	p := &w.v.plain[len(plainCuts)-1].runSlice
	if r.slice != plainRun {
		p = &w.v.runs[r.slice]
	}
	w.or(p.mask)
	w.heads, w.from, w.to = p.heads, 0, 0
	if r.next == s.at {
		w.to = manyChars
	}
	visit(&p.tails, s)
	if r.next != s.at {
		w.from, w.to = 1, manyChars
		visit(&p.tails, config{r.next, s.top})
	}
	w.heads = nil
}
