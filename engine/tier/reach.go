package tier

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"

	"github.com/xpyd/xpyd/engine/kvcache"
)

// How much of a prompt a worker has, asked and answered in JSON:
//
//	POST /xpyd/v1/cache/reach {"units":["00…", …]}   →   {"units":7}
//
// A unit is named by its hash, 32 hexadecimal digits, in the unit size of the worker that
// answers. The list follows one prompt, from where the caller's own knowledge ends. The
// answer counts the units that are there, up to the first gap.

// ReachUnits bounds the units of one question.
const ReachUnits = 8192

// reachAnswerBytes bounds an answer.
const reachAnswerBytes = 256

// AppendReach encodes a question.
func AppendReach(b []byte, units []kvcache.Hash) []byte {
	b = append(b, `{"units":[`...)
	for i, u := range units {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, '"')
		b = hex.AppendEncode(b, u[:])
		b = append(b, '"')
	}
	return append(b, `]}`...)
}

// ParseReach reads a question.
func ParseReach(b []byte) ([]kvcache.Hash, error) {
	if len(b) > 64+40*ReachUnits {
		return nil, fmt.Errorf("%d bytes; at most %d units may be asked about", len(b), ReachUnits)
	}
	var q struct {
		Units []string `json:"units"`
	}
	if err := json.Unmarshal(b, &q); err != nil {
		return nil, err
	}
	if len(q.Units) < 1 || len(q.Units) > ReachUnits {
		return nil, fmt.Errorf("units has %d entries, want 1 to %d", len(q.Units), ReachUnits)
	}
	units := make([]kvcache.Hash, len(q.Units))
	for i, s := range q.Units {
		if len(s) != 2*len(units[i]) {
			return nil, fmt.Errorf("units: entry %d is not 32 hexadecimal digits", i)
		}
		if _, err := hex.Decode(units[i][:], []byte(s)); err != nil {
			return nil, fmt.Errorf("units: entry %d: %w", i, err)
		}
	}
	return units, nil
}

// AppendReached encodes the answer.
func AppendReached(b []byte, units int) []byte { return fmt.Appendf(b, `{"units":%d}`, units) }

// ParseReached reads the answer to a question about so many units, and accepts no more
// than that.
func ParseReached(b []byte, asked int) (units int, err error) {
	if len(b) > reachAnswerBytes {
		return 0, fmt.Errorf("answer of %d bytes", len(b))
	}
	var a struct {
		Units *int `json:"units"`
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	if err := dec.Decode(&a); err != nil {
		return 0, fmt.Errorf("answer: %w", err)
	}
	if dec.More() || a.Units == nil || *a.Units < 0 || *a.Units > asked {
		return 0, fmt.Errorf("answer of %d bytes does not count the %d units", len(b), asked)
	}
	return *a.Units, nil
}
