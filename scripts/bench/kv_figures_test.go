package main

import (
	"math"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/internal/kvbench"
)

// full has the values of three rounds of every step.
func full() *kv {
	b := &kv{values: map[string][]float64{}, versions: map[string]string{nixlTCP[1]: "nixl-cu12 9 tuned"}}
	put := func(step, what string, v ...float64) {
		for _, x := range v {
			b.note(step, what, x)
		}
	}
	for i, step := range []string{stepTCP, stepSHM} {
		put(step, kvbench.RunChecked, 3, 2.7, 3)
		put(step, kvbench.RunUnchecked, 3, 3, 4)
		put(step, kvbench.RunMemcpy, 10, 20, 12)
		put(step, kvbench.RunScattered, 8, 8, 8)
		put(step, "p50_us", 100, 110, 90)
		put(step, "p99_us", 300, 200, 400)
		put(step, "handshake_ms", float64(1+i), 2, 3)
	}
	put(stepTCP, kvbench.RunBare, 3, 3, 3)
	put(stepIPF, "gb_s", 4, 4, 4)
	put(stepLibc, "gb_s", 11, 13, 11)
	for i, step := range append(append([]string{stepMoon}, nixlTCP...), nixlSHM...) {
		put(step, "gb_s", float64(1+i), float64(1+i), float64(1+i))
		put(step, "p50_us", 50, 200, 150)
		put(step, "p99_us", float64(1000-i), 900, 2000)
		put(step, "connect_ms", 10, 10, 10)
	}
	return b
}

func TestFigures(t *testing.T) {
	all, missing := full().figures()
	if len(missing) > 0 {
		t.Errorf("missing %v", missing)
	}
	byName := map[string]figures.Figure{}
	for _, f := range all {
		byName[f.Name] = f
		if f.Runs != 3 || f.Unit == "" || f.Model == "" || f.Spread == "" {
			t.Errorf("%+v", f)
		}
	}
	f := func(name string, value, peerValue, ratio float64, peer string) {
		t.Helper()
		g, ok := byName[name]
		near := func(a, b float64) bool { return math.Abs(a-b) < 1e-9 }
		if !ok || !near(g.Value, value) || !near(g.PeerValue, peerValue) || !near(g.Ratio, ratio) || !strings.Contains(g.Peer, peer) {
			t.Errorf("%s: %+v", name, g)
		}
	}
	f("kv.shm_ratio.256m", 3, 12, 0.25, "one run of 256 MiB") // 0.3, 0.135, 0.25
	f("kv.shm_ratio.256m_nodigest", 3, 12, 0.3, "one run of 256 MiB")
	f("kv.shm_over_nixl.256m", 3, 7, 3.0/7, nixlSHM[3])
	f("kv.tcp_ratio.256m", 3, 3, 1, "bare")
	f("kv.tcp_over_mooncake.256m", 3, 1, 3, "mooncake")
	f("kv.tcp_over_nixl.256m", 3, 3, 1, "nixl-cu12 9 tuned")
	f("kv.tcp_latency_ratio.p50", 100, 150, 0.6, "best peer")
	f("kv.digest_cost_pct.tcp", 10, 10, 1, "limit: 10 %")
	f("kv.digest_cost_pct.shm", 10, 15, 10.0/15, "limit: 15 %")
	f("kv.handshake_ms", 2, 10, 0.2, "NIXL")
	if s := byName["kv.tcp_ratio.256m"].Spread; !strings.Contains(s, "iperf3 4") || !strings.Contains(s, "best rounds 1.000") {
		t.Error(s)
	}
	if s := byName["kv.tcp_latency_ratio.p50"].Spread; !strings.Contains(s, "best rounds 1.800") {
		t.Error(s)
	}
}

// A missing peer only leaves out its own figures.
func TestFiguresMissing(t *testing.T) {
	b := full()
	delete(b.values, stepMoon+"/gb_s")
	all, missing := b.figures()
	if len(missing) != 1 || missing[0] != "kv.tcp_over_mooncake.256m" || len(all) == 0 {
		t.Error(missing)
	}
}

func TestBest(t *testing.T) {
	a, b, none := series{"a", []float64{1, 9, 2}}, series{"b", []float64{3, 3, 3}}, series{name: "none"}
	if s := best(false, none, a, b); s.name != "b" {
		t.Error(s)
	}
	if s := best(true, a, none, b); s.name != "a" {
		t.Error(s)
	}
	if s := best(true, none); len(s.v) != 0 {
		t.Error(s)
	}
}
