package tier

import (
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

type reachQuestion struct {
	Units []kvcache.Hash `json:"units"`
}

// AppendReach encodes a question.
func AppendReach(b []byte, units []kvcache.Hash) []byte {
	text, err := json.Marshal(reachQuestion{units})
	if err != nil { // it has nothing that JSON cannot hold
		panic(err)
	}
	return append(b, text...)
}

// ParseReach reads a question.
func ParseReach(b []byte) ([]kvcache.Hash, error) {
	if len(b) > 64+40*ReachUnits {
		return nil, fmt.Errorf("%d bytes; at most %d units may be asked about", len(b), ReachUnits)
	}
	var q reachQuestion
	if err := json.Unmarshal(b, &q); err != nil {
		return nil, err
	}
	if len(q.Units) < 1 || len(q.Units) > ReachUnits {
		return nil, fmt.Errorf("units has %d entries, want 1 to %d", len(q.Units), ReachUnits)
	}
	return q.Units, nil
}

// AppendReached encodes the answer.
func AppendReached(b []byte, units int) []byte { return fmt.Appendf(b, `{"units":%d}`, units) }

// ParseReached reads the answer to a question about so many units. It accepts no more than
// that.
func ParseReached(b []byte, asked int) (units int, err error) {
	if len(b) > reachAnswerBytes {
		return 0, fmt.Errorf("answer of %d bytes", len(b))
	}
	var a struct {
		Units *int `json:"units"`
	}
	if err := json.Unmarshal(b, &a); err != nil {
		return 0, fmt.Errorf("answer: %w", err)
	}
	if a.Units == nil || *a.Units < 0 || *a.Units > asked {
		return 0, fmt.Errorf("answer of %d bytes does not count the %d units", len(b), asked)
	}
	return *a.Units, nil
}
