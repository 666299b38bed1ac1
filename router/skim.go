package router

import (
	"bytes"
	"encoding/json"
	"io"
	"mime"
	"mime/multipart"
	"slices"
)

// skim reads the top level of a JSON object that passes by: who the model is,
// and whether a field is there that a client may not set. What is no JSON is
// for the engine to refuse.
type skim struct {
	model string
	link  string // the first field that links legs, "" when none

	depth     int
	quoted    bool // within a string
	escaped   bool // behind a backslash in it
	wantKey   bool // at the top level, the next string is a key
	collects  bool // the string is a key or the model's name
	key       string
	token     []byte
	overlong  bool
	valueSeen bool
}

// maxToken bounds what is kept of a key or the model's name.
const maxToken = 1 << 10

// linkFields are what a client may not set, as openai.Scan says too.
var linkFields = []string{"kv_transfer_params", "disaggregated_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"}

// Write takes the next bytes of the body.
func (s *skim) Write(p []byte) (int, error) {
	for _, c := range p {
		if s.quoted {
			s.within(c)
			continue
		}
		switch c {
		case '"':
			s.quoted, s.overlong, s.token = true, false, s.token[:0]
			s.collects = s.depth == 1 && (s.wantKey || s.key == "model" && !s.valueSeen)
		case '{', '[':
			s.depth++
			s.wantKey = s.depth == 1 && c == '{'
			s.valueSeen = true
		case '}', ']':
			s.depth--
		case ',':
			s.wantKey = s.depth == 1
		case ':':
			if s.depth == 1 {
				s.valueSeen = false
			}
		}
	}
	return len(p), nil
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
		if s.collects && !s.overlong {
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
			return
		}
	}
	if !s.wantKey {
		s.model = text
		return
	}
	if s.key = text; s.link == "" && slices.Contains(linkFields, text) {
		s.link = text
	}
}

// formModel finds the field model among the first bytes of a multipart form.
func formModel(contentType string, head []byte) string {
	_, params, err := mime.ParseMediaType(contentType)
	if err != nil {
		return ""
	}
	form := multipart.NewReader(bytes.NewReader(head), params["boundary"])
	for range 64 {
		part, err := form.NextRawPart()
		if err != nil {
			return ""
		}
		if part.FormName() == "model" {
			name, err := io.ReadAll(io.LimitReader(part, maxToken))
			if err != nil {
				return ""
			}
			return string(name)
		}
	}
	return ""
}
