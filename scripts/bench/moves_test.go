package main

import (
	"strings"
	"testing"
)

func TestLeft(t *testing.T) {
	l := left{took: 1.5, behind: 0.25, pauses: []float64{30, 10, 20}, step: 4, ids: [][]string{{"1"}, {"2"}}}
	if l.p50() != 20 || l.p99() != 30 || !strings.Contains(l.String(), "3 streams moved") || !strings.Contains(left{step: 4}.String(), "no stream moved") {
		t.Error(l)
	}
	if err := l.same(left{ids: [][]string{{"1"}, {"2"}}}); err != nil {
		t.Error(err)
	}
	if err := l.same(left{ids: [][]string{{"1"}, {"3"}}}); err == nil || !strings.Contains(err.Error(), "stream 1") {
		t.Error(err)
	}
}

// TestMoveBody: a stream's prompt depends on its number alone, so that two runs ask the same.
func TestMoveBody(t *testing.T) {
	b := &moves{context: 8192}
	if b.body(1, 5) != (&moves{}).body(1, 5) || b.body(1, 5) == b.body(2, 5) || strings.Count(b.body(0, 5), ",") != strings.Count(b.body(0, 4), ",")+1 {
		t.Error(b.body(1, 5))
	}
	if b.size() != "8k" || (&moves{context: 256}).size() != "256" {
		t.Error(b.size())
	}
}
