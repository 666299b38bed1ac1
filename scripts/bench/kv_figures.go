package main

import (
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

// series are the rounds' values of one thing, under the name it is shown by.
type series struct {
	name string
	v    []float64
}

func (b *kv) of(step, what string) series { return series{step, b.values[step+"/"+what]} }

// best picks the series with the highest median, or the lowest.
func best(lowest bool, all ...series) series {
	var out series
	for _, s := range all {
		if len(s.v) == 0 {
			continue
		}
		if len(out.v) == 0 || (figures.Median(s.v) > figures.Median(out.v)) != lowest {
			out = s
		}
	}
	return out
}

// each is what of several steps.
func (b *kv) each(what string, steps ...string) (out []series) {
	for _, s := range steps {
		out = append(out, b.of(s, what))
	}
	return out
}

// figures makes every figure whose values are there, and names the others.
func (b *kv) figures() (out []figures.Figure, missing []string) {
	add := func(f figures.Figure, ours, peer series) {
		if len(ours.v) == 0 || len(peer.v) == 0 {
			missing = append(missing, f.Name)
			return
		}
		n := min(len(ours.v), len(peer.v))
		beside := f.Spread
		f.Peer = strings.ReplaceAll(f.Peer, "$", b.shown(peer.name))
		f = f.Ratios(ours.v[:n], peer.v[:n])
		f.Spread += fmt.Sprintf("; best rounds %.3f", bestRatio(f.Unit == "GB/s", ours.v, peer.v))
		if beside != "" {
			f.Spread += "; " + beside
		}
		out = append(out, f)
	}
	speed := func(name, what string, step string, peer series, peerName, beside string) {
		add(figures.Figure{Name: name, Unit: "GB/s", Model: kvLoad, Peer: peerName, Spread: beside}, b.of(step, what), peer)
	}
	// The limits of both of our processes' runs: the same memory, the same time.
	memcpy := best(false, series{"one run of 256 MiB", b.of(stepSHM, kvbench.RunMemcpy).v},
		series{"the same 16 KiB blocks", b.of(stepSHM, kvbench.RunScattered).v}, series{"libc memmove, one run of 256 MiB", b.of(stepLibc, "gb_s").v})
	shm, tcp := best(false, b.each("gb_s", nixlSHM...)...), best(false, b.each("gb_s", nixlTCP...)...)
	shmAll, tcpAll := b.settings("GB/s", "gb_s", nixlSHM...), b.settings("GB/s", "gb_s", append(nixlTCP, stepMoon)...)
	speed("kv.shm_ratio.256m", kvbench.RunChecked, stepSHM, memcpy, "memcpy by one thread: $", b.copies(kvbench.RunChecked))
	speed("kv.shm_ratio.256m_nodigest", kvbench.RunUnchecked, stepSHM, memcpy, "memcpy by one thread: $", b.copies(kvbench.RunUnchecked))
	speed("kv.shm_over_nixl.256m", kvbench.RunChecked, stepSHM, shm, "NIXL: $", shmAll)
	speed("kv.tcp_ratio.256m", kvbench.RunChecked, stepTCP, series{"bare", b.of(stepTCP, kvbench.RunBare).v}, "bare writev/readv loop, same memory, same connections",
		b.medians("GB/s", b.of(stepTCP, kvbench.RunUnchecked), "digests off", b.of(stepIPF, "gb_s"), "iperf3"))
	speed("kv.tcp_over_mooncake.256m", kvbench.RunChecked, stepTCP, b.of(stepMoon, "gb_s"), "Mooncake Transfer Engine, tcp: $", "")
	speed("kv.tcp_over_nixl.256m", kvbench.RunChecked, stepTCP, tcp, "NIXL: $", tcpAll)
	for _, q := range []string{"p50", "p99"} {
		what := q + "_us"
		for _, l := range []struct {
			name, step string
			peers      []string
		}{{"tcp", stepTCP, append([]string{stepMoon}, nixlTCP...)}, {"shm", stepSHM, nixlSHM}} {
			add(figures.Figure{Name: "kv." + l.name + "_latency_ratio." + q, Unit: "µs", Model: kvLoadSmall, Peer: "best peer, from posting: $",
				Spread: b.settings("µs", what, l.peers...) + "; from asking, as ours: " + b.settings("µs", "exchange_"+what, l.peers...)},
				b.of(l.step, what), best(true, b.each(what, l.peers...)...))
		}
	}
	for _, d := range []struct {
		name, step string
		limit      float64
	}{{"tcp", stepTCP, 10}, {"shm", stepSHM, 15}} {
		on, off := b.of(d.step, kvbench.RunChecked), b.of(d.step, kvbench.RunUnchecked)
		cost, limits := series{}, series{}
		for i := range min(len(on.v), len(off.v)) {
			cost.v, limits.v = append(cost.v, 100*(1-on.v[i]/off.v[i])), append(limits.v, d.limit)
		}
		add(figures.Figure{Name: "kv.digest_cost_pct." + d.name, Unit: "% of throughput", Model: kvLoad, Peer: fmt.Sprintf("limit: %.0f %% below digests off in the same run", d.limit),
			Spread: b.medians("GB/s", on, "checked", off, "off")}, cost, limits)
	}
	for _, h := range []struct{ name, step, peer string }{{"kv.handshake_ms", stepTCP, nixlTCP[0]}, {"kv.handshake_ms.shm", stepSHM, nixlSHM[0]}} {
		add(figures.Figure{Name: h.name, Unit: "ms", Model: "new peer, dial to the first block", Peer: "NIXL, metadata to the first 256 KiB: $", Spread: "limit 10 ms"},
			b.of(h.step, "handshake_ms"), b.of(h.peer, "connect_ms"))
	}
	return out, missing
}

// bestRatio is our best round over the peer's best: what is least disturbed.
func bestRatio(most bool, ours, peer []float64) float64 {
	if most {
		return slices.Max(ours) / slices.Max(peer)
	}
	return slices.Min(ours) / slices.Min(peer)
}

// copies is every flavour of memcpy, with what ours over shared memory is of it.
func (b *kv) copies(ours string) string {
	var out []string
	for _, s := range []series{{"Go, one run", b.of(stepSHM, kvbench.RunMemcpy).v}, {"Go, the same blocks", b.of(stepSHM, kvbench.RunScattered).v},
		{"libc, one run", b.of(stepLibc, "gb_s").v}} {
		v := b.of(stepSHM, ours).v
		if n := min(len(v), len(s.v)); n > 0 {
			f := figures.Figure{}.Ratios(v[:n], s.v[:n])
			out = append(out, fmt.Sprintf("%s %.4g GB/s, ours %.3f of it", s.name, f.PeerValue, f.Ratio))
		}
	}
	return strings.Join(out, "; ")
}

// shown is a step's version and settings, where it has any.
func (b *kv) shown(name string) string {
	if v := b.versions[name]; v != "" {
		return v
	}
	return name
}

// settings lists the medians of steps that were not the best, too.
func (b *kv) settings(unit, what string, steps ...string) string {
	var pairs []any
	for _, s := range steps {
		pairs = append(pairs, b.of(s, what), s)
	}
	return b.medians(unit, pairs...)
}

// medians writes pairs of a series and a name as "name median, …".
func (b *kv) medians(unit string, pairs ...any) string {
	var out []string
	for i := 0; i+1 < len(pairs); i += 2 {
		if s := pairs[i].(series); len(s.v) > 0 {
			out = append(out, fmt.Sprintf("%s %.4g", pairs[i+1], figures.Median(s.v)))
		}
	}
	return strings.Join(out, ", ") + " " + unit
}
