// Command benchkvio measures the SSD tier (xpyd bench kvio) and fio's direct
// I/O with the same unit, depth and amount, in turn; see scripts/bench-kvio.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/xpyd/xpyd/engine/tier/ssd"
	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/internal/kvbench"
)

func main() {
	bin := flag.String("xpyd", "", "the binary")
	dir := flag.String("dir", "", "a folder on the file system to measure")
	total := flag.String("total", "2GiB", "bytes a run")
	rounds := flag.Int("n", 7, "rounds")
	out := flag.String("out", "bench", "where results go")
	flag.Parse()
	if err := run(*bin, *dir, *total, *rounds, *out); err != nil {
		fmt.Fprintln(os.Stderr, "benchkvio:", err)
		os.Exit(1)
	}
}

const depth = 16

// size is a size of units that is measured: usual ones (8B in bf16), and small
// ones (a slice of it, or FP8). auto is the way that kv.ssd_io: auto takes.
type size struct {
	unit, total, suffix string
	auto                int // of ways
}

func run(bin, dir, total string, rounds int, out string) error {
	book, err := figures.Open(out, "kvio")
	if err != nil {
		return err
	}
	defer book.Close()
	for _, s := range []size{{"2MiB", total, "", 1}, {"64KiB", "512MiB", ".64k", 0}} {
		if err := s.measure(book, bin, dir, rounds); err != nil {
			return err
		}
	}
	return nil
}

func (s *size) measure(book *figures.Book, bin, dir string, rounds int) error {
	var ours [2]direction // by ways
	var peer direction
	for n := range rounds {
		for i, by := range ways {
			r, err := s.ours(bin, filepath.Join(dir, "tier"), by)
			if err != nil {
				return err
			}
			ours[i].add(r.Write, r.Read, r.WriteCPU, r.ReadCPU)
		}
		var f [2]fioJob
		for i, rw := range []string{"write", "randread"} {
			var err error
			if f[i], err = s.fio(filepath.Join(dir, "fio"), rw); err != nil {
				return err
			}
		}
		peer.add(f[0].rate, f[1].rate, f[0].cpu, f[1].cpu)
		line := fmt.Sprintf("%s, round %d: write %s, %s, fio %s; read %s, %s, fio %s", s.unit, n+1,
			ours[0].say(0, n), ours[1].say(0, n), peer.say(0, n), ours[0].say(1, n), ours[1].say(1, n), peer.say(1, n))
		book.Logf("%s (io_uring, pread; GB/s and processor seconds a GB)", line)
		fmt.Fprintln(os.Stdout, line)
	}
	const fioPeer = "fio, io_uring, direct=1, the same size and depth"
	for i, name := range []string{"write", "read"} {
		for _, f := range []struct {
			name, unit, peer string
			ours, peers      []float64
		}{
			{"hicache.ssd_ratio.", "GB/s", fioPeer, ours[s.auto].rate[i], peer.rate[i]},
			{"hicache.ssd_uring_gbs.", "GB/s", "ours by pread", ours[0].rate[i], ours[1].rate[i]},
			{"hicache.ssd_uring_cpu_s_gb.", "s a GB", "ours by pread", ours[0].cpu[i], ours[1].cpu[i]},
		} {
			fig := figures.Figure{Name: f.name + name + s.suffix, Unit: f.unit, Peer: f.peer, Command: "scripts/bench-kvio",
				Model: fmt.Sprintf("%s units, %d at a time, %s", s.unit, depth, s.total)}
			if err := book.Add(fig.Ratios(f.ours, f.peers)); err != nil {
				return err
			}
		}
	}
	return nil
}

// ways are what is compared with each other and with fio.
var ways = []ssd.IO{ssd.IOUring, ssd.IOPread}

// direction is what all rounds came to, writing and reading: GB/s, and
// processor seconds a GB.
type direction struct{ rate, cpu [2][]float64 }

func (d *direction) add(write, read, writeCPU, readCPU float64) {
	for i, v := range [2]float64{write, read} {
		d.rate[i] = append(d.rate[i], v)
	}
	for i, v := range [2]float64{writeCPU, readCPU} {
		d.cpu[i] = append(d.cpu[i], v)
	}
}

func (d *direction) say(i, n int) string {
	return fmt.Sprintf("%.3f (%.2f)", d.rate[i][n], d.cpu[i][n])
}

func (s *size) ours(bin, dir string, by ssd.IO) (r kvbench.SSD, err error) {
	b, err := exec.Command(bin, "bench", "kvio", "--device", "none", "--ssd-dir", dir, "--unit", s.unit, "--total", s.total, "--depth", fmt.Sprint(depth), "--io", string(by), "--json").Output()
	if err != nil {
		return r, fmt.Errorf("xpyd bench kvio: %w", err)
	}
	var l kvbench.Links
	if err = json.Unmarshal(b, &l); err == nil && len(l.SSD) != 1 {
		err = fmt.Errorf("xpyd bench kvio: %d sizes of a unit, want one", len(l.SSD))
	}
	if err != nil {
		return r, err
	}
	return l.SSD[0], nil
}

// fioJob is one job's GB/s and processor seconds a GB.
type fioJob struct{ rate, cpu float64 }

// fio runs one job over a file of its own. The file is laid out by the write
// job and read by the read job.
func (s *size) fio(path, rw string) (j fioJob, err error) {
	b, err := exec.Command("fio", "--name=x", "--filename="+path, "--rw="+rw, "--bs="+strings.TrimSuffix(s.unit, "iB"), "--size="+strings.TrimSuffix(s.total, "iB"), "--direct=1", "--ioengine=io_uring",
		fmt.Sprintf("--iodepth=%d", depth), "--randrepeat=1", "--fallocate=none", "--unlink=0", "--output-format=json").Output()
	if err != nil {
		return j, fmt.Errorf("fio %s: %w: %s", rw, err, b)
	}
	type way struct {
		BW    float64 `json:"bw_bytes"`
		Bytes float64 `json:"io_bytes"`
	}
	var r struct {
		Jobs []struct {
			Read, Write way
			User        float64 `json:"usr_cpu"` // percent of the job's time
			System      float64 `json:"sys_cpu"`
		}
	}
	if err := json.Unmarshal(b, &r); err != nil || len(r.Jobs) != 1 {
		return j, fmt.Errorf("fio's answer: %v", err)
	}
	w := r.Jobs[0].Read
	if rw == "write" {
		w = r.Jobs[0].Write
	} else {
		err = os.Remove(path) // the next round lays it out anew, as ours does
	}
	return fioJob{w.BW / 1e9, (r.Jobs[0].User + r.Jobs[0].System) / 100 * 1e9 / w.BW}, err
}
