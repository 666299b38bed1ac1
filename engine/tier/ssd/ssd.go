package ssd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/engine/tier/level"
	"github.com/xpyd/xpyd/engine/tier/ssd/uring"
)

// Name is the level's label.
const Name = "ssd"

// Settings that a level.SettingError may name.
const (
	SettingDir   = "Dir"
	SettingBytes = "DirBytes"
	SettingIO    = "DirIO"
)

const (
	reads   = 32 // under way at a time, of all loads
	writers = 4
)

// Config says where the level is, and how much it may fill.
type Config struct {
	Dir   string // this worker's own
	Bytes int64
	IO    IO // how it is read and written; "": IOAuto
	// Timeout is how long a transfer of one unit may take; a slower SSD is left alone until
	// it is faster. 0: half of what a load may take, at least 100 ms.
	Timeout time.Duration
	Wrap    func(FS) FS // nil, or adds a test's faults to the files
}

// FS opens and removes files.
type FS interface {
	Open(path string, flag int) (File, error)
	Remove(path string) error
}

// File is what a segment needs of *os.File.
type File interface {
	io.ReaderAt
	io.WriterAt
	io.Closer
}

var (
	_ level.Level   = (*Disk)(nil)
	_ level.Keeper  = (*Disk)(nil)
	_ level.Aborter = (*Disk)(nil)
)

// Open implements level.Config. The SSD is not watched for stalls while segments are recovered:
// there are no requests yet.
func (c Config) Open(_ context.Context, env *level.Env) (level.Level, error) {
	if !slices.Contains([]IO{"", IOAuto, IOUring, IOPread}, c.IO) {
		return nil, level.Bad(SettingIO, "SSD by %q", c.IO)
	}
	if c.Timeout == 0 {
		c.Timeout = max(env.LoadTimeout/2, 100*time.Millisecond)
	}
	way, err := newDiskIO(c.IO, reads+writers, env.Shape.Record(), uring.Open)
	if err != nil {
		return nil, &level.SettingError{Setting: SettingIO, Err: err}
	}
	d, err := open(c, env, way)
	if err != nil {
		return nil, errors.Join(err, way.close(context.WithoutCancel(env.Awake)))
	}
	d.watching.Store(true)
	attrs := []any{"dir", c.Dir, "io", way.way()}
	if way.why != nil {
		attrs = append(attrs, "because", way.why)
	}
	env.Log.Info("KV on the SSD", attrs...)
	return d, nil
}

// Name implements level.Level, as do the methods below and those in disk.go.
func (d *Disk) Name() string { return Name }

// Limits bounds transfers: one unit each.
func (d *Disk) Limits() level.Limits { return level.Limits{Loads: reads, Burst: 1, Writers: writers} }

// Breaker is open while the SSD stalls.
func (d *Disk) Breaker() *level.Breaker { return &d.slow }

// Close ends the level. The files stay.
func (d *Disk) Close(ctx context.Context) error { return errors.Join(d.close(), d.io.close(ctx)) }

// Abort cancels transfers that the kernel has not begun, if there is a ring.
func (d *Disk) Abort(ctx context.Context) error {
	return fmt.Errorf("%s: %w", d.cfg.Dir, errors.Join(errors.New("transfers hang"), d.io.close(ctx)))
}

// Stats counts the units and, if asked, adds up their ages.
func (d *Disk) Stats(ages bool) level.Stats {
	st := level.Stats{Tier: Name, Capacity: d.most * d.slots, UnitBytes: d.env.Shape.Record(), IO: string(d.io.way())}
	if d.io.why != nil {
		st.NoIOU = d.io.why.Error()
	}
	if open, _, why := d.slow.State(); open {
		st.LeftAlone = why.Error()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	st.Units, st.Evicted, st.Tenants, st.Over = len(d.index), d.lost, len(d.tenants), d.over
	if ages {
		var a level.Ages
		for _, p := range d.index {
			a.Add(p.seg.born[p.slot])
		}
		a.Report(&st)
	}
	return st
}

// measure makes the level's metrics.
func (d *Disk) measure() {
	m := &d.metrics
	d.errors = m.Counters("io_errors_total", "Failed reads and writes of the SSD tier.", "op")
	d.lates = m.Counters("ssd_late_total", "Transfers of the SSD tier that took longer than half of kv.load_timeout.", "op")
	m.Gauge("ssd_io_info", "How the SSD tier is read and written.", prometheus.Labels{"io": string(d.io.way())}, func() float64 { return 1 })
	m.Gauge("ssd_open", "1 while the SSD tier is left alone because a transfer took too long.", nil, d.slow.Open)
	if r := d.io.ring; r != nil {
		m.CounterOf("ssd_direct_total", "Transfers that went by pread or pwrite because io_uring did not take them.", func() float64 { return float64(r.Stats().Direct) })
	}
}

// Metrics are of transfers.
func (d *Disk) Metrics() level.Metrics { return d.metrics }

// The file of pins is written beside the old one and renamed into its place.
const (
	pinsName = "pins"
	pinsMost = 256 << 20 // bytes
)

// ReadPins implements level.Keeper.
func (d *Disk) ReadPins() ([]byte, error) {
	f, err := os.Open(filepath.Join(d.cfg.Dir, pinsName))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, pinsMost))
}

// WritePins implements level.Keeper.
func (d *Disk) WritePins(b []byte) error {
	if len(b) > pinsMost {
		return fmt.Errorf("pins of %d bytes", len(b))
	}
	path := filepath.Join(d.cfg.Dir, pinsName)
	f, err := os.OpenFile(path+".new", os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err = errors.Join(err, f.Sync(), f.Close()); err == nil {
		err = os.Rename(path+".new", path)
	}
	if err != nil {
		err = fmt.Errorf("write pins to %s: %w", d.cfg.Dir, err)
	}
	return err
}
