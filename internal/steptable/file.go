package steptable

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strings"
	"unicode"
)

// Bounds of a file: what a table says is not trusted.
const (
	maxFile   = 16 << 20
	maxPoints = 1 << 14
	maxCount  = 1 << 30 // tokens, positions, sequences
	maxText   = 4 << 10
	maxTime   = 3600 // seconds of a step
	leastTime = 1e-9 // of a step: shorter ones, which nothing does, would add up to no time at all
)

// Open reads a table's file.
func Open(path string) (*Table, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("step table: %w", err)
	}
	defer f.Close()
	t, err := Read(f)
	if err != nil {
		return nil, fmt.Errorf("step table %s: %w", path, err)
	}
	return t, nil
}

// Read reads and checks a table, and makes it ready for Step.
func Read(r io.Reader) (*Table, error) {
	raw, err := io.ReadAll(io.LimitReader(r, maxFile+1))
	if err != nil {
		return nil, err
	}
	if len(raw) > maxFile {
		return nil, fmt.Errorf("it has more than %d MiB", maxFile>>20)
	}
	var head struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(raw, &head); err != nil {
		return nil, fmt.Errorf("it is not a step table: %w", err)
	}
	if head.Version != Version {
		return nil, fmt.Errorf("it has version %d; this program reads %d: measure it again with xpyd bench step", head.Version, Version)
	}
	t := &Table{}
	if err := json.Unmarshal(raw, t); err != nil {
		return nil, err
	}
	if err := t.Fit(); err != nil {
		return nil, err
	}
	return t, nil
}

// Write writes the table as Read reads it.
func (t *Table) Write(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", " ")
	return e.Encode(t)
}

func (t *Table) validate() error {
	if len(t.Prefill)+len(t.Decode)+len(t.Undrawn) > maxPoints {
		return fmt.Errorf("more than %d steps", maxPoints)
	}
	if len(t.Decode) == 0 || len(t.Prefill) == 0 {
		return errors.New("it needs steps of both prefill and decode")
	}
	for _, s := range []string{t.About.Device, t.About.Backend, t.About.Numerics, t.About.SIMD, t.About.Model, t.About.Shape.Type, t.About.Layout,
		t.About.Build, t.About.Command, t.About.Date, t.KV.How} {
		if len(s) > maxText {
			return fmt.Errorf("a text of %d bytes: at most %d", len(s), maxText)
		}
		if strings.ContainsFunc(s, unicode.IsControl) { // it is shown on terminals
			return fmt.Errorf("the text %q has a control character", s)
		}
	}
	for _, n := range []int{t.About.Threads, t.About.Ranks, t.About.BlockTokens, t.About.Blocks, t.About.MaxBatch, t.About.StepTokens, t.About.MaxContext,
		t.About.Shape.Layers, t.About.Shape.Hidden, t.About.Shape.Intermediate, t.About.Shape.Heads, t.About.Shape.KVHeads, t.About.Shape.HeadDim,
		t.About.Shape.Vocab, t.KV.BytesPerToken, t.HeldOut.Steps} {
		if n < 0 || n > maxCount {
			return fmt.Errorf("%d is not in 0..%d", n, maxCount)
		}
	}
	for _, v := range []float64{t.KV.Bandwidth, t.KV.Latency, t.HeldOut.Median, t.HeldOut.P90, t.HeldOut.Worst} {
		if !(v >= 0) || math.IsInf(v, 1) {
			return fmt.Errorf("%g is not a number of at least 0", v)
		}
	}
	if t.KV.Latency > maxTime {
		return fmt.Errorf("kv: a latency of %g s: at most %d", t.KV.Latency, maxTime)
	}
	return t.validSteps()
}

func (t *Table) validSteps() error {
	type place struct{ a, b int }
	pieces := map[place]bool{}
	for _, p := range t.Prefill {
		if err := point(p.Tokens, p.Position, 0, p.Time); err != nil {
			return fmt.Errorf("prefill of %d tokens at position %d: %w", p.Tokens, p.Position, err)
		}
		at := place{p.Tokens, p.Position}
		if pieces[at] {
			return fmt.Errorf("prefill of %d tokens at position %d: twice", p.Tokens, p.Position)
		}
		pieces[at] = true
	}
	for _, p := range t.Prefill {
		if !pieces[place{p.Tokens, 0}] {
			return fmt.Errorf("prefill of %d tokens at position %d: there is none of as many at position 0", p.Tokens, p.Position)
		}
	}
	batches, undrawn := map[place]bool{}, map[int]bool{}
	for _, d := range t.Decode {
		if err := point(d.Batch, d.Context, 1, d.Time); err != nil {
			return fmt.Errorf("decode of %d at context %d: %w", d.Batch, d.Context, err)
		}
		if batches[place{d.Batch, d.Context}] {
			return fmt.Errorf("decode of %d at context %d: twice", d.Batch, d.Context)
		}
		batches[place{d.Batch, d.Context}] = true
	}
	for _, d := range t.Undrawn {
		if err := point(d.Batch, d.Context, 1, d.Time); err != nil {
			return fmt.Errorf("undrawn decode of %d at context %d: %w", d.Batch, d.Context, err)
		}
		if undrawn[d.Batch] {
			return fmt.Errorf("undrawn decode of %d: twice", d.Batch)
		}
		undrawn[d.Batch] = true
	}
	return nil
}

// point checks a measured step of so many, at a position or context of at least least.
func point(count, at, least int, t Time) error {
	switch {
	case count < 1 || count > maxCount || at < least || at > maxCount:
		return fmt.Errorf("a count is out of range: they go from 1 (a position from 0) to %d", maxCount)
	case !(t.Seconds >= leastTime && t.Seconds <= maxTime):
		return fmt.Errorf("%g seconds: want %g to %d", t.Seconds, leastTime, maxTime)
	case !(t.Spread >= 0 && t.Spread <= maxTime):
		return fmt.Errorf("a spread of %g seconds: want 0 to %d", t.Spread, maxTime)
	case t.Runs < 1 || t.Runs > maxCount:
		return fmt.Errorf("%d runs: want 1 at least", t.Runs)
	}
	return nil
}
