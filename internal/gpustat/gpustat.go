// Package gpustat is what is asked of NVML: which GPUs there are, and, of one that it watches, load,
// memory, power, temperature and NVLink traffic, which a goroutine reads once in a while, shown as
// metrics. Builds without cgo, and machines without the driver's library, have none of it.
package gpustat

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// ErrUnavailable says that this process cannot read NVML: a build without cgo, or no library.
var ErrUnavailable = errors.New("NVML is not available")

// Sample is a GPU's report about itself. NaN: it does not tell.
type Sample struct {
	Busy        float64 // 0..1 of the last interval in which some kernel ran
	MemoryUsed  float64 // bytes, by all processes
	MemoryTotal float64
	Power       float64 // watts
	Temperature float64 // °C
	NVLinkSent  float64 // bytes over all links since the driver was loaded
	NVLinkRead  float64
}

// none is a Sample that says nothing.
func none() Sample {
	n := math.NaN()
	return Sample{n, n, n, n, n, n, n}
}

// Device is one GPU. Read may take long: a driver can hang.
type Device interface {
	Read() (Sample, error)
	Close() error
}

const (
	// Interval is the time between two reads.
	Interval = time.Second
	// stale is the age at which a sample is not shown any more.
	stale = 5 * Interval
)

type timed struct {
	Sample
	at time.Time
}

// Poller reads a Device and keeps the last Sample. It is a prometheus.Collector.
type Poller struct {
	dev    Device
	log    *slog.Logger
	shown  []metric
	last   atomic.Pointer[timed]
	cancel context.CancelFunc
	done   chan struct{}
	err    error // of the device's Close
}

// Poll begins to read the device, which is the poller's from now on.
func Poll(dev Device, log *slog.Logger) *Poller {
	ctx, cancel := context.WithCancel(context.Background())
	p := &Poller{dev: dev, log: log, shown: metrics(), cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(p.done)
		p.readLoop(ctx)
		p.err = dev.Close()
	}()
	return p
}

func (p *Poller) readLoop(ctx context.Context) {
	tick := time.NewTicker(Interval)
	defer tick.Stop()
	failing := false
	for ctx.Err() == nil {
		s, err := p.dev.Read()
		if err == nil {
			p.last.Store(&timed{s, time.Now()})
		} else if !failing {
			p.log.Warn("the GPU cannot be read; its metrics are absent until it can", "error", err)
		}
		failing = err != nil
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
	}
}

// Latest returns the last Sample, unless it is stale.
func (p *Poller) Latest() (Sample, bool) {
	if p == nil {
		return none(), false
	}
	t := p.last.Load()
	if t == nil || time.Since(t.at) > stale {
		return none(), false
	}
	return t.Sample, true
}

// Close ends the reading and closes the device. It waits for a driver that hangs until ctx ends.
func (p *Poller) Close(ctx context.Context) error {
	p.cancel()
	select {
	case <-p.done:
		return p.err
	case <-ctx.Done():
		return fmt.Errorf("NVML does not answer: %w", context.Cause(ctx))
	}
}

// metric is one of a Sample's values as a metric.
type metric struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	of   func(*Sample) float64
	dir  string // value of the label direction, if it has it
}

func describe(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("xpyd_gpu_"+name, help, labels, nil)
}

func metrics() []metric {
	link := describe("nvlink_bytes_total", "Bytes over the GPU's NVLinks since its driver was loaded, of all processes.", "direction")
	return []metric{
		{describe("utilization_ratio", "Part of the last sample period in which a kernel ran on the GPU, 0 to 1."), prometheus.GaugeValue, func(s *Sample) float64 { return s.Busy }, ""},
		{describe("memory_used_bytes", "GPU memory in use, by all processes."), prometheus.GaugeValue, func(s *Sample) float64 { return s.MemoryUsed }, ""},
		{describe("memory_total_bytes", "GPU memory."), prometheus.GaugeValue, func(s *Sample) float64 { return s.MemoryTotal }, ""},
		{describe("power_watts", "Power that the GPU draws."), prometheus.GaugeValue, func(s *Sample) float64 { return s.Power }, ""},
		{describe("temperature_celsius", "Temperature of the GPU."), prometheus.GaugeValue, func(s *Sample) float64 { return s.Temperature }, ""},
		{link, prometheus.CounterValue, func(s *Sample) float64 { return s.NVLinkSent }, "sent"},
		{link, prometheus.CounterValue, func(s *Sample) float64 { return s.NVLinkRead }, "received"},
	}
}

// Describe implements prometheus.Collector.
func (p *Poller) Describe(out chan<- *prometheus.Desc) {
	for _, m := range p.shown {
		out <- m.desc
	}
}

// Collect implements prometheus.Collector: what is not known is absent.
func (p *Poller) Collect(out chan<- prometheus.Metric) {
	s, ok := p.Latest()
	if !ok {
		return
	}
	for _, m := range p.shown {
		v := m.of(&s)
		if math.IsNaN(v) {
			continue
		}
		var labels []string
		if m.dir != "" {
			labels = []string{m.dir}
		}
		out <- prometheus.MustNewConstMetric(m.desc, m.kind, v, labels...)
	}
}
