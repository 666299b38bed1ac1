package tokenizer

// Stopper cuts an output stream at the first stop string. It holds back text
// that may be the beginning of one, so no part of a stop string leaks. How the
// text was cut into pushes does not change the result. It is not safe for
// concurrent use.
type Stopper struct {
	stops   []stop
	include bool
	held    []byte
	done    bool
}

// stop is one stop string with its Knuth-Morris-Pratt automaton.
type stop struct {
	text  string
	fail  []int // fail[i]: longest proper border of text[:i+1]
	state int   // how many bytes of text the stream now ends with
}

// NewStopper returns a Stopper for stops; empty ones are ignored. With
// includeStop the text that ends the stream includes the stop string.
func NewStopper(stops []string, includeStop bool) *Stopper {
	s := &Stopper{include: includeStop}
	for _, text := range stops {
		if text == "" {
			continue
		}
		fail := make([]int, len(text))
		for i, k := 1, 0; i < len(text); i++ {
			for k > 0 && text[i] != text[k] {
				k = fail[k-1]
			}
			if text[i] == text[k] {
				k++
			}
			fail[i] = k
		}
		s.stops = append(s.stops, stop{text: text, fail: fail})
	}
	return s
}

// Push takes the next text and returns what may be shown. Once a stop string is
// complete, stopped is true, hit names it (of several that end at the same byte
// the longest), and all later text is dropped.
func (s *Stopper) Push(text string) (emit, hit string, stopped bool) {
	if s.done {
		return "", "", true
	}
	if len(s.stops) == 0 {
		return text, "", false
	}
	for i := range len(text) {
		for j := range s.stops {
			if st := &s.stops[j]; st.step(text[i]) && len(st.text) > len(hit) {
				hit = st.text
			}
		}
		if hit == "" {
			continue
		}
		s.held = append(s.held, text[:i+1]...)
		if !s.include {
			s.held = s.held[:len(s.held)-len(hit)]
		}
		return s.Flush(), hit, true
	}
	return s.hold(text), "", false
}

// Skip takes text in which no stop string may end, though one may begin; it
// returns what may be shown.
func (s *Stopper) Skip(text string) (emit string) {
	if s.done {
		return ""
	}
	for i := range len(text) {
		for j := range s.stops {
			if st := &s.stops[j]; st.step(text[i]) {
				st.state = st.fail[st.state-1]
			}
		}
	}
	return s.hold(text)
}

// hold adds text and returns all but what may be the beginning of a stop
// string.
func (s *Stopper) hold(text string) (emit string) {
	n := 0
	for j := range s.stops {
		n = max(n, s.stops[j].state)
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

// step feeds one byte and says whether the stop string is now complete.
func (s *stop) step(b byte) bool {
	for s.state > 0 && s.text[s.state] != b {
		s.state = s.fail[s.state-1]
	}
	if s.text[s.state] == b {
		s.state++
	}
	return s.state == len(s.text)
}
