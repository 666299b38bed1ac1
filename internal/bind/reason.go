package bind

import (
	"bytes"
	"sync"
)

// marks finds a mark in the tokens of an answer, by their text.
type marks struct {
	text []byte
	back []int // text[:back[n]] is the longest end of text[:n] that begins text, and shorter
}

func newMarks(text string) *marks {
	m := &marks{text: []byte(text), back: make([]int, len(text)+1)}
	for n, k := 2, 0; n <= len(text); n++ {
		for k > 0 && text[n-1] != text[k] {
			k = m.back[k]
		}
		if text[n-1] == text[k] {
			k++
		}
		m.back[n] = k
	}
	return m
}

// feed goes on behind n bytes of the mark. It returns how many have come then, or with all of them the
// text behind.
func (m *marks) feed(n int, text []byte) (now int, rest []byte, found bool) {
	for i, b := range text {
		for n > 0 && m.text[n] != b {
			n = m.back[n]
		}
		if m.text[n] == b {
			n++
		}
		if n == len(m.text) {
			return 0, text[i+1:], true
		}
	}
	return n, nil, false
}

// begins reports whether a token's text goes on with the mark behind n bytes of it, or ends it.
func (m *marks) begins(n int, text []byte) (now int, rest []byte, may bool) {
	if left := m.text[n:]; len(text) < len(left) {
		return n + len(text), nil, len(text) > 0 && bytes.HasPrefix(left, text)
	} else if bytes.HasPrefix(text, left) {
		return len(m.text), text[len(left):], true
	}
	return 0, nil, false
}

// think is a reasoning format for one vocabulary. Lists are made when they are first wanted.
type think struct {
	open, end *marks // open is nil: reasoning has no mark that begins it
	tokens    [][]byte

	mu      sync.Mutex
	opening map[int][]int32 // by bytes of open that have come: tokens that go on with it
	torn    map[int][]int32 // by bytes of end: tokens that end reasoning with text behind that is no whitespace
}

func (t *think) opens(n int) []int32 {
	return t.list(&t.opening, n, func(text []byte) bool {
		_, rest, may := t.open.begins(n, text)
		return may && !t.tear(0, rest)
	})
}

// tears lists tokens that may not come behind n bytes of the mark: the grammar would not see all of the
// answer.
func (t *think) tears(n int) []int32 {
	return t.list(&t.torn, n, func(text []byte) bool { return t.tear(n, text) })
}

func (t *think) tear(n int, text []byte) bool {
	_, rest, found := t.end.feed(n, text)
	return found && len(bytes.TrimSpace(rest)) > 0
}

// list caches what is true of the tokens. There is an entry for each byte of a mark at most.
func (t *think) list(by *map[int][]int32, n int, is func(text []byte) bool) []int32 {
	t.mu.Lock()
	defer t.mu.Unlock()
	list, ok := (*by)[n]
	if !ok {
		if *by == nil {
			*by = map[int][]int32{}
		}
		for id, text := range t.tokens {
			if len(text) > 0 && is(text) {
				list = append(list, int32(id))
			}
		}
		(*by)[n] = list
	}
	return list
}

func (t *think) text(token int32) []byte {
	if token < 0 || int(token) >= len(t.tokens) {
		return nil
	}
	return t.tokens[token]
}
