package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"
)

// TestStatusBreaker: the table says which workers get no requests, until when
// and why.
func TestStatusBreaker(t *testing.T) {
	var s fleetStatus
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	err := json.Unmarshal([]byte(`{"ready":true,"instances":[
		{"id":"d0","role":"decode","state":"live","probed":true,"breaker":{"state":"open","until":"2026-01-02T03:04:07Z","why":"5 failures in a row"}},
		{"id":"d1","role":"decode","state":"live","probed":true,"breaker":{"state":"half_open","why":"5 failures in a row"}},
		{"id":"d2","role":"decode","state":"live","probed":true,"breaker":{"state":"ejected","until":"2026-01-02T03:04:20Z","why":"50% of its requests fail, of its peers' 0%"}},
		{"id":"d3","role":"decode","state":"live","probed":true,"breaker":{"state":"closed"}}]}`), &s)
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := s.print(&b, now); err != nil {
		t.Fatal(err)
	}
	for id, want := range map[string][]string{
		"d0": {"live,open ", "5 failures in a row, for 2s"}, "d1": {"live,half_open ", "5 failures in a row"},
		"d2": {"live,ejected ", "50% of its requests fail, of its peers' 0%, for 15s"}, "d3": {"live "},
	} {
		for line := range strings.Lines(b.String()) {
			if !strings.HasPrefix(line, id) {
				continue
			}
			for _, w := range want {
				if !strings.Contains(line, w) {
					t.Errorf("%q is not in %q", w, line)
				}
			}
			if id == "d3" && strings.Contains(line, "closed") {
				t.Errorf("%q", line)
			}
		}
	}
}
