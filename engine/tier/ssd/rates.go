package ssd

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier/level"
	"github.com/xpyd/xpyd/engine/tier/ssd/uring"
	"github.com/xpyd/xpyd/kvlayout"
)

// Rates is how fast the SSD tier wrote and read units.
type Rates struct {
	UnitBytes, Units, Depth int
	IO                      IO      // that was used
	Write, Read             float64 // bytes a second
	WriteCPU, ReadCPU       float64 // seconds of processor time a 10⁹ bytes, the kernel's included
}

// Limits of Measure.
const (
	LeastUnits = 2 * minSegments
	MostDepth  = 1024
	UnitPage   = level.Page // units are a multiple of it
)

// FreshDir returns nil if dir is a folder without files or does not exist: Measure removes it.
func FreshDir(dir string) error {
	old, err := os.ReadDir(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err == nil && len(old) > 0:
		err = fmt.Errorf("%s has files, such as %s: want a folder for this alone", dir, old[0].Name())
	}
	return err
}

// Measure writes units of unitBytes, a multiple of UnitPage, through an SSD tier in dir until
// total bytes are written, then reads all of them in random order; depth at a time. dir must
// satisfy FreshDir, and is deleted at the end. progress may be nil.
func Measure(ctx context.Context, dir string, unitBytes int, total int64, depth int, by IO, progress level.Progress) (r Rates, err error) {
	bad := func(units int) error {
		return fmt.Errorf("units of %d bytes, %d of them, %d at a time: want a multiple of %d, at least %d, 1 to %d", unitBytes, units, depth, level.Page, LeastUnits, MostDepth)
	}
	if unitBytes < level.Page {
		return r, bad(0)
	}
	rows := (unitBytes - level.HeaderSize - 8) / 32 // of [2][1 head][16 tokens]
	s := level.NewShape(kvlayout.Plain(1, 1, rows, 16, kvlayout.U8), 1)
	units := int(total / int64(unitBytes))
	if rows < 1 || s.Record() != unitBytes || units < LeastUnits || depth < 1 || depth > MostDepth {
		return r, bad(units)
	}
	if err := FreshDir(dir); err != nil {
		return r, err
	}
	way, err := newDiskIO(by, depth, unitBytes, uring.Open)
	if err != nil {
		return r, err
	}
	// A quarter more, so that nothing is evicted from a log of whole segments.
	d, err := open(Config{Dir: dir, Bytes: total + total/4 + minSegments*segmentBytes, Timeout: time.Hour},
		&level.Env{Shape: s, Identity: "measured", Log: slog.New(slog.DiscardHandler)}, way)
	if err != nil {
		return r, errors.Join(err, way.close(ctx))
	}
	defer func() {
		err = errors.Join(err, d.erase(), d.Close(context.WithoutCancel(ctx)), os.RemoveAll(dir))
	}()
	r = Rates{UnitBytes: unitBytes, Units: units, Depth: depth, IO: way.way()}
	key := func(i int) (k kvcache.Hash) {
		binary.LittleEndian.PutUint64(k[:], uint64(i)+1)
		return k
	}
	began := cpuTime()
	write, read := &level.Meter{Tell: progress, What: "write", Total: total}, &level.Meter{Tell: progress, What: "read", Total: total}
	seconds, err := inTurns(ctx, depth, unitBytes, units, write, func(i int, rec []byte) error {
		_, err := d.append(level.Unit{Key: key(i), Pos: 16 * i}, rec, nil)
		return err
	})
	if err != nil {
		return r, err
	}
	bytes := float64(units) * float64(unitBytes)
	written := cpuTime()
	r.Write, r.WriteCPU = bytes/seconds, (written-began).Seconds()/bytes*1e9
	order := rand.New(rand.NewPCG(1, 2)).Perm(units)
	seconds, err = inTurns(ctx, depth, unitBytes, units, read, func(i int, rec []byte) error {
		_, err := d.read(&level.Read{Key: key(order[i]), Pos: 16 * order[i], Rec: rec})
		return err
	})
	r.Read, r.ReadCPU = bytes/seconds, (cpuTime()-written).Seconds()/bytes*1e9
	return r, err
}

// inTurns calls do for 0 .. n-1 from depth goroutines, each with its own buffer, until one
// fails, and returns how long all took.
func inTurns(ctx context.Context, depth, size, n int, done *level.Meter, do func(i int, rec []byte) error) (seconds float64, err error) {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	var next atomic.Int64
	buffers := make([][]byte, depth)
	for i := range buffers {
		buffers[i] = aligned(size)
		for at := 0; at < size; at += 8 {
			binary.LittleEndian.PutUint64(buffers[i][at:], rand.Uint64())
		}
	}
	var wg sync.WaitGroup
	began := time.Now()
	for _, rec := range buffers {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < n && ctx.Err() == nil; i = int(next.Add(1)) - 1 {
				if err := do(i, rec); err != nil {
					stop(err)
				}
				done.Add(int64(size))
			}
		})
	}
	wg.Wait()
	return time.Since(began).Seconds(), context.Cause(ctx)
}
