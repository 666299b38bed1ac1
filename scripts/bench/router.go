package main

import (
	"fmt"
	"log"

	"github.com/xpyd/xpyd/internal/figures"
)

// cpu compares the processor time of a request, 32 at a time. Every repeat
// runs all targets in turn, each in a fresh process.
func (b *bench) cpu(name, text string, stream bool) error {
	req := request("/v1/completions", body(text, stream, 16, ""))
	us := map[string][]float64{}
	left := map[string]error{}
	targets := b.targets()
	for i := range b.repeats {
		for _, t := range targets {
			if left[t.name] != nil {
				continue
			}
			n := max(b.n/t.fewer, 32)
			v, rate, rss, err := b.cost(t, 32, n, req)
			if err != nil {
				if !t.pd || t.name == "xpyd" || t.name == "bare" {
					return fmt.Errorf("%s: %w", t.name, err)
				}
				left[t.name] = err
				log.Printf("%s left out: %v", t.name, err)
				b.book.Logf("%s %s left out: %v", name, t.name, err)
				continue
			}
			us[t.name] = append(us[t.name], v)
			log.Printf("%s %d %-14s %7.1f us of processor a request, %6.0f requests/s, %d MiB", name, i, t.name, v, rate, rss>>20)
			b.book.Logf("%s run %d %s: %.2f us %.0f req/s rss %d, %d requests", name, i, t.name, v, rate, rss, n)
		}
	}
	about := "mock engines, 2 KB prompt, c=32"
	best, bestName := 0.0, ""
	for _, t := range targets {
		v, ok := us[t.name]
		if !ok || t.name == "xpyd" {
			continue
		}
		f := figures.Figure{Unit: "us of processor a request", Model: about, Peer: t.what}.Ratios(us["xpyd"], v)
		switch t.name {
		case "nginx":
			f.Name = "router.cpu_ratio." + name
		case "bare":
			f.Name = "router.cpu_over_bare." + name
		default:
			f.Name = "router.cpu_over_" + t.name + "." + name
			if best == 0 || f.PeerValue < best {
				best, bestName = f.PeerValue, t.name
			}
		}
		if err := b.figure(f); err != nil {
			return err
		}
	}
	if bestName == "" {
		return nil
	}
	f := figures.Figure{Name: "router.cpu_over_best_peer." + name, Unit: "us of processor a request", Model: about, Peer: "best P/D peer: " + bestName}
	return b.figure(f.Ratios(us["xpyd"], us[bestName]))
}

// cost starts t, warms it up, and measures n requests: microseconds of
// processor a request, requests a second, resident bytes.
func (b *bench) cost(t target, conns, n int, reqs ...[]byte) (us, rate float64, rss int, err error) {
	p, err := t.start()
	if err != nil {
		return 0, 0, 0, err
	}
	defer p.stop()
	if _, err := drive(p.addr, conns, max(n/5, 1), reqs...); err != nil {
		return 0, 0, 0, err
	}
	before := p.cpu()
	took, err := drive(p.addr, conns, n, reqs...)
	if err != nil {
		return 0, 0, 0, err
	}
	used := p.cpu() - before
	return float64(used.Nanoseconds()) / 1e3 / float64(n), float64(n) / took.Seconds(), p.rss(), nil
}

// added compares the latency that is added at one request at a time: ours over
// the two legs sent direct, in units of what nginx adds to one.
func (b *bench) added() error {
	n := b.n / 2
	two := [][]byte{
		request("/v1/completions", `{"kv_transfer_params":{"do_remote_decode":true},`+body(prompt(2<<10), false, 1, "")[1:]),
		request("/v1/completions", body(prompt(2<<10), false, 16, "")),
	}
	one := two[1:]
	var p50, p99, unit []float64
	for i := range b.repeats {
		through := func(start func() (*process, error)) ([]float64, error) {
			p, err := start()
			if err != nil {
				return nil, err
			}
			defer p.stop()
			return latencies(n, one, p.addr)
		}
		legs, err := latencies(n, two, b.p, b.d)
		if err != nil {
			return err
		}
		leg, err := latencies(n, one, b.d)
		if err != nil {
			return err
		}
		ours, err := through(b.router)
		if err != nil {
			return err
		}
		nginx, err := through(b.nginx)
		if err != nil {
			return err
		}
		us := func(v, over []float64, q float64) float64 {
			return 1e6 * (figures.Quantile(v, q) - figures.Quantile(over, q))
		}
		a, z, u := us(ours, legs, 0.5), us(ours, legs, 0.99), us(nginx, leg, 0.5)
		p50, p99, unit = append(p50, a), append(p99, z), append(unit, u)
		log.Printf("%d adds %.1f us at p50, %.1f at p99; nginx %.1f at p50, %.1f at p99", i, a, z, u, us(nginx, leg, 0.99))
		b.book.Logf("added run %d: ours p50 %.2f p99 %.2f us, nginx p50 %.2f p99 %.2f us; direct two legs p50 %.2f p99 %.2f, one leg p50 %.2f",
			i, a, z, u, us(nginx, leg, 0.99), 1e6*figures.Quantile(legs, 0.5), 1e6*figures.Quantile(legs, 0.99), 1e6*figures.Quantile(leg, 0.5))
	}
	about := "mock engines, 2 KB prompt, c=1, over the legs direct"
	if err := b.figure(figures.Figure{Name: "router.added_ratio.p50", Unit: "us", Peer: "nginx's added p50", Model: about}.Ratios(p50, unit)); err != nil {
		return err
	}
	return b.figure(figures.Figure{Name: "router.added_ratio.p99", Unit: "us", Peer: "nginx's added p50", Model: about}.Ratios(p99, unit))
}

// prompt100k compares the processor time of prompts of 400 KB.
func (b *bench) prompt100k() error {
	return b.long("100k", nil, request("/v1/completions", body(prompt(400<<10), false, 16, "")))
}

// turn40 compares the processor time of turn 40 of a chat whose every turn was
// sent before.
func (b *bench) turn40() error {
	var turns [][]byte
	messages := ""
	for i := range 40 {
		messages += fmt.Sprintf(`{"role":"user","content":%q},`, fmt.Sprint(i, " ", prompt(4<<10)))
		turns = append(turns, request("/v1/chat/completions", `{"model":"m","max_tokens":16,"messages":[`+messages[:len(messages)-1]+`]}`))
		messages += fmt.Sprintf(`{"role":"assistant","content":%q},`, prompt(2<<10))
	}
	return b.long("turn40", turns[:39], turns[39])
}

// long compares the processor time of a long request with nginx's, and the bare
// loop's for the log.
func (b *bench) long(name string, warm [][]byte, req []byte) error {
	n := max(b.n/15, 20)
	us := map[string][]float64{}
	for i := range b.repeats {
		for _, t := range b.targets() {
			if t.name != "xpyd" && t.name != "nginx" && t.name != "bare" {
				continue
			}
			v, err := b.costAfter(t, warm, n, req)
			if err != nil {
				return fmt.Errorf("%s: %w", t.name, err)
			}
			us[t.name] = append(us[t.name], v)
			log.Printf("%s %d %-6s %8.1f us of processor a request", name, i, t.name, v)
			b.book.Logf("%s run %d %s: %.2f us", name, i, t.name, v)
		}
	}
	if us["nginx"] == nil {
		return nil
	}
	f := figures.Figure{Name: "router.cpu_ratio." + name, Unit: "us of processor a request", Peer: "nginx, one leg",
		Model: fmt.Sprintf("mock engines, body of %d bytes, c=4, prefix-aware choice", len(req))}
	return b.figure(f.Ratios(us["xpyd"], us["nginx"]))
}

func (b *bench) costAfter(t target, warm [][]byte, n int, req []byte) (float64, error) {
	p, err := t.start()
	if err != nil {
		return 0, err
	}
	defer p.stop()
	for _, w := range warm {
		if _, err := drive(p.addr, 1, 1, w); err != nil {
			return 0, err
		}
	}
	if _, err := drive(p.addr, 4, n/5, req); err != nil {
		return 0, err
	}
	before := p.cpu()
	if _, err := drive(p.addr, 4, n, req); err != nil {
		return 0, err
	}
	return float64((p.cpu() - before).Nanoseconds()) / 1e3 / float64(n), nil
}
