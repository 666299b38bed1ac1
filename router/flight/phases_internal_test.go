package flight

import (
	"slices"
	"testing"
	"time"
)

// TestPhases: a leg that was given up before it was sent took no time.
func TestPhases(t *testing.T) {
	start := time.Now()
	at := func(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }
	rec := record{n: 1}
	rec.start, rec.admitted, rec.first, rec.over, rec.since = start, at(1), at(5), true, at(6)
	rec.attempt = attemptRecord{Start: at(1), Prefill: legRecord{begun: at(7), ended: at(6)}, Decode: legRecord{begun: at(2), ended: at(6)}}
	names := func() (list []string) {
		for _, p := range rec.phases() {
			list = append(list, p.name)
			if !p.end.IsZero() && p.end.Before(p.start) {
				t.Errorf("%s ends before it starts", p.name)
			}
		}
		return list
	}
	if got := names(); !slices.Equal(got, []string{"admit", "decode", "first_byte", "relay"}) {
		t.Error(got)
	}
	rec.attempt.Prefill = legRecord{begun: at(2), ended: at(4)}
	if got := names(); !slices.Equal(got, []string{"admit", "prefill", "decode", "first_byte", "relay"}) {
		t.Error(got)
	}
}
