package kvlayout

import (
	"encoding/json"
	"fmt"
)

// Form is a layout as a comparable value, for announcements. Its JSON is the layout's.
// A foreign engine's has no groups, and may lack a block size.
type Form struct {
	BlockTokens int  `json:"block_tokens"`
	Groups      text `json:"groups,omitempty"`
}

// text is JSON as it was written.
type text string

func (t text) MarshalJSON() ([]byte, error) { return []byte(t), nil }

func (t *text) UnmarshalJSON(b []byte) error {
	if len(b) > MaxEncoded {
		return fmt.Errorf("layout: groups of %d bytes, at most %d", len(b), MaxEncoded)
	}
	*t = text(b)
	return nil
}

// Form is the layout as it is announced.
func (l Layout) Form() Form {
	b, err := json.Marshal(l.Groups)
	if err != nil { // a Group has nothing that JSON cannot hold
		panic(err)
	}
	return Form{l.BlockTokens, text(b)}
}

// Layout returns the announced layout, validated.
func (f Form) Layout() (Layout, error) {
	b, err := json.Marshal(f)
	if err != nil {
		return Layout{}, fmt.Errorf("layout: %w", err)
	}
	return Decode(b)
}
