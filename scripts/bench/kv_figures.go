package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/internal/kvbench"
)

const (
	kvLoad      = "256 MiB as 16 KiB blocks, shuffled; 16 layers, 2 KV heads of 128 bf16"
	kvLoadSmall = "256 KiB as 16 KiB blocks, one at a time"
)

// series is one figure's values by round, under the name to show.
type series struct {
	name string
	v    []float64
}

func (b *kv) of(step, what string) series { return series{step, b.values[step+"/"+what]} }

// best picks the series with the highest median, or the lowest.
func best(lowest bool, all ...series) (out series) {
	for _, s := range all {
		if len(s.v) > 0 && (len(out.v) == 0 || (figures.Median(s.v) > figures.Median(out.v)) != lowest) {
			out = s
		}
	}
	return out
}

// each has one figure of several steps.
func (b *kv) each(what string, steps ...string) (out []series) {
	for _, s := range steps {
		out = append(out, b.of(s, what))
	}
	return out
}

// figures makes every figure that has values and names the others.
func (b *kv) figures() (out []figures.Figure, missing []string) {
	add := func(f figures.Figure, ours, peer series) {
		n := min(len(ours.v), len(peer.v))
		if n == 0 {
			missing = append(missing, f.Name)
			return
		}
		beside := f.Spread
		f.Peer = strings.ReplaceAll(f.Peer, "$", cmp.Or(b.versions[peer.name], peer.name))
		f = f.Ratios(ours.v[:n], peer.v[:n])
		most := slices.Min[[]float64] // of rounds, the least disturbed
		if f.Unit == "GB/s" {
			most = slices.Max[[]float64]
		}
		f.Spread += fmt.Sprintf("; best rounds %.3f", most(ours.v)/most(peer.v))
		if beside != "" {
			f.Spread += "; " + beside
		}
		out = append(out, f)
	}
	speed := func(name, what string, step string, peer series, peerName, beside string) {
		add(figures.Figure{Name: name, Unit: "GB/s", Model: kvLoad, Peer: peerName, Spread: beside}, b.of(step, what), peer)
	}
	// Copies within a process limit transfers over shared memory.
	copies := []series{{"one run of 256 MiB", b.of(stepSHM, kvbench.RunMemcpy).v}, {"the same 16 KiB blocks", b.of(stepSHM, kvbench.RunScattered).v},
		{"libc memmove, one run of 256 MiB", b.of(stepLibc, "gb_s").v}}
	beside := func(what string) string { // our share of each kind of copy
		var said []string
		ours := b.of(stepSHM, what).v
		for i, kind := range []string{"Go, one run", "Go, the same blocks", "libc, one run"} {
			if n := min(len(ours), len(copies[i].v)); n > 0 {
				f := figures.Figure{}.Ratios(ours[:n], copies[i].v[:n])
				said = append(said, fmt.Sprintf("%s %.4g GB/s, ours %.3f of it", kind, f.PeerValue, f.Ratio))
			}
		}
		return strings.Join(said, "; ")
	}
	memcpy := best(false, copies...)
	shm, tcp := best(false, b.each("gb_s", nixlSHM...)...), best(false, b.each("gb_s", nixlTCP...)...)
	shmAll, tcpAll := medians("GB/s", b.each("gb_s", nixlSHM...)...), medians("GB/s", b.each("gb_s", append(nixlTCP, stepMoon)...)...)
	speed("kv.shm_ratio.256m", kvbench.RunChecked, stepSHM, memcpy, "memcpy by one thread: $", beside(kvbench.RunChecked))
	speed("kv.shm_ratio.256m_nodigest", kvbench.RunUnchecked, stepSHM, memcpy, "memcpy by one thread: $", beside(kvbench.RunUnchecked))
	speed("kv.shm_over_nixl.256m", kvbench.RunChecked, stepSHM, shm, "NIXL: $", shmAll)
	speed("kv.tcp_ratio.256m", kvbench.RunChecked, stepTCP, series{"bare", b.of(stepTCP, kvbench.RunBare).v}, "bare writev/readv loop, same memory, same connections",
		medians("GB/s", series{"digests off", b.of(stepTCP, kvbench.RunUnchecked).v}, b.of(stepIPF, "gb_s")))
	speed("kv.tcp_over_mooncake.256m", kvbench.RunChecked, stepTCP, b.of(stepMoon, "gb_s"), "Mooncake Transfer Engine, tcp: $", "")
	speed("kv.tcp_over_nixl.256m", kvbench.RunChecked, stepTCP, tcp, "NIXL: $", tcpAll)
	for _, q := range []string{"p50", "p99"} {
		what := q + "_us"
		for _, l := range []struct {
			name, step string
			peers      []string
		}{{"tcp", stepTCP, append([]string{stepMoon}, nixlTCP...)}, {"shm", stepSHM, nixlSHM}} {
			add(figures.Figure{Name: "kv." + l.name + "_latency_ratio." + q, Unit: "µs", Model: kvLoadSmall, Peer: "best peer, from posting: $",
				Spread: medians("µs", b.each(what, l.peers...)...) + "; from asking, as ours: " + medians("µs", b.each("exchange_"+what, l.peers...)...)},
				b.of(l.step, what), best(true, b.each(what, l.peers...)...))
		}
	}
	for _, d := range []struct {
		name, step string
		limit      float64
	}{{"tcp", stepTCP, 10}, {"shm", stepSHM, 15}} {
		on, off := b.of(d.step, kvbench.RunChecked).v, b.of(d.step, kvbench.RunUnchecked).v
		cost, limits := series{}, series{}
		for i := range min(len(on), len(off)) {
			cost.v, limits.v = append(cost.v, 100*(1-on[i]/off[i])), append(limits.v, d.limit)
		}
		add(figures.Figure{Name: "kv.digest_cost_pct." + d.name, Unit: "% of throughput", Model: kvLoad, Peer: fmt.Sprintf("limit: %.0f %% below digests off in the same run", d.limit),
			Spread: medians("GB/s", series{"checked", on}, series{"off", off})}, cost, limits)
	}
	for _, h := range []struct{ name, step, peer string }{{"kv.handshake_ms", stepTCP, nixlTCP[0]}, {"kv.handshake_ms.shm", stepSHM, nixlSHM[0]}} {
		add(figures.Figure{Name: h.name, Unit: "ms", Model: "new peer, dial to the first block", Peer: "NIXL, metadata to the first 256 KiB: $", Spread: "limit 10 ms"},
			b.of(h.step, "handshake_ms"), b.of(h.peer, "connect_ms"))
	}
	return out, missing
}

// medians lists "name median, …" of the series that have values.
func medians(unit string, all ...series) string {
	var out []string
	for _, s := range all {
		if len(s.v) > 0 {
			out = append(out, fmt.Sprintf("%s %.4g", s.name, figures.Median(s.v)))
		}
	}
	return strings.Join(out, ", ") + " " + unit
}
