package kvconn

import (
	"maps"
	"testing"
)

// TestEdges: bytes are counted by sender, over its sessions, and forgotten with the last of them.
func TestEdges(t *testing.T) {
	t.Parallel()
	m, err := NewMetrics(nil)
	if err != nil {
		t.Fatal(err)
	}
	f := func(want map[string]int64) {
		t.Helper()
		if got := m.MovedFrom(); !maps.Equal(got, want) {
			t.Errorf("have %v, want %v", got, want)
		}
	}
	f(map[string]int64{})
	a, b := m.edges.open("p0"), m.edges.open("p1")
	again := m.edges.open("p0")
	a.bytes.Add(3)
	again.bytes.Add(4)
	b.bytes.Add(5)
	f(map[string]int64{"p0": 7, "p1": 5})
	m.edges.close("p0")
	f(map[string]int64{"p0": 7, "p1": 5})
	m.edges.close("p0")
	m.edges.close("nobody")
	f(map[string]int64{"p1": 5})
}
