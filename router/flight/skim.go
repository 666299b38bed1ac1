package flight

import (
	"bytes"
	"encoding/json"
	"strconv"
	"strings"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router/limit"
)

// skim reads a JSON object that passes by: at its top level who the model is,
// and whether a field is there that a client may not set; anywhere in it, what
// the engine would fetch. What is no JSON is for the engine to refuse, but for
// other encodings than UTF-8.
type skim struct {
	model  string
	named  bool               // the key model was there
	twice  bool               // it was there again, or with another name than model, if that was set
	wide   bool               // a zero byte was there: UTF-16 and UTF-32, which Python's parser reads too, have one in each ASCII character
	link   string             // the first field that links legs, "" when none
	urls   []string           // as openai.Top.URLs; whoever has looked at them empties it
	worded bool               // priority is a string, which some engines take for a number
	best   limit.Class        // the highest priority that may be asked for: more is overwritten
	num    map[string]float64 // the numbers of countedField and countedUsage that were there

	depth     int
	objects   [skimDepth]bool // whether what is open at each depth is an object
	top       string          // key at the top level
	quoted    bool            // within a string
	escaped   bool            // behind a backslash in it
	wantKey   bool            // the next string is a key
	collects  bool            // the string is a key, the model's name or an address
	key       string
	token     []byte
	overlong  bool
	valueSeen bool
	counts    bool // what comes is a number that is wanted
	placed    bool // a digit was put into it
}

const (
	maxToken  = 1 << 10 // bounds what is kept of a string
	skimDepth = 1 << 10 // deeper than engines' parsers go
)

// counted reports whether the present key's value is a number that is wanted: of a
// request what it may cost and its priority, of an answer the tokens it used.
func (s *skim) counted() bool {
	if s.depth == 1 {
		switch s.key {
		case "priority", "max_tokens", "max_completion_tokens", "max_output_tokens":
			return true
		}
	} else if s.depth == 2 && s.top == "usage" {
		switch s.key {
		case "prompt_tokens", "input_tokens", "completion_tokens", "output_tokens":
			return true
		}
	}
	return false
}

// digit takes a byte of a number, and returns what it is to be. A priority
// above the best, of which the lower number is the higher, becomes 0 or 1 and
// keeps its length, since the body's may have been told.
func (s *skim) digit(c byte) byte {
	if len(s.token) < maxToken {
		s.token = append(s.token, c)
	}
	first := s.token[0]
	switch {
	case s.depth != 1 || s.key != "priority" || s.best == limit.High:
		return c
	case first != '-' && (s.best != limit.Low || first < '0' || first > '9'):
		return c
	case !s.placed && c >= '0' && c <= '9':
		s.placed = true
		return "-01"[s.best]
	}
	return ' '
}

// number takes what digit has gathered.
func (s *skim) number() {
	s.counts = false
	n, err := strconv.ParseFloat(string(s.token), 64)
	if err != nil {
		return
	}
	if s.num == nil {
		s.num = map[string]float64{}
	}
	s.num[s.key] = n
}

// read takes the next bytes of the body, in which it may put another priority.
func (s *skim) read(p []byte) {
	s.wide = s.wide || bytes.IndexByte(p, 0) >= 0
	for i, c := range p {
		if s.quoted {
			s.within(c)
			continue
		}
		if s.counts && (c == ',' || c == '}') {
			s.number()
		}
		switch c {
		case '"':
			s.counts = false
			s.quoted, s.overlong, s.token = true, false, s.token[:0]
			s.collects = s.wantKey || !s.valueSeen && (s.depth == 1 && s.key == "model" || s.fetched())
			s.worded = s.worded || s.depth == 1 && !s.wantKey && !s.valueSeen && s.key == "priority"
		case '{', '[':
			s.counts = false
			if s.depth++; s.depth > 0 && s.depth <= skimDepth {
				s.objects[s.depth-1] = c == '{'
			}
			s.wantKey = s.inObject()
			s.valueSeen = true
		case '}', ']':
			s.depth--
			s.wantKey, s.valueSeen = false, true
		case ',':
			s.wantKey = s.inObject()
		case ':':
			s.valueSeen = false
			if s.counts = s.counted(); s.counts {
				s.placed, s.token = false, s.token[:0]
			}
		case ' ', '\t', '\r', '\n':
		default:
			if s.counts {
				p[i] = s.digit(c)
			}
		}
	}
}

func (s *skim) inObject() bool { return s.depth > 0 && s.depth <= skimDepth && s.objects[s.depth-1] }

// fetched reports whether the present key is one whose value an engine fetches.
func (s *skim) fetched() bool {
	switch s.top {
	case "metadata":
		return false
	case "tools": // schemas have any names
		return s.key == "server_url"
	}
	return s.key == "url" || strings.HasSuffix(s.key, "_url")
}

// within takes a byte of a string.
func (s *skim) within(c byte) {
	switch {
	case s.escaped:
		s.escaped = false
	case c == '\\':
		s.escaped = true
	case c == '"':
		s.quoted = false
		if s.collects {
			s.collected()
		}
		s.valueSeen = s.valueSeen || !s.wantKey
		s.wantKey = false
		return
	}
	if !s.collects {
		return
	}
	if s.overlong = s.overlong || len(s.token) >= maxToken; !s.overlong {
		s.token = append(s.token, c)
	}
}

// collected takes a whole key or value.
func (s *skim) collected() {
	text := string(s.token)
	if bytes.IndexByte(s.token, '\\') >= 0 {
		if json.Unmarshal([]byte(`"`+text+`"`), &text) != nil {
			text = string(s.token) // cut in an escape, or wrong
		}
	}
	switch {
	case s.wantKey && s.overlong:
		s.key = ""
	case s.wantKey:
		s.key = text
	case s.depth == 1 && s.key == "model":
		s.twice = s.twice || s.model != "" && (s.overlong || s.model != text)
		if !s.overlong {
			s.model = text
		}
		return
	case !strings.HasPrefix(text, "data:"):
		s.urls = append(s.urls, text)
		return
	}
	if s.depth != 1 {
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
