package tokenizer

// Stops are stop strings, compiled. Any number of Stoppers share them.
type Stops struct {
	list    []stop
	include bool
}

// stop is one stop string with its Knuth-Morris-Pratt automaton.
type stop struct {
	text string
	fail []int32 // fail[i]: longest proper border of text[:i+1]
}

// NewStops compiles stop strings; empty ones are ignored. With include the text
// that ends a stream includes the stop string.
func NewStops(texts []string, include bool) *Stops {
	s := &Stops{include: include}
	for _, text := range texts {
		if text == "" {
			continue
		}
		fail := make([]int32, len(text))
		for i, k := 1, int32(0); i < len(text); i++ {
			for k > 0 && text[i] != text[k] {
				k = fail[k-1]
			}
			if text[i] == text[k] {
				k++
			}
			fail[i] = k
		}
		s.list = append(s.list, stop{text, fail})
	}
	return s
}

// Stopper cuts an output stream at the first stop string. It holds back text
// that may be the beginning of one, so no part of a stop string leaks. How the
// text was cut into pushes does not change the result. It is not safe for
// concurrent use.
type Stopper struct {
	stops *Stops
	at    []int32 // how many bytes of each stop string the stream now ends with
	held  []byte
	done  bool
}

// Stopper returns a Stopper for a new stream.
func (s *Stops) Stopper() *Stopper { return &Stopper{stops: s, at: make([]int32, len(s.list))} }

// Push takes the next text and returns what may be shown. Once a stop string is
// complete, stopped is true, hit names it (of several that end at the same byte
// the longest), and all later text is dropped.
func (s *Stopper) Push(text string) (emit, hit string, stopped bool) {
	if s.done {
		return "", "", true
	}
	if len(s.at) == 0 {
		return text, "", false
	}
	for i := range len(text) {
		for j := range s.at {
			if st := &s.stops.list[j]; s.step(j, text[i]) && len(st.text) > len(hit) {
				hit = st.text
			}
		}
		if hit == "" {
			continue
		}
		s.held = append(s.held, text[:i+1]...)
		if !s.stops.include {
			s.held = s.held[:len(s.held)-len(hit)]
		}
		return s.Flush(), hit, true
	}
	return s.hold(text), "", false
}

// Skip takes text in which no stop string may end, though one may begin; it returns what
// may be shown.
func (s *Stopper) Skip(text string) (emit string) {
	if s.done {
		return ""
	}
	for i := range len(text) {
		for j := range s.at {
			if s.step(j, text[i]) {
				s.at[j] = s.stops.list[j].fail[s.at[j]-1]
			}
		}
	}
	return s.hold(text)
}

// hold adds text and returns all but what may be the beginning of a stop string.
func (s *Stopper) hold(text string) (emit string) {
	n := 0
	for _, at := range s.at {
		n = max(n, int(at))
	}
	if len(s.held) == 0 && n == 0 {
		return text
	}
	s.held = append(s.held, text...)
	emit = string(s.held[:len(s.held)-n])
	s.held = append(s.held[:0], s.held[len(s.held)-n:]...)
	return emit
}

// Flush ends the stream for another reason and returns what was held back.
func (s *Stopper) Flush() string {
	s.done = true
	out := string(s.held)
	s.held = s.held[:0]
	return out
}

// step feeds one byte to a stop string and reports whether it is now complete.
func (s *Stopper) step(j int, b byte) bool {
	st, at := &s.stops.list[j], s.at[j]
	for at > 0 && st.text[at] != b {
		at = st.fail[at-1]
	}
	if st.text[at] == b {
		at++
	}
	s.at[j] = at
	return int(at) == len(st.text)
}
