package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"time"

	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/internal/loadgen/report"
)

// used is what a process took.
type used struct {
	processor, wall time.Duration
	memory          int64 // bytes, at its peak
}

// xpydBench runs `xpyd bench` and returns its report, and what it took.
func (b *bench) xpydBench(args ...string) (*report.Report, used, error) {
	args = append([]string{"bench", "--model", "m", "--progress", "off", "--json", "-"}, args...)
	b.book.Logf("$ xpyd %q", args)
	cmd := exec.CommandContext(b.ctx, b.xpyd, args...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, os.Stderr
	begin := time.Now()
	if err := cmd.Run(); err != nil {
		return nil, used{}, fmt.Errorf("%v: %w", cmd.Args, err)
	}
	u := used{processor: cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime(), wall: time.Since(begin)}
	if r, ok := cmd.ProcessState.SysUsage().(*syscall.Rusage); ok {
		u.memory = r.Maxrss << 10
	}
	var r report.Report
	if err := json.Unmarshal(out.Bytes(), &r); err != nil {
		return nil, used{}, err
	}
	p := &r.Phases[len(r.Phases)-1]
	if p.Requests.Failed > 0 {
		return nil, used{}, fmt.Errorf("%d failed: %+v", p.Requests.Failed, p.Errors)
	}
	return &r, u, nil
}

// rate asks for 5,000 requests a second.
func (b *bench) rate() error {
	url, stop, err := b.server(os.Args[0], "engine", "0s")
	if err != nil {
		return err
	}
	defer stop()
	const asked = 5000
	for _, kind := range []struct {
		name string
		args []string
	}{{"whole", []string{"--no-stream"}}, {"stream16", nil}} {
		var reached, limit []float64
		for range b.repeats {
			args := append([]string{"--url", url, "--endpoint", "completions", "--rate", fmt.Sprint(asked), "--duration", "10s", "--ramp", "1s", "--output", "16"}, kind.args...)
			r, u, err := b.xpydBench(args...)
			if err != nil {
				return err
			}
			p := &r.Phases[0]
			b.logf("rate.%s: %.0f requests/s of %d asked, late by p50 %.3f p99 %.3f ms, E2E p50 %.3f p99 %.3f ms, %.2f processors, %d MiB", kind.name, p.Throughput.Requests, asked,
				p.Latency.Late.P50, p.Latency.Late.P99, p.Latency.E2E.P50, p.Latency.E2E.P99, u.processor.Seconds()/u.wall.Seconds(), u.memory>>20)
			reached, limit = append(reached, p.Throughput.Requests), append(limit, asked)
		}
		f := figures.Figure{Name: "loadgen.rate." + kind.name, Unit: "requests/s", Peer: "asked for (Poisson), server on the same 2 processors", Model: "512-word prompt, 16 tokens"}
		if err := b.add(f.Ratios(reached, limit)); err != nil {
			return err
		}
	}
	return nil
}

// streams opens 10,000 at 4 tokens a second each.
func (b *bench) streams() error {
	const open, pace = 10000, 250 * time.Millisecond
	url, stop, err := b.server(os.Args[0], "engine", pace.String())
	if err != nil {
		return err
	}
	defer stop()
	var delay, delayLimit, memory, memoryLimit []float64
	for range b.repeats {
		r, u, err := b.xpydBench("--url", url, "--endpoint", "completions", "--concurrency", fmt.Sprint(open), "--duration", "30s", "--ramp", "10s", "--output", "40", "--input", "64")
		if err != nil {
			return err
		}
		p := &r.Phases[0]
		most := 0
		for _, n := range p.Timeline.InFlight {
			most = max(most, n)
		}
		late := p.Latency.ITL.P99 - float64(pace.Milliseconds())
		kb := float64(u.memory) / open / 1024
		b.logf("streams: %d open, %.0f tokens/s, gaps p50 %.1f p99 %.1f ms, %.2f processors, %.1f KiB a stream", most, p.Throughput.OutputTokens, p.Latency.ITL.P50, p.Latency.ITL.P99, u.processor.Seconds()/u.wall.Seconds(), kb)
		delay, delayLimit = append(delay, late), append(delayLimit, 50)
		memory, memoryLimit = append(memory, kb), append(memoryLimit, 32)
	}
	f := figures.Figure{Name: "loadgen.streams_delay_ms", Unit: "ms", Peer: "limit: p99 of a gap over its 250 ms, server's delay included", Model: "10,000 streams at 4 tokens/s"}
	if err := b.add(f.Ratios(delay, delayLimit)); err != nil {
		return err
	}
	f = figures.Figure{Name: "loadgen.stream_kb", Unit: "KiB", Peer: "limit: the router's of a stream", Model: "10,000 streams at 4 tokens/s; peak resident memory of the whole process"}
	return b.add(f.Ratios(memory, memoryLimit))
}
