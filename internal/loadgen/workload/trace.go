package workload

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

// Entry is one request of a trace.
type Entry struct {
	At      time.Duration // from the first request
	In, Out int           // tokens
	// Blocks are the ids of the prompt's blocks of BlockTokens. Requests that start with the
	// same ids share that prefix. nil: nothing is shared.
	Blocks []uint64
}

// Bounds of a trace.
const (
	maxLine    = 16 << 20
	maxTokens  = 1 << 24
	maxEntries = 10_000_000
)

// ReadTrace reads a Mooncake trace (JSON lines) or an Azure trace (CSV) and sorts it by time.
func ReadTrace(r io.Reader) ([]Entry, error) {
	var read func([]byte) (Entry, error)
	entries, err := readLines(r, "requests", func(line []byte) (e Entry, ok bool, err error) {
		switch {
		case read == nil && bytes.HasPrefix(line, []byte("\x1f\x8b")):
			return e, false, errors.New("it is compressed by gzip: unpack it first")
		case read == nil && line[0] == '{':
			read = mooncake
		case read == nil && string(line) != azureColumns:
			return e, false, fmt.Errorf("neither JSON lines nor CSV with the columns %s", azureColumns)
		case read == nil:
			read = new(azure).line
			return e, false, nil
		}
		e, err = read(line)
		return e, true, err
	})
	if err != nil {
		return nil, err
	}
	slices.SortStableFunc(entries, func(a, b Entry) int { return cmp.Compare(a.At, b.At) })
	first := entries[0].At
	for i := range entries {
		entries[i].At -= first
	}
	return entries, nil
}

// From is a trace that begins at its n-th entry and goes on with the first ones after its last.
func From(entries []Entry, n int) []Entry {
	list := slices.Concat(entries[n:], entries[:n])
	begin, end := entries[n].At, entries[len(entries)-1].At
	for i := range list {
		if list[i].At -= begin; i >= len(entries)-n {
			list[i].At += end
		}
	}
	return list
}

// readLines reads a file with at most one entry per line.
func readLines[E any](r io.Reader, what string, read func(line []byte) (e E, ok bool, err error)) (entries []E, err error) {
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 64<<10), maxLine)
	for number := 1; lines.Scan(); number++ {
		line := bytes.TrimSpace(lines.Bytes())
		if number == 1 {
			line = bytes.TrimPrefix(line, []byte("\xef\xbb\xbf"))
		}
		if len(line) == 0 {
			continue
		}
		e, ok, err := read(line)
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", number, err)
		}
		if len(entries) == maxEntries {
			return nil, fmt.Errorf("more than %d %s", maxEntries, what)
		}
		if ok {
			entries = append(entries, e)
		}
	}
	if lines.Err() == nil && len(entries) == 0 {
		return nil, fmt.Errorf("no %s in the file", what)
	}
	return entries, lines.Err()
}

// mooncake reads a line of a kvcache-ai/Mooncake trace: timestamp in ms, lengths in tokens,
// and an id for each block of 512.
func mooncake(line []byte) (Entry, error) {
	var m struct {
		Timestamp *float64 `json:"timestamp"`
		Input     int      `json:"input_length"`
		Output    int      `json:"output_length"`
		Hashes    []uint64 `json:"hash_ids"`
	}
	if err := json.Unmarshal(line, &m); err != nil {
		var wrong *json.UnmarshalTypeError
		if errors.As(err, &wrong) && wrong.Field != "" {
			return Entry{}, fmt.Errorf("%s is %.32s: want %s", wrong.Field, wrong.Value, map[bool]string{true: "a time in ms", false: "whole numbers"}[wrong.Field == "timestamp"])
		}
		return Entry{}, fmt.Errorf("no JSON of a request: %w", err)
	}
	if m.Timestamp == nil {
		return Entry{}, errors.New("no timestamp")
	}
	const most = float64(1<<53) / 1e6 // ms
	if !(*m.Timestamp >= 0 && *m.Timestamp < most) {
		return Entry{}, fmt.Errorf("timestamp %v: want 0 to %.0f ms", *m.Timestamp, most)
	}
	e := Entry{At: time.Duration(*m.Timestamp * 1e6), In: m.Input, Out: m.Output, Blocks: m.Hashes}
	if want := (e.In + BlockTokens - 1) / BlockTokens; len(e.Blocks) > 0 && len(e.Blocks) != want {
		return Entry{}, fmt.Errorf("%d hash_ids for %d tokens, want %d", len(e.Blocks), e.In, want)
	}
	return e, e.check()
}

func (e *Entry) check() error {
	if e.In < 1 || e.In > maxTokens || e.Out < 1 || e.Out > maxTokens {
		return fmt.Errorf("lengths %d and %d are not in 1..%d", e.In, e.Out, maxTokens)
	}
	return nil
}

const azureColumns = "TIMESTAMP,ContextTokens,GeneratedTokens"

// azure reads lines of an AzurePublicDataset trace: a time and two lengths.
type azure struct{ first time.Time }

func (a *azure) line(line []byte) (Entry, error) {
	cells := strings.Split(string(line), ",")
	if len(cells) != 3 {
		return Entry{}, fmt.Errorf("%d columns: want %s", len(cells), azureColumns)
	}
	at, err := time.Parse("2006-01-02 15:04:05", strings.TrimSuffix(cells[0], "+00:00"))
	if err != nil {
		return Entry{}, fmt.Errorf("%.40q is no time such as 2023-11-16 18:15:46.68", cells[0])
	}
	var in, out int
	for i, to := range []*int{&in, &out} {
		if *to, err = strconv.Atoi(cells[1+i]); err != nil {
			return Entry{}, fmt.Errorf("%.40q tokens: want a whole number", cells[1+i])
		}
	}
	if a.first.IsZero() {
		a.first = at
	}
	e := Entry{At: at.Sub(a.first), In: in, Out: out}
	if e.At < -maxSpan || e.At > maxSpan {
		return Entry{}, fmt.Errorf("%s is more than a year from the first", cells[0])
	}
	return e, e.check()
}

const maxSpan = 365 * 24 * time.Hour

// Trace is a trace's requests. Prompts share exactly what the trace's blocks share.
type Trace struct {
	unrelated
	text    *Text
	entries []Entry
	speed   float64
	block   int // tokens of a block
	next    atomic.Int64
}

// NewTrace replays entries, which stay the caller's, speed times as fast. blockTokens is the
// size of their blocks: BlockTokens, unless they were Scaled.
func NewTrace(text *Text, entries []Entry, speed float64, blockTokens int) *Trace {
	return &Trace{text: text, entries: entries, speed: speed, block: blockTokens}
}

// Next makes the next request; false after the last.
func (t *Trace) Next(context.Context) (*Item, bool) {
	i := t.next.Add(1) - 1
	if i >= int64(len(t.entries)) {
		return nil, false
	}
	return t.item(int(i)), true
}

// item makes the i-th request.
func (t *Trace) item(i int) *Item {
	e := &t.entries[i]
	it := &Item{At: time.Duration(float64(e.At) / t.speed), In: e.In, Out: e.Out}
	dst := make([]byte, 0, t.text.bytes(e.In))
	left := e.In
	if len(e.Blocks) == 0 {
		dst = t.text.append(dst, t.text.rng(streamPrompt, uint64(i)), t.text.count(max(1, left-t.text.Overhead)))
	}
	for _, id := range e.Blocks {
		n := min(left, t.block)
		left -= n
		if left == 0 { // room for what the server adds
			n = max(1, n-t.text.Overhead)
		}
		dst = t.text.append(dst, t.text.rng(streamBlock, id), t.text.count(n))
	}
	it.Messages = []Message{{Role: "user", Content: dst}}
	return it
}

// Within drops entries whose prompt and answer have more than most tokens; 0 is no bound.
func Within(entries []Entry, most int) []Entry {
	if most <= 0 {
		return entries
	}
	return slices.DeleteFunc(entries, func(e Entry) bool { return e.In+e.Out > most })
}
