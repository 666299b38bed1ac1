// Package requestlog is a router's log of its requests without a word of them: lengths, times,
// outcomes and who served them, as lines of JSON. A Writer writes it, Read reads it, and xpyd replay
// runs it again. There is no text in it, no user and no address.
//
// What prompts have in common stands in it as hashes of their beginnings, keyed by HMAC-SHA256 with
// a random key that each file has for itself and that is never written. So equal beginnings show
// within a file, but nobody can compare two files, or find out whether a known text was sent.
package requestlog

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
	"unicode"
)

// Version is the format's.
const Version = 1

// Header is a file's first line.
type Header struct {
	Version int       `json:"request_log"`
	Xpyd    string    `json:"xpyd"`   // the router's version
	Start   time.Time `json:"start"`  // to which requests' arrivals are relative
	Models  []string  `json:"models"` // served then
	Policy  string    `json:"policy"` // by which pairs were chosen then
	Grain   []Grain   `json:"grain"`  // of the prefixes
}

// Grain says that from an offset in a prompt's text on a hash follows so many bytes after the last.
type Grain struct {
	From  int `json:"from"`
	Bytes int `json:"bytes"`
}

// Request is the line of a request that is over. Lines are in the order of the ends.
type Request struct {
	Arrived Millis `json:"at_ms"` // since Start; below 0 if the file was begun meanwhile
	Path    string `json:"path"`
	Model   string `json:"model,omitempty"` // once a pair that serves it was chosen
	Stream  bool   `json:"stream,omitempty"`
	Status  int    `json:"status"`           // 499: the client left
	Broken  bool   `json:"broken,omitempty"` // it ended with an error behind status 200

	Prompt    int  `json:"prompt_tokens,omitempty"`
	Estimated bool `json:"estimated,omitempty"` // nobody counted Prompt
	Output    int  `json:"output_tokens,omitempty"`
	Cached    *int `json:"cached_tokens,omitempty"` // nil: nobody said
	Choices   int  `json:"choices,omitempty"`       // of all its prompts, if not one

	TTFT Millis `json:"ttft_ms,omitempty"` // to the first byte; of an answer in one piece that is all of it
	Took Millis `json:"took_ms"`
	Gap  Millis `json:"longest_gap_ms,omitempty"` // of a stream, between tokens

	Prefill  string `json:"prefill,omitempty"` // of the last attempt; "": decode served it alone
	Decode   string `json:"decode,omitempty"`
	Attempts int    `json:"attempts,omitempty"`

	Bytes  int    `json:"prompt_bytes,omitempty"` // of the prompt's text
	Prefix []Hash `json:"prefix,omitempty"`       // of its beginnings, by Header.Grain

	Line int `json:"-"` // in the file that was read
}

// dropped is a line for requests that have none.
type dropped struct {
	Dropped int `json:"dropped"`
}

// Hash stands for the beginning of a prompt.
type Hash uint64

// MarshalText implements encoding.TextMarshaler.
func (h Hash) MarshalText() ([]byte, error) {
	return hex.AppendEncode(nil, binary.BigEndian.AppendUint64(nil, uint64(h))), nil
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (h *Hash) UnmarshalText(text []byte) error {
	b, err := hex.DecodeString(string(text))
	if err != nil || len(b) != 8 {
		return errors.New("want hashes of 16 hex digits")
	}
	*h = Hash(binary.BigEndian.Uint64(b))
	return nil
}

// Millis is a time that is written in milliseconds.
type Millis time.Duration

// maxSpan bounds times.
const maxSpan = 366 * 24 * time.Hour

// MarshalJSON implements json.Marshaler.
func (m Millis) MarshalJSON() ([]byte, error) {
	us := time.Duration(m).Round(time.Microsecond).Microseconds()
	return strconv.AppendFloat(nil, float64(us)/1e3, 'f', -1, 64), nil
}

// UnmarshalJSON implements json.Unmarshaler.
func (m *Millis) UnmarshalJSON(text []byte) error {
	ms, err := strconv.ParseFloat(string(text), 64)
	if err != nil || math.Abs(ms) > float64(maxSpan.Milliseconds()) {
		return fmt.Errorf("%.32q is no time in ms within a year", text)
	}
	*m = Millis(math.Round(ms*1e3)) * Millis(time.Microsecond)
	return nil
}

// Bounds of a line.
const (
	maxTokens  = 1 << 26
	maxChoices = 1 << 20
	maxBytes   = 1 << 31
	maxPrefix  = 8192 // hashes; the rest of a longer prompt has none
	maxName    = 1024
	maxGrains  = 16
)

func (h *Header) check() error {
	switch {
	case h.Version == 0:
		return errors.New("no header of a request log")
	case h.Version != Version:
		return fmt.Errorf("a request log of version %d, and this xpyd reads version %d", h.Version, Version)
	case len(h.Grain) == 0 || len(h.Grain) > maxGrains || h.Grain[0].From != 0:
		return fmt.Errorf("grain %v", h.Grain)
	}
	for i, g := range h.Grain {
		if g.Bytes < 1 || g.Bytes > maxBytes || i > 0 && g.From <= h.Grain[i-1].From || g.From > maxBytes {
			return fmt.Errorf("grain %v", h.Grain)
		}
	}
	return printable(append(h.Models, h.Xpyd, h.Policy)...)
}

// printable refuses what a terminal might take for a command.
func printable(texts ...string) error {
	for _, s := range texts {
		if strings.ContainsFunc(s, unicode.IsControl) {
			return fmt.Errorf("the text %q has a control character", s)
		}
	}
	return nil
}

// fit cuts what is beyond the bounds, which only an engine's odd answer or name can be.
func (r *Request) fit() {
	for _, n := range []*int{&r.Prompt, &r.Output} {
		*n = min(max(*n, 0), maxTokens)
	}
	if r.Cached != nil && (*r.Cached < 0 || *r.Cached > maxTokens) {
		r.Cached = nil
	}
	r.Bytes, r.Choices, r.Attempts = min(r.Bytes, maxBytes), min(r.Choices, maxChoices), min(r.Attempts, maxChoices)
	for _, name := range []*string{&r.Path, &r.Model, &r.Prefill, &r.Decode} {
		*name = strings.ToValidUTF8((*name)[:min(len(*name), maxName)], "")
	}
	r.TTFT, r.Gap = min(r.TTFT, r.Took), min(r.Gap, r.Took)
}

func (r *Request) check() error {
	within := func(n, least, most int) bool { return n >= least && n <= most }
	switch {
	case !within(r.Status, 100, 599):
		return fmt.Errorf("no line of a request: its status is %d", r.Status)
	case !within(r.Prompt, 0, maxTokens) || !within(r.Output, 0, maxTokens) || r.Cached != nil && !within(*r.Cached, 0, maxTokens):
		return fmt.Errorf("token counts that are not in 0..%d", maxTokens)
	case !within(r.Choices, 0, maxChoices) || !within(r.Attempts, 0, maxChoices):
		return fmt.Errorf("choices %d, attempts %d", r.Choices, r.Attempts)
	case r.TTFT < 0 || r.Gap < 0 || r.TTFT > r.Took || r.Gap > r.Took:
		return fmt.Errorf("ttft_ms and longest_gap_ms are not in 0..took_ms, which is %v", time.Duration(r.Took))
	case !within(r.Bytes, 0, maxBytes) || len(r.Prefix) > min(r.Bytes, maxPrefix):
		return fmt.Errorf("%d hashes of %d bytes", len(r.Prefix), r.Bytes)
	}
	for _, name := range []string{r.Path, r.Model, r.Prefill, r.Decode} {
		if len(name) > maxName {
			return fmt.Errorf("a name of more than %d bytes", maxName)
		}
	}
	return printable(r.Path, r.Model, r.Prefill, r.Decode)
}

// Ends are the offsets in a prompt's text up to which its hashes are; fewer if they are said to be
// beyond its end.
func (h *Header) Ends(r *Request) []int {
	ends := make([]int, 0, len(r.Prefix))
	at, grain := 0, h.Grain
	for range r.Prefix {
		for len(grain) > 1 && at >= grain[1].From {
			grain = grain[1:]
		}
		if at += grain[0].Bytes; at > r.Bytes {
			break
		}
		ends = append(ends, at)
	}
	return ends
}
