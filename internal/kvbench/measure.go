package kvbench

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/xpyd/xpyd/internal/memfd"
)

// The kinds of run that take turns, as Report.Runs names them.
const (
	RunChecked   = "digests checked"
	RunUnchecked = "digests off"
	RunBare      = "bare writev/readv"
	RunMemcpy    = "memcpy, one run"
	RunScattered = "memcpy, same blocks"
)

// throughput runs ours and the limits in turn, so that a disturbance of the machine
// affects all of them.
func (r *receiver) throughput(ctx context.Context, rep *Report) error {
	kinds, err := r.kinds(ctx, rep)
	if err != nil {
		return err
	}
	defer func() {
		_ = r.measure(ctx, r.cfg.Digests == "off") // it is open
	}()
	for i := range r.cfg.Warmup {
		r.say("warm-up %d of %d", i+1, r.cfg.Warmup)
		for _, k := range kinds {
			if _, err := k.run(); err != nil {
				return err
			}
		}
	}
	begun := time.Now()
	for i := 0; i < r.cfg.Repetitions || time.Since(begun) < r.cfg.Duration; i++ {
		for _, k := range kinds {
			cpu := cpuTime()
			theirs, err := r.ctl.ask(request{Ask: askCPU})
			if err != nil {
				return err
			}
			took, err := k.run()
			if err != nil {
				return fmt.Errorf("%s: %w", k.name, err)
			}
			cpu = cpuTime() - cpu
			after, err := r.ctl.ask(request{Ask: askCPU})
			if err != nil {
				return err
			}
			rep.add(k.name, k.bytes, took, cpu, after.CPU-theirs.CPU)
		}
		r.say("run %d: %s", i+1, rep.last())
	}
	return nil
}

type kind struct {
	name  string
	bytes int
	run   func() (time.Duration, error)
}

// kinds lists the runs that take turns.
func (r *receiver) kinds(ctx context.Context, rep *Report) ([]kind, error) {
	n := r.cfg.Bytes
	ours := func(unchecked bool) func() (time.Duration, error) {
		return func() (time.Duration, error) {
			if r.s != r.all[unchecked] || r.s == nil {
				if err := r.measure(ctx, unchecked); err != nil {
					return 0, err
				}
			}
			return r.transfer(ctx, n)
		}
	}
	var kinds []kind
	if r.cfg.Digests != "off" {
		kinds = append(kinds, kind{RunChecked, n * r.cfg.Concurrency, ours(false)})
	}
	if r.cfg.Digests != "on" {
		kinds = append(kinds, kind{RunUnchecked, n * r.cfg.Concurrency, ours(true)})
	}
	if !r.cfg.Baselines {
		return kinds, nil
	}
	dest := blocksOf(r.dests[0][:r.cfg.blocks(n)])
	if r.peer.Transports[rep.Transport].Local { // a socket does not limit shared memory
	} else if a, err := r.ctl.ask(request{Ask: askBare, Connections: r.cfg.Connections}); err != nil {
		rep.Notes = append(rep.Notes, "no bare loop: "+err.Error())
	} else if r.bare, err = dialBare(ctx, a.Addr, r.cfg.Connections); err != nil {
		return nil, err
	} else {
		kinds = append(kinds, kind{RunBare, n, timed(func() error { return r.bare.transfer(ctx, r.pool, dest) })})
	}
	// Copies have memory of their own, the fastest available, whatever the pools lie in.
	for i := range 2 {
		m, err := memfd.Private(n)
		if err != nil {
			return nil, err
		}
		r.copies = append(r.copies, m)
		pattern(0, i, m.Bytes)
	}
	src, dst := r.copies[0].Bytes, r.copies[1].Bytes
	from, to := order(r.cfg.Scatter, n/r.pool.size, 3), order(r.cfg.Scatter, n/r.pool.size, 4)
	return append(kinds,
		kind{RunMemcpy, n, timed(func() error { copy(dst, src); return nil })},
		kind{RunScattered, n, timed(func() error {
			for i, b := range from {
				size := r.pool.size
				copy(dst[int(to[i])*size:][:size], src[int(b)*size:][:size])
			}
			return nil
		})}), nil
}

func timed(f func() error) func() (time.Duration, error) {
	return func() (time.Duration, error) {
		begun := time.Now()
		err := f()
		return time.Since(begun), err
	}
}

// latency times small transfers, one at a time: from sending the ticket until
// all of it is verified.
func (r *receiver) latency(ctx context.Context, rep *Report) error {
	if r.cfg.LatencyRuns == 0 {
		return nil
	}
	r.say("%d transfers of %s, one at a time", r.cfg.LatencyRuns, Size(r.cfg.LatencyBytes))
	var err error
	rep.Latency, err = r.small(ctx, r.cfg.LatencyBytes, max(10, r.cfg.LatencyRuns/10), r.cfg.LatencyRuns)
	return err
}

func (r *receiver) small(ctx context.Context, n, warmup, runs int) (Latency, error) {
	times := make([]time.Duration, 0, runs)
	slots := r.dests
	r.dests = slots[:1]
	defer func() { r.dests = slots }()
	for i := range warmup + runs {
		took, err := r.transfer(ctx, n)
		if err != nil {
			return Latency{}, err
		}
		if i >= warmup {
			times = append(times, took)
		}
	}
	return quantiles(n, times), nil
}

// sweep measures throughput and latency for each size of the plot.
func (r *receiver) sweep(ctx context.Context, rep *Report) error {
	for _, n := range r.cfg.Sweep {
		runs := min(max(5, (512<<20)/n), 300)
		l, err := r.small(ctx, n, max(1, runs/10), runs)
		if err != nil {
			return err
		}
		p := Point{Latency: l}
		rounds := max(3, runs/r.cfg.Concurrency/3)
		var rates []float64
		for range rounds {
			took, err := r.transfer(ctx, n)
			if err != nil {
				return err
			}
			rates = append(rates, float64(n*r.cfg.Concurrency)/took.Seconds()/1e9)
		}
		p.GBs = spreadOf(rates)
		rep.Sweep = append(rep.Sweep, p)
		r.say("%s: %.2f GB/s, p50 %.0f µs", Size(n), p.GBs.Median, l.P50)
	}
	return nil
}

// handshakes measures new peers: from dialling to a usable session, and to the
// first block of a transfer.
func (r *receiver) handshakes(ctx context.Context, rep *Report) error {
	if r.cfg.Handshakes == 0 {
		return nil
	}
	r.say("%d new peers", r.cfg.Handshakes)
	var opened, first []float64
	for range r.cfg.Handshakes {
		var once sync.Once
		var at time.Time
		sk := &sink{pool: r.pool, arrived: func() { once.Do(func() { at = time.Now() }) }}
		begun := time.Now()
		kv, s, err := r.session(ctx, nil, false)
		if err != nil {
			return err
		}
		ready := time.Now()
		err = r.one(ctx, s, 0, r.cfg.LatencyBytes, sk)
		closeReceiver(kv)
		if err != nil {
			return err
		}
		opened = append(opened, ready.Sub(begun).Seconds()*1e3)
		first = append(first, at.Sub(begun).Seconds()*1e3)
	}
	rep.Handshake = &Handshake{Open: spreadOf(opened), FirstByte: spreadOf(first)}
	return nil
}
