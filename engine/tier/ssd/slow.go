package ssd

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// An SSD that stalls is left alone: a transfer that takes longer than Config.Timeout opens the
// breaker while it is still under way. Loads that wait for the SSD give up at that moment, later
// ones take its units for absent, and nothing is written. A probe in the background finds out
// when it is fast again.

// watched is a segment's file with timed transfers.
type watched struct {
	File
	d *Disk
}

func (f watched) ReadAt(b []byte, at int64) (int, error) {
	defer f.watch("read")()
	return f.File.ReadAt(b, at)
}

func (f watched) WriteAt(b []byte, at int64) (int, error) {
	defer f.watch("write")()
	return f.File.WriteAt(b, at)
}

func (f watched) watch(op string) (ended func() bool) {
	return time.AfterFunc(f.d.cfg.Timeout, func() { f.d.late(op) }).Stop
}

// openFile opens a segment's file.
func (d *Disk) openFile(path string, flag int) (File, error) {
	f, err := d.fs.Open(path, flag)
	if err != nil {
		return nil, err
	}
	return watched{f, d}, nil
}

// late is called when a transfer takes too long.
func (d *Disk) late(op string) {
	if !d.watching.Load() {
		return
	}
	d.lates.WithLabelValues(op).Inc()
	err := fmt.Errorf("a %s in %s takes longer than %v: it is left alone until it is faster", op, d.cfg.Dir, d.cfg.Timeout)
	d.slow.Failed(d.env.Awake, err)
	d.env.Complain(err)
}

// probe writes and reads a file as large as a unit. It only has to be fast, not to succeed.
func (d *Disk) probe(context.Context) error {
	path := filepath.Join(d.cfg.Dir, "probe")
	began := time.Now()
	if f, err := d.fs.Open(path, os.O_RDWR|os.O_CREATE); err == nil {
		b := aligned(d.env.Shape.Record())
		if _, err = f.WriteAt(b, 0); err == nil {
			_, _ = f.ReadAt(b, 0)
		}
		f.Close()
		os.Remove(path)
	}
	if took := time.Since(began); took > d.cfg.Timeout {
		return fmt.Errorf("%s takes %v for a unit", d.cfg.Dir, took)
	}
	d.env.Log.Info("KV on the SSD is used again", "dir", d.cfg.Dir)
	return nil
}
