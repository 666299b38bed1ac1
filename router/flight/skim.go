package flight

import (
	"strconv"
	"strings"

	"github.com/xpyd/xpyd/internal/jsonscan"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router/limit"
)

// skim reads a JSON object as it passes: which model its top level names, whether it has a
// field that a client may not set, and, at any level, what the engine would fetch. Whoever
// feeds it a piece looks at its findings and at scan.Err: it reads nothing after an error,
// so nothing after one may pass.
type skim struct {
	model  string
	named  bool               // there was a key model
	twice  bool               // there was another one, or another name than model, if that was set
	link   string             // the first field that links legs; "": none
	urls   []string           // as openai.Top.URLs; whoever has checked them empties it
	worded bool               // priority is a string, which some engines read as a number
	best   limit.Class        // the best priority that may be asked for
	better []priorityAt       // where the last piece asks for a better one
	num    map[string]float64 // the values of counted keys

	scan  jsonscan.Scanner
	piece int    // offset of the last piece
	top   string // key at the top level
	key   string // the last one, at any level
	value bool   // the next token is its value
}

// priorityAt is where a piece has a priority, or a part of one, that is too good: all of it
// in [from, to), and its first digit, which may be in another piece.
type priorityAt struct{ from, to, digit int }

const maxToken = jsonscan.MaxToken // bounds what is kept of a string

// counted reports whether the current key's number is wanted: of a request its cost and
// priority, of an answer the tokens it used.
func (s *skim) counted() bool {
	switch s.key {
	case "priority", "max_tokens", "max_completion_tokens", "max_output_tokens":
		return s.scan.Depth() == 1
	case "prompt_tokens", "input_tokens", "completion_tokens", "output_tokens":
		return s.scan.Depth() == 2 && s.top == "usage"
	}
	return false
}

func (s *skim) read(p []byte) {
	s.scan.Feed(p)
	s.piece, s.better = s.scan.Pos(), s.better[:0]
	for {
		k := s.scan.Next()
		if s.value && (k == jsonscan.Number || s.scan.Cut() == jsonscan.Number) {
			s.number(k == jsonscan.Number)
		}
		switch {
		case k == jsonscan.None:
			return
		case k == jsonscan.Key:
			s.member()
		case k == jsonscan.String && s.value:
			s.text()
		}
		s.value = k == jsonscan.Key
	}
}

// number handles a number, or as much of it as there is. A priority that is too good, where
// the lower number is the better, is noted.
func (s *skim) number(whole bool) {
	if !s.counted() {
		return
	}
	text := s.scan.Text()
	if s.key == "priority" && s.best != limit.High && (text[0] == '-' || s.best == limit.Low) {
		at := priorityAt{max(s.scan.Start()-s.piece, 0), s.scan.Pos() - s.piece, s.scan.Start() - s.piece}
		if text[0] == '-' {
			at.digit++
		}
		s.better = append(s.better, at)
	}
	if n, err := strconv.ParseFloat(string(text), 64); whole && err == nil {
		if s.num == nil {
			s.num = map[string]float64{}
		}
		s.num[s.key] = n
	}
}

// kept is the last string, as far as it is kept.
func (s *skim) kept() (text string, overlong bool) {
	raw := s.scan.Text()
	if overlong = len(raw) >= maxToken; overlong {
		raw = raw[:maxToken]
	}
	return string(jsonscan.AppendDecoded(nil, raw)), overlong
}

func (s *skim) member() {
	var overlong bool
	if s.key, overlong = s.kept(); overlong {
		s.key = ""
	}
	if s.scan.Depth() != 1 {
		return
	}
	s.top = s.key
	if s.link == "" {
		s.link = openai.LinkField([]byte(s.key))
	}
	if s.key == "model" {
		s.twice, s.named = s.twice || s.named, true
	}
}

// text handles a string that is a member's value.
func (s *skim) text() {
	atTop := s.scan.Depth() == 1
	switch {
	case atTop && s.key == "priority":
		s.worded = true
	case atTop && s.key == "model":
		name, overlong := s.kept()
		s.twice = s.twice || s.model != "" && (overlong || s.model != name)
		if !overlong {
			s.model = name
		}
	case s.fetched():
		if url, _ := s.kept(); !strings.HasPrefix(url, "data:") {
			s.urls = append(s.urls, url)
		}
	}
}

// fetched reports whether engines fetch the current key's value.
func (s *skim) fetched() bool {
	switch s.top {
	case "metadata":
		return false
	case "tools": // schemas have any names
		return s.key == "server_url"
	}
	return s.key == "url" || strings.HasSuffix(s.key, "_url")
}
