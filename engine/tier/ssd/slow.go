package tier

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
)

// An SSD that stalls is left alone: a transfer that takes longer than
// Config.DirTimeout, still under way or not, opens a breaker. Loads that wait
// for the SSD give up at that moment, later ones take what it has for absent, and
// nothing is written. A probe in the background finds out when it is well.

// watched is a segment's file whose transfers are timed.
type watched struct {
	file
	most time.Duration
	late func(op string)
}

func (f watched) ReadAt(b []byte, at int64) (int, error) {
	defer f.watch("read")()
	return f.file.ReadAt(b, at)
}

func (f watched) WriteAt(b []byte, at int64) (int, error) {
	defer f.watch("write")()
	return f.file.WriteAt(b, at)
}

func (f watched) watch(op string) (ended func() bool) {
	return time.AfterFunc(f.most, func() { f.late(op) }).Stop
}

// watch is how the SSD tier opens files.
func (t *Tiers) watch(path string, flag int) (file, error) {
	f, err := t.openFile(path, flag)
	if err != nil {
		return nil, err
	}
	return watched{f, t.cfg.DirTimeout, t.late}, nil
}

// late hears of a transfer that takes too long. While the tiers are opened, and
// segments recovered, no request is there yet that it could hold up.
func (t *Tiers) late(op string) {
	t.mu.Lock()
	attached := t.cache != nil
	t.mu.Unlock()
	if !attached {
		return
	}
	t.metrics.late.WithLabelValues(op).Inc()
	err := fmt.Errorf("a %s in %s takes longer than %v: it is left alone until it is faster", op, t.cfg.Dir, t.cfg.DirTimeout)
	t.slow.failed(t.awake, err)
	t.complain(err)
}

// onSSD says whether a unit can be had from the SSD now.
func (t *Tiers) onSSD(key kvcache.Hash) bool { return t.disk.has(key) && t.slow.allow() }

// probe writes and reads a file as large as a unit. Whether that works is not
// asked, as long as it is fast.
func (t *Tiers) probe(context.Context) error {
	path := filepath.Join(t.cfg.Dir, "probe")
	began := time.Now()
	if f, err := t.openFile(path, os.O_RDWR|os.O_CREATE); err == nil {
		b := aligned(t.shape.record())
		if _, err = f.WriteAt(b, 0); err == nil {
			_, _ = f.ReadAt(b, 0)
		}
		f.Close()
		os.Remove(path)
	}
	if took := time.Since(began); took > t.cfg.DirTimeout {
		return fmt.Errorf("%s takes %v for a unit", t.cfg.Dir, took)
	}
	t.log.Info("KV on the SSD is used again", "dir", t.cfg.Dir)
	return nil
}
