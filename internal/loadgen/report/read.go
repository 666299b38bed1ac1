package report

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
)

// Most that a file of a report may have.
const (
	MaxBytes  = 256 << 20
	maxPhases = 1000
)

// Read reads what WriteJSON wrote. Its errors say what a file of another kind or version is, as far as it can be told.
func Read(r io.Reader) (*Report, error) {
	b, err := io.ReadAll(io.LimitReader(r, MaxBytes+1))
	if err != nil {
		return nil, err
	}
	if len(b) > MaxBytes {
		return nil, fmt.Errorf("more than %d MiB: no report of xpyd bench is so long", MaxBytes>>20)
	}
	var of map[string]json.RawMessage
	if err := json.Unmarshal(b, &of); err != nil {
		return nil, fmt.Errorf("not a JSON object, as xpyd bench --json writes it: %w", err)
	}
	var schema string
	if json.Unmarshal(of["schema"], &schema) != nil || schema != Schema {
		return nil, fmt.Errorf("%s; want %q, as xpyd bench --json writes it", kind(of, schema), Schema)
	}
	out := &Report{}
	if err := json.Unmarshal(b, out); err != nil {
		return nil, fmt.Errorf("no report of %s: %w", Schema, err)
	}
	return out, out.check()
}

// kind says what a file is that is no report of this version.
func kind(of map[string]json.RawMessage, schema string) string {
	has := func(names ...string) bool {
		for _, n := range names {
			if _, ok := of[n]; !ok {
				return false
			}
		}
		return true
	}
	name, version, _ := strings.Cut(schema, "/")
	ours, _, _ := strings.Cut(Schema, "/")
	switch {
	case name == ours:
		return fmt.Sprintf("a report of version %q, which another xpyd wrote", version)
	case schema != "":
		return fmt.Sprintf("its schema is %q", schema)
	case has("config", "runs", "transport"):
		return "a result of xpyd bench kv"
	case has("host") || has("ssd"):
		return "a result of xpyd bench kvio"
	case has("fleets", "table"):
		return "a result of xpyd plan"
	}
	return "it names no schema"
}

// check refuses figures that cannot be.
func (r *Report) check() error {
	if len(r.Phases) > maxPhases {
		return fmt.Errorf("%d phases: at most %d", len(r.Phases), maxPhases)
	}
	for i := range r.Phases {
		p := &r.Phases[i]
		figures := []float64{p.RateAsked, p.Throughput.Requests, p.Throughput.OutputTokens, float64(p.Concurrency), p.Window}
		for _, l := range latencies {
			v := l.of(&p.Latency)
			figures = append(figures, v.P50, v.P90, v.P99)
		}
		if p.Goodput != nil {
			figures = append(figures, p.Goodput.Fraction, p.Goodput.Rate)
		}
		for _, f := range figures {
			if f < 0 || f > math.MaxFloat64/1e9 {
				return fmt.Errorf("phase %q: a figure of %g", p.Name, f)
			}
		}
	}
	if len(r.measured()) == 0 {
		return errors.New("it has no measured phase")
	}
	return nil
}

func (r *Report) measured() (out []*Phase) {
	for i := range r.Phases {
		if p := &r.Phases[i]; p.Measured {
			out = append(out, p)
		}
	}
	return out
}
