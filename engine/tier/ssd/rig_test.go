package ssd

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"testing"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier/level"
	"github.com/xpyd/xpyd/kvlayout"
)

const identity = "model and numerics"

// way is how disks are read and written.
var way = IOAuto

// TestMain runs every test through io_uring, where the machine has that, and through pread.
func TestMain(m *testing.M) {
	code := m.Run()
	if flag.Lookup("test.list").Value.String()+flag.Lookup("test.fuzz").Value.String() != "" {
		os.Exit(code) // fuzzing, or asked what there is
	}
	way = IOPread
	fmt.Println("and with pread:")
	os.Exit(max(code, m.Run()))
}

// shape has records of one page.
func shape() level.Shape {
	return level.NewShape(kvlayout.Plain(3, 2, 4, 16, kvlayout.F32), 1)
}

// env is one in which nothing is pinned unless pinned says so.
func env(t *testing.T) *level.Env {
	return &level.Env{Shape: shape(), Identity: identity, LoadTimeout: time.Minute, Complain: func(error) {}, Log: slog.New(slog.DiscardHandler), Awake: t.Context()}
}

// newDisk opens a disk of the given pages, and checks its books at the end.
func newDisk(t *testing.T, pages int, env *level.Env, wrap func(FS) FS) *Disk {
	t.Helper()
	l, err := Config{Dir: t.TempDir(), Bytes: int64(pages) * level.Page, IO: way, Timeout: time.Minute, Wrap: wrap}.Open(t.Context(), env)
	if err != nil {
		t.Fatal(err)
	}
	d := l.(*Disk)
	t.Cleanup(func() {
		if err := d.Check(nil); err != nil {
			t.Error(err)
		}
		if err := d.Close(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	return d
}

// key names the i-th unit.
func key(i int) kvcache.Hash { return kvcache.Hash{1, byte(i), byte(i >> 8)} }

// put saves a unit.
func put(t *testing.T, d *Disk, u level.Unit) (bool, error) {
	u.Born = time.Now()
	return d.Save(t.Context(), u, aligned(d.env.Shape.Record()))
}
