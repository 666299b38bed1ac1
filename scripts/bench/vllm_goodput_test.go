package main

import "testing"

// TestSearch: the search ends at the highest rate that is good, next to one that is not, in few
// windows wherever it begins.
func TestSearch(t *testing.T) {
	p := promise{name: "goodput.x", from: map[string]float64{oursName: 20}}
	for _, limit := range []float64{9, 15.1, 19.9, 20.1, 24, 28.7, 60} {
		var rows []vllmRow
		for {
			step, over := p.search(oursName, rows)
			if over {
				if r := rateOf(step); r > limit || rateOf(step+1) <= limit {
					t.Errorf("limit %v: found %.3f", limit, r)
				}
				break
			}
			good := 0.0
			if rateOf(step) <= limit {
				good = 1
			}
			if rows = append(rows, vllmRow{Rate: rateOf(step), Good: good}); len(rows) > 11 {
				t.Fatalf("limit %v: %d windows", limit, len(rows))
			}
		}
	}
}
