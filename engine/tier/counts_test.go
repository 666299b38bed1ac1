package tier

import (
	"regexp"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// TestCounts: what metrics and the admin's report say of each tier is what
// happened: units there, room, saved, loaded, evicted, left out, pinned, and how
// many tokens came.
func TestCounts(t *testing.T) {
	cfg := config(t.TempDir())
	cfg.PinShare = 0.5 // of 16 units in host memory; the SSD has room for 128
	r := newRig(t, cfg)
	is := func(when string, want map[[2]string]float64) {
		t.Helper()
		r.quiet()
		for at, n := range want {
			if got := r.value(at[0], at[1]); got != n {
				t.Errorf("%s: %s of %q is %v, want %v", when, at[0], at[1], got, n)
			}
		}
		for _, s := range r.tiers.Report() {
			if got := r.value("units", s.Tier); got != float64(s.Units) || r.value("capacity_units", s.Tier) != float64(s.Capacity) ||
				r.value("evicted_units_total", s.Tier) != float64(s.Evicted) || r.value("loaded_units_total", s.Tier) != float64(s.Loaded) {
				t.Errorf("%s: the report says %+v, the metrics something else", when, s)
			}
		}
	}
	first, second, third := prompt(1000, 96), prompt(2000, 96), prompt(3000, 96)
	r.run(first, 0)
	is("computed", map[[2]string]float64{
		{"saved_units_total", tierHost}: 6, {"saved_units_total", tierSSD}: 6, {"units", tierHost}: 6, {"units", tierSSD}: 6,
		{"capacity_units", tierHost}: 16, {"capacity_units", tierSSD}: 128, {"loaded_units_total", ""}: 0, {"evicted_units_total", ""}: 0, {"waiting_units", ""}: 0})
	r.cache.Clear()
	r.load(first, 96)
	is("from host memory", map[[2]string]float64{{"loaded_units_total", tierHost}: 6, {"loaded_units_total", tierSSD}: 0, {"loaded_tokens_total", ""}: 96})
	r.cache.Clear()
	r.host.Clear()
	r.load(first[:32], 32)
	is("two from the SSD", map[[2]string]float64{{"loaded_units_total", tierHost}: 6, {"loaded_units_total", tierSSD}: 2, {"loaded_tokens_total", ""}: 128,
		{"units", tierHost}: 2, {"units", tierSSD}: 6, {"saved_units_total", tierSSD}: 6, {"prefetched_units_total", ""}: 0})
	if _, err := r.tiers.Pin(first[:32], "", time.Hour); err != nil {
		t.Fatal(err)
	}
	is("pinned", map[[2]string]float64{{"pinned_units", ""}: 2})
	r.run(second, 0)
	r.quiet()
	r.run(third, 0)
	r.quiet()
	r.cache.Clear()
	more := prompt(4000, 96) // 2 + 6 + 6 + 6: four make room
	r.run(more, 0)
	is("host memory is full", map[[2]string]float64{{"units", tierHost}: 16, {"evicted_units_total", tierHost}: 4, {"saved_units_total", tierHost}: 24,
		{"units", tierSSD}: 24, {"saved_units_total", tierSSD}: 24, {"evicted_units_total", tierSSD}: 0, {"dropped_units_total", ""}: 0})
	r.cache.Clear()
	r.load(first[:32], 32) // pinned: still there
	is("what is pinned stayed", map[[2]string]float64{{"loaded_units_total", tierHost}: 8, {"loaded_units_total", tierSSD}: 2})
	if err := r.tiers.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	is("flushed", map[[2]string]float64{{"units", tierHost}: 0, {"units", tierSSD}: 0, {"pinned_units", ""}: 2, {"io_errors_total", ""}: 0, {"corrupt_units_total", ""}: 0})
}

// TestMetricsSay: each metric has a name, a sentence and words for labels, in their places, also
// those that are shown on first use.
func TestMetricsSay(t *testing.T) {
	r := newRig(t, config(""))
	join(t, peersConfig(), false, r)
	m := r.tiers.metrics
	for _, c := range []*prometheus.CounterVec{m.hits, m.corrupt, m.saved, m.dropped, m.prefetched} {
		c.WithLabelValues("x")
	}
	families, err := r.reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	name, help, label := regexp.MustCompile(`^xpyd_kvtier_[a-z_]+$`), regexp.MustCompile(`^[A-Z].* .*\.$`), regexp.MustCompile(`^[a-z]+$`)
	for _, f := range families {
		if !name.MatchString(f.GetName()) || !help.MatchString(f.GetHelp()) {
			t.Errorf("%q: %q", f.GetName(), f.GetHelp())
		}
		for _, l := range f.GetMetric()[0].GetLabel() {
			if !label.MatchString(l.GetName()) {
				t.Errorf("%s has a label %q", f.GetName(), l.GetName())
			}
		}
	}
	if len(families) < 20 {
		t.Errorf("%d metrics", len(families))
	}
}
