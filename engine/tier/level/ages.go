package tier

import (
	"time"

	dto "github.com/prometheus/client_model/go"
)

// Report is Stats with hits and ages. It looks at every unit under the tiers'
// locks, about 10 ms for a million: for people, not for every scrape.
func (t *Tiers) Report() []Stats {
	list := t.Stats()
	for i := range list {
		s := &list[i]
		var m dto.Metric
		if t.metrics.hits.WithLabelValues(s.Tier).Write(&m) == nil {
			s.Loaded = uint64(m.GetCounter().GetValue())
		}
		var a ages
		if s.Tier == tierHost {
			t.host.ages(&a)
		} else {
			t.disk.ages(&a)
		}
		s.OldestS, s.MeanS = a.seconds(time.Now())
	}
	return list
}

// ages sums up when units came into the tiers, seconds since 1970.
type ages struct{ n, oldest, sum int64 }

func (a *ages) add(born int64) {
	if a.n++; a.n == 1 || born < a.oldest {
		a.oldest = born
	}
	a.sum += born
}

func (a *ages) seconds(now time.Time) (oldest, mean float64) {
	if a.n == 0 {
		return 0, 0
	}
	at := float64(now.Unix())
	return max(at-float64(a.oldest), 0), max(at-float64(a.sum)/float64(a.n), 0)
}

func (h *host) ages(a *ages) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, i := range h.keys {
		if s := &h.slots[i]; s.ready {
			a.add(s.born.Unix())
		}
	}
}

func (d *disk) ages(a *ages) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, p := range d.index {
		a.add(p.seg.born[p.slot])
	}
}
