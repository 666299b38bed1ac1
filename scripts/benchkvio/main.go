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

	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/internal/tier"
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

const (
	unit  = "2MiB"
	depth = 16
)

func run(bin, dir, total string, rounds int, out string) error {
	book, err := figures.Open(out, "kvio")
	if err != nil {
		return err
	}
	defer book.Close()
	var ours, peer [2][]float64 // write, read; GB/s
	for n := range rounds {
		r, err := measured(bin, filepath.Join(dir, "tier"), total)
		if err != nil {
			return err
		}
		var f [2]float64
		for i, rw := range []string{"write", "randread"} {
			if f[i], err = fio(filepath.Join(dir, "fio"), rw, total); err != nil {
				return err
			}
		}
		for i, v := range []float64{r.Write / 1e9, r.Read / 1e9} {
			ours[i], peer[i] = append(ours[i], v), append(peer[i], f[i])
		}
		book.Logf("round %d: write %.3f fio %.3f, read %.3f fio %.3f GB/s", n+1, ours[0][n], peer[0][n], ours[1][n], peer[1][n])
		fmt.Fprintf(os.Stdout, "round %d: write %.3f fio %.3f, read %.3f fio %.3f GB/s\n", n+1, ours[0][n], peer[0][n], ours[1][n], peer[1][n])
	}
	for i, name := range []string{"write", "read"} {
		f := figures.Figure{Name: "hicache.ssd_ratio." + name, Unit: "GB/s", Peer: "fio, io_uring, direct=1, the same size and depth",
			Model: fmt.Sprintf("%s units, %d at a time, %s", unit, depth, total), Command: "scripts/bench-kvio"}
		if err := book.Add(f.Ratios(ours[i], peer[i])); err != nil {
			return err
		}
	}
	return nil
}

func measured(bin, dir, total string) (r tier.Rates, err error) {
	b, err := exec.Command(bin, "bench", "kvio", "--ssd-dir", dir, "--unit", unit, "--total", total, "--depth", fmt.Sprint(depth), "--json").Output()
	if err != nil {
		return r, fmt.Errorf("xpyd bench kvio: %w", err)
	}
	return r, json.Unmarshal(b, &r)
}

// fio runs one job over a file of its own and returns GB/s. The file is laid
// out by the write job and read by the read job.
func fio(path, rw, total string) (float64, error) {
	size := strings.TrimSuffix(total, "iB")
	b, err := exec.Command("fio", "--name=x", "--filename="+path, "--rw="+rw, "--bs=2M", "--size="+size, "--direct=1", "--ioengine=io_uring",
		fmt.Sprintf("--iodepth=%d", depth), "--randrepeat=1", "--fallocate=none", "--unlink=0", "--output-format=json").Output()
	if err != nil {
		return 0, fmt.Errorf("fio %s: %w: %s", rw, err, b)
	}
	var r struct {
		Jobs []struct {
			Read, Write struct {
				BW float64 `json:"bw_bytes"`
			}
		}
	}
	if err := json.Unmarshal(b, &r); err != nil || len(r.Jobs) != 1 {
		return 0, fmt.Errorf("fio's answer: %v", err)
	}
	if rw == "write" {
		return r.Jobs[0].Write.BW / 1e9, nil
	}
	err = os.Remove(path) // the next round lays it out anew, as ours does
	return r.Jobs[0].Read.BW / 1e9, err
}
