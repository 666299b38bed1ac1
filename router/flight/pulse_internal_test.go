package flight

import (
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

// TestPulse: gaps between tokens, of runs of several and of several choices.
func TestPulse(t *testing.T) {
	const ms = time.Millisecond
	f := func(choices int, want map[time.Duration]uint32, sum, first, last time.Duration, beats ...[2]int) {
		t.Helper()
		var p pulse
		for _, b := range beats {
			p.beat(time.Duration(b[0])*ms, b[1], choices)
		}
		for i, n := range p.gaps {
			edge := time.Duration(-1)
			if i < len(gapEdges) {
				edge = gapEdges[i]
			}
			if n != want[edge] {
				t.Errorf("%v: %d gaps up to %v, want %d", beats, n, edge, want[edge])
			}
		}
		if p.sum != sum*ms || p.first != first*ms || p.last != last*ms {
			t.Errorf("%v: sum %v, first %v, last %v", beats, p.sum, p.first, p.last)
		}
	}
	f(1, nil, 0, 0, 0)
	f(1, nil, 0, 70, 70, [2]int{70, 1})
	f(1, map[time.Duration]uint32{10 * ms: 2, 100 * ms: 1}, 120, 70, 190, [2]int{70, 1}, [2]int{80, 1}, [2]int{90, 1}, [2]int{190, 1})
	f(1, map[time.Duration]uint32{25 * ms: 4, ms: 2}, 80, 70, 150, [2]int{70, 3}, [2]int{150, 4}, [2]int{200, 0})
	f(2, map[time.Duration]uint32{10 * ms: 2}, 20, 1, 11, [2]int{1, 1}, [2]int{6, 1}, [2]int{11, 1})
	f(1, map[time.Duration]uint32{-1: 1}, 99_999, 1, 100_000, [2]int{1, 1}, [2]int{100_000, 1})
}

// TestPauses: the three longest waits between tokens, the longest first; what comes with or before the first token is none.
func TestPauses(t *testing.T) {
	t.Parallel()
	const ms = time.Millisecond
	var p pulse
	for _, x := range []struct {
		at time.Duration
		n  int
	}{{500, 3}, {510, 1}, {540, 1}, {545, 2}, {545, 1}, {645, 1}, {665, 1}} {
		p.beat(x.at*ms, x.n, 1)
	}
	if want := (pauses{{545 * ms, 645 * ms}, {510 * ms, 540 * ms}, {645 * ms, 665 * ms}}); p.pauses != want || p.longest != 100*ms {
		t.Errorf("%v, longest %v", p.pauses, p.longest)
	}
	var short pulse
	short.beat(9*ms, 5, 1)
	if short.pauses != (pauses{}) {
		t.Error(short.pauses)
	}
}

func TestGapsExport(t *testing.T) {
	g := newGaps()
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(g)
	if n, err := testutil.GatherAndCount(reg); n != 0 || err != nil {
		t.Errorf("%d series without a stream, %v", n, err)
	}
	var p pulse
	for i := range 4 {
		p.beat(time.Duration(i+1)*time.Second, 1, 1)
	}
	g.of("/x").add(&p)
	g.of("/x").add(&p)
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	h := families[0].Metric[0].Histogram
	if h.GetSampleCount() != 6 || h.GetSampleSum() != 6 {
		t.Errorf("%v", h)
	}
	for _, b := range h.Bucket {
		if want := uint64(6); b.GetUpperBound() < 1 && b.GetCumulativeCount() != 0 || b.GetUpperBound() >= 1 && b.GetCumulativeCount() != want {
			t.Errorf("%v", b)
		}
	}
	if problems, err := testutil.GatherAndLint(reg); err != nil || len(problems) > 0 {
		t.Error(problems, err)
	}
}

// BenchmarkCounted is what the accounting of one event of a stream costs.
func BenchmarkCounted(b *testing.B) {
	run := []byte("data: {\"id\":\"cmpl-1\",\"object\":\"text_completion\",\"choices\":[{\"index\":0,\"text\":\" word\"}]}\n\n")
	s := &stream{q: &request{summary: summary{start: time.Now()}}, answer: &answer{events: &events{}}}
	s.q.top.N = 1
	for b.Loop() {
		s.events.remember(run)
		s.counted(run)
	}
	if s.q.usage.events != b.N || !strings.HasPrefix(string(run), "data") {
		b.Error(s.q.usage.events)
	}
}
