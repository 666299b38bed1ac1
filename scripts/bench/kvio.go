package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/xpyd/xpyd/engine/tier/ssd"
	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/internal/kvbench"
	"github.com/xpyd/xpyd/scripts/bench/harness"
)

// kvioBench alternates the SSD tier (xpyd bench kvio), by io_uring and by pread, with fio's
// direct I/O of the same unit, depth and amount.
type kvioBench struct {
	base
	on, total string
	dir       string // on the file system under test
}

func (b *kvioBench) flags(f *flag.FlagSet) {
	f.StringVar(&b.on, "dir", os.TempDir(), "a folder on the file system to measure")
	f.StringVar(&b.total, "total", "2GiB", "bytes per run, in units of 2 MiB")
}

func (b *kvioBench) open(ctx context.Context) (err error) {
	if err := harness.Install(ctx, "fio", "fio"); err != nil {
		return err
	}
	b.dir, err = os.MkdirTemp(b.on, "kvio")
	return err
}

func (b *kvioBench) close() error { return os.RemoveAll(b.dir) }

// parts are unit sizes: the usual one (8B in bf16), which kv.ssd_io: auto moves by pread, and
// a small one (a slice of it, or FP8), which it moves by io_uring.
func (b *kvioBench) parts() []part {
	of := func(unit, suffix, total string, auto ssd.IO) part {
		return part{unit, func(ctx context.Context) error { return b.measure(ctx, unit, suffix, total, auto) }}
	}
	return []part{of("2MiB", "", b.total, ssd.IOPread), of("64KiB", ".64k", "512MiB", ssd.IOUring)}
}

const depth = 16

// rates are GB/s and processor seconds per GB, by round.
type rates struct{ rate, cpu []float64 }

func (b *kvioBench) measure(ctx context.Context, unit, suffix, total string, auto ssd.IO) error {
	xpyd, err := b.Binary(ctx)
	if err != nil {
		return err
	}
	directions := []string{"write", "read"}
	got := map[string]*rates{} // by direction and way: "write fio"
	add := func(direction, way string, rate, cpu float64) {
		key := direction + " " + way
		if got[key] == nil {
			got[key] = &rates{}
		}
		got[key].rate, got[key].cpu = append(got[key].rate, rate), append(got[key].cpu, cpu)
		b.Sayf("%s units, %s: %.3f GB/s, %.2f processor seconds a GB", unit, key, rate, cpu)
	}
	for range b.Rounds {
		for _, way := range []string{string(ssd.IOUring), string(ssd.IOPread)} {
			var l kvbench.Links
			if _, err := b.Output(ctx, 10*time.Minute, &l, nil, xpyd, "bench", "kvio", "--device", "none", "--ssd-dir", filepath.Join(b.dir, "tier"), "--unit", unit, "--total", total,
				"--depth", fmt.Sprint(depth), "--io", way, "--json"); err != nil {
				return err
			}
			if len(l.SSD) != 1 {
				return fmt.Errorf("xpyd bench kvio: %d unit sizes, want one", len(l.SSD))
			}
			add("write", way, l.SSD[0].Write, l.SSD[0].WriteCPU)
			add("read", way, l.SSD[0].Read, l.SSD[0].ReadCPU)
		}
		for i, job := range []string{"write", "randread"} {
			rate, cpu, err := b.fio(ctx, job, unit, total)
			if err != nil {
				return err
			}
			add(directions[i], "fio", rate, cpu)
		}
	}
	const fioPeer = "fio, io_uring, direct=1, the same size and depth"
	for _, d := range directions {
		ring, pread := got[d+" io_uring"], got[d+" pread"]
		for _, f := range []struct {
			name, unit, peer string
			ours, peers      []float64
		}{
			{"hicache.ssd_ratio.", "GB/s", fioPeer, got[d+" "+string(auto)].rate, got[d+" fio"].rate},
			{"hicache.ssd_uring_gbs.", "GB/s", "ours by pread", ring.rate, pread.rate},
			{"hicache.ssd_uring_cpu_s_gb.", "s a GB", "ours by pread", ring.cpu, pread.cpu},
		} {
			fig := figures.Figure{Name: f.name + d + suffix, Unit: f.unit, Peer: f.peer, Model: fmt.Sprintf("%s units, %d at a time, %s", unit, depth, total)}
			if err := b.Add(fig.Ratios(f.ours, f.peers)); err != nil {
				return err
			}
		}
	}
	return nil
}

// fio runs one job over a file that the write job lays out and the read job removes. It
// returns GB/s and processor seconds per GB.
func (b *kvioBench) fio(ctx context.Context, job, unit, total string) (rate, cpu float64, err error) {
	type way struct {
		BW float64 `json:"bw_bytes"`
	}
	var r struct {
		Jobs []struct {
			Read, Write way
			User        float64 `json:"usr_cpu"` // percent of the job's time
			System      float64 `json:"sys_cpu"`
		}
	}
	file := filepath.Join(b.dir, "fio")
	if _, err := b.Output(ctx, 10*time.Minute, &r, nil, "fio", "--name=x", "--filename="+file, "--rw="+job, "--bs="+strings.TrimSuffix(unit, "iB"), "--size="+strings.TrimSuffix(total, "iB"),
		"--direct=1", "--ioengine=io_uring", fmt.Sprintf("--iodepth=%d", depth), "--randrepeat=1", "--fallocate=none", "--unlink=0", "--output-format=json"); err != nil {
		return 0, 0, err
	}
	if len(r.Jobs) != 1 {
		return 0, 0, errors.New("fio reports no job")
	}
	rate = r.Jobs[0].Write.BW
	if job == "randread" {
		rate, err = r.Jobs[0].Read.BW, os.Remove(file)
	}
	return rate / 1e9, (r.Jobs[0].User + r.Jobs[0].System) / 100 * 1e9 / rate, err
}
