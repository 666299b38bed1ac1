package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/scripts/bench/harness"
)

// The proxy under test has a processor to itself. This program, which generates the load, and
// the mock engines share another.
const proxyCPU, loadCPU = "0", "1"

// router measures the router beside nginx, a bare two-leg fasthttp loop and other P/D
// routers, all in front of the same mock engines.
type router struct {
	base
	venv, proxy, peers string
	requests           int
	resume             bool

	done   []string // figures that -resume found
	python string   // folder of the Python peers; "" leaves them out
	p, d   string   // addresses of the mock engines
}

func (b *router) flags(f *flag.FlagSet) {
	f.StringVar(&b.venv, "venv", "", "Python environment with the peers, made if missing (in the user's cache); none leaves them out")
	f.StringVar(&b.proxy, "vllm-proxy", "", "vLLM's tests/v1/kv_connector/nixl_integration/toy_proxy_server.py; without it that peer is left out")
	f.StringVar(&b.peers, "peers", "", "only these, comma separated: nginx, bare, vllm-router, smg, sglang-router, vllm-proxy")
	f.IntVar(&b.requests, "requests", 6000, "requests of one measurement")
	f.BoolVar(&b.resume, "resume", false, "leave out what was measured since the router last changed")
}

func (b *router) parts() []part {
	request := func(bytes int, stream bool) []byte {
		return post("/v1/completions", completion(words(bytes), stream, 16, ""))
	}
	short := func(name string, stream bool) part {
		return part{name, func(ctx context.Context) error { return b.short(ctx, name, request(2<<10, stream)) }}
	}
	streams := func(name string, count, rate int) part {
		return part{name, func(ctx context.Context) error { return b.manyStreams(ctx, name, min(count, mostStreams()), rate) }}
	}
	all := []part{
		short("nonstream", false),
		short("stream16", true),
		{"added", b.added},
		{"100k", func(ctx context.Context) error { return b.long(ctx, "100k", load{req: request(400<<10, false)}) }},
		{"turn40", b.turn40},
		streams("slow", 10_000, 4),
		streams("fast", 2000, 20),
		{"stalled", b.stalled},
		{"pick", b.pick},
	}
	return slices.DeleteFunc(all, func(p part) bool { // -resume: the names of its figures contain the part's
		return slices.ContainsFunc(b.done, func(figure string) bool { return strings.Contains(figure, p.name) })
	})
}

// open installs the peers and starts the engines.
func (b *router) open(ctx context.Context) error {
	if b.peers == "" || slices.Contains(strings.Split(b.peers, ","), "nginx") {
		if err := harness.Install(ctx, "nginx", "nginx-light"); err != nil {
			return err
		}
	}
	if b.venv != "none" {
		packages := [][]string{{"--no-deps", "vllm-router==0.1.17", "smg==1.13.0", "sglang-router==0.3.2"}, {"setproctitle", "requests", "aiohttp", "uvicorn", "fastapi", "httpx", "orjson"}}
		venv, err := harness.Python{Venv: b.venv, Name: "router-peers", Imports: "vllm_router, smg, sglang_router, fastapi, httpx", Pip: packages}.Open(ctx)
		if err != nil {
			return err
		}
		b.python = venv
	}
	if b.resume {
		for _, book := range []string{"router", "pick"} {
			done, err := figures.Here(b.Out, book, "router", "internal", "scripts/bench")
			if err != nil {
				return err
			}
			for name, current := range done {
				if current {
					b.done = append(b.done, name)
				}
			}
		}
	}
	return b.engines(ctx)
}

// pin runs this program again on loadCPU alone, with as many descriptors as allowed.
func (b *router) pin() error {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return err
	}
	limit.Cur = limit.Max
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil { // package unix would not pass it on to children
		return err
	}
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil || set.Count() == 1 {
		return err
	}
	taskset, err := exec.LookPath("taskset")
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	return syscall.Exec(taskset, append([]string{"taskset", "-c", loadCPU, self}, os.Args[1:]...), os.Environ())
}

// load is what one measurement sends.
type load struct {
	before   [][]byte // each sent once, first
	req      []byte
	conns, n int
}

// cost starts and warms up t, and measures microseconds of processor per request, requests/s
// and resident bytes.
func (b *router) cost(ctx context.Context, t target, l load) (us, rate float64, rss int, err error) {
	p, err := t.start(ctx)
	if err != nil {
		return 0, 0, 0, err
	}
	defer p.Kill()
	for _, req := range l.before {
		if _, err := drive(p.Addr, 1, 1, req); err != nil {
			return 0, 0, 0, err
		}
	}
	if _, err := drive(p.Addr, l.conns, max(l.n/5, 1), l.req); err != nil {
		return 0, 0, 0, err
	}
	before := p.CPU()
	took, err := drive(p.Addr, l.conns, l.n, l.req)
	if err != nil {
		return 0, 0, 0, err
	}
	used := p.CPU() - before
	return float64(used.Nanoseconds()) / 1e3 / float64(l.n), float64(l.n) / took.Seconds(), p.RSS(), nil
}

// costs alternates targets, each round in fresh processes. A peer that fails is left out.
func (b *router) costs(ctx context.Context, name string, targets []target, l load) (map[string][]float64, error) {
	us := map[string][]float64{}
	for round := range b.Rounds {
		for _, t := range slices.Clone(targets) {
			of := l
			of.n = max(l.n/t.fewer, l.conns)
			v, rate, rss, err := b.cost(ctx, t, of)
			if err != nil && t.must {
				return nil, fmt.Errorf("%s: %w", t.name, err)
			}
			if err != nil {
				targets = slices.DeleteFunc(targets, func(o target) bool { return o.name == t.name })
				b.Sayf("%s: %s left out: %v", name, t.name, err)
				continue
			}
			us[t.name] = append(us[t.name], v)
			b.Sayf("%s round %d %-14s %7.2f us of processor a request, %6.0f requests/s, %d MiB, %d requests", name, round, t.name, v, rate, rss>>20, of.n)
		}
	}
	return us, nil
}

// short compares the processor time per request, 32 at a time.
func (b *router) short(ctx context.Context, name string, req []byte) error {
	targets := b.targets()
	us, err := b.costs(ctx, name, slices.Clone(targets), load{req: req, conns: 32, n: b.requests})
	if err != nil {
		return err
	}
	add := func(what, peer, with string) error {
		n := min(len(us["xpyd"]), len(us[with]))
		return b.Add(figures.Figure{Name: "router." + what + "." + name, Unit: "us of processor a request", Model: "mock engines, 2 KB prompt, c=32",
			Peer: peer}.Ratios(us["xpyd"][:n], us[with][:n]))
	}
	best := ""
	for _, t := range targets {
		if len(us[t.name]) == 0 || t.name == "xpyd" {
			continue
		}
		what := "cpu_over_" + t.name
		if t.name == "nginx" {
			what = "cpu_ratio"
		} else if t.name != "bare" && (best == "" || figures.Median(us[t.name]) < figures.Median(us[best])) {
			best = t.name
		}
		if err := add(what, t.what, t.name); err != nil {
			return err
		}
	}
	if best == "" {
		return nil
	}
	return add("cpu_over_best_peer", "best P/D peer: "+best, best)
}

// long compares the processor time of a long request, 4 at a time, with nginx's; the bare
// loop's only goes to the log.
func (b *router) long(ctx context.Context, name string, l load) error {
	l.conns, l.n = 4, max(b.requests/15, 20)
	us, err := b.costs(ctx, name, slices.DeleteFunc(b.targets(), func(t target) bool { return !t.must }), l)
	if err != nil || us["nginx"] == nil {
		return err
	}
	f := figures.Figure{Name: "router.cpu_ratio." + name, Unit: "us of processor a request", Peer: "nginx, one leg",
		Model: fmt.Sprintf("mock engines, body of %d bytes, c=4, prefix-aware choice", len(l.req))}
	return b.Add(f.Ratios(us["xpyd"], us["nginx"]))
}

// turn40 measures turn 40 of a chat whose earlier turns were all sent before.
func (b *router) turn40(ctx context.Context) error {
	var turns [][]byte
	messages := ""
	for i := range 40 {
		messages += fmt.Sprintf(`{"role":"user","content":%q},`, fmt.Sprint(i, " ", words(4<<10)))
		turns = append(turns, post("/v1/chat/completions", `{"model":"m","max_tokens":16,"messages":[`+messages[:len(messages)-1]+`]}`))
		messages += fmt.Sprintf(`{"role":"assistant","content":%q},`, words(2<<10))
	}
	return b.long(ctx, "turn40", load{before: turns[:39], req: turns[39]})
}

// added compares the latency that a proxy adds to sequential requests: ours over two direct
// legs, nginx's over one.
func (b *router) added(ctx context.Context) error {
	n := b.requests / 2
	two := [][]byte{
		post("/v1/completions", `{"kv_transfer_params":{"do_remote_decode":true},`+completion(words(2<<10), false, 1, "")[1:]),
		post("/v1/completions", completion(words(2<<10), false, 16, "")),
	}
	one := two[1:]
	through := func(start func(context.Context) (*harness.Process, error)) ([]float64, error) {
		p, err := start(ctx)
		if err != nil {
			return nil, err
		}
		defer p.Kill()
		return latencies(n, one, p.Addr)
	}
	var p50, p99, unit []float64
	for round := range b.Rounds {
		legs, err := latencies(n, two, b.p, b.d)
		leg, e := latencies(n, one, b.d)
		ours, e2 := through(b.ours)
		nginx, e3 := through(b.nginx)
		if err := errors.Join(err, e, e2, e3); err != nil {
			return err
		}
		us := func(v, over []float64, q float64) float64 {
			return 1e6 * (figures.Quantile(v, q) - figures.Quantile(over, q))
		}
		a, z, u := us(ours, legs, 0.5), us(ours, legs, 0.99), us(nginx, leg, 0.5)
		p50, p99, unit = append(p50, a), append(p99, z), append(unit, u)
		b.Sayf("added round %d: ours p50 %.2f p99 %.2f us, nginx p50 %.2f p99 %.2f us; direct two legs p50 %.2f p99 %.2f, one leg p50 %.2f",
			round, a, z, u, us(nginx, leg, 0.99), 1e6*figures.Quantile(legs, 0.5), 1e6*figures.Quantile(legs, 0.99), 1e6*figures.Quantile(leg, 0.5))
	}
	of := func(name string, v []float64) figures.Figure {
		return figures.Figure{Name: "router.added_ratio." + name, Unit: "us", Peer: "nginx's added p50", Model: "mock engines, 2 KB prompt, c=1, over the legs direct"}.Ratios(v, unit)
	}
	return b.Add(of("p50", p50), of("p99", p99))
}

// pick runs the pick benchmark on both processors, with a small index if -requests is small.
func (b *router) pick(ctx context.Context) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	args := []string{"-c", proxyCPU + "," + loadCPU, self, "pick", "-out", b.Out, "-rounds", strconv.Itoa(b.Rounds)}
	if b.requests < 1000 {
		args = append(args, "-blocks", "200000")
	}
	cmd := exec.CommandContext(ctx, "taskset", args...)
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w", strings.Join(args[2:], " "), err)
	}
	return nil
}
