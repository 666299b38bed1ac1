package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/tier"
)

// newBenchKVIO is `xpyd bench kvio`: how fast KV goes to an SSD and back.
func newBenchKVIO() *cobra.Command {
	var dir, by string
	var unitText, totalText string
	var depth int
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "kvio --ssd-dir DIR",
		Short: "Measure the SSD tier: units written and read in random order",
		Long: `Writes units through an SSD tier as a worker does (--kv-ssd-dir), then reads them
in random order, headers checked, past the page cache where the file system
allows. The folder must be empty or new; its files are deleted at the end. A unit
is what 16 tokens need: 2 MiB for a model of Llama 3 8B's shape in bf16.
scripts/bench-kvio runs it beside fio.`,
		Example: "  xpyd bench kvio --ssd-dir /var/cache/xpyd-bench\n  xpyd bench kvio --ssd-dir /mnt/nvme/x --unit 256KiB --total 16GiB --depth 32 --json",
		Args:    cobra.NoArgs,
	}
	f := cmd.Flags()
	f.StringVar(&dir, "ssd-dir", "", "a folder for this alone")
	f.StringVar(&unitText, "unit", "2MiB", "bytes of a unit, a multiple of 4 KiB")
	f.StringVar(&totalText, "total", "4GiB", "bytes to write, and to read")
	f.IntVar(&depth, "depth", 16, "writes, and reads, at a time")
	f.StringVar(&by, "io", string(tier.IOAuto), "auto, io_uring or pread, as kv.ssd_io")
	f.BoolVar(&asJSON, "json", false, "print JSON")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if dir == "" {
			return usageError{errors.New("--ssd-dir is missing: a folder for this alone")}
		}
		if !slices.Contains([]tier.IO{tier.IOAuto, tier.IOUring, tier.IOPread}, tier.IO(by)) {
			return usageError{fmt.Errorf("--io %q: want auto, io_uring or pread", by)}
		}
		unit, err := config.ParseSize(unitText)
		if err != nil {
			return usageError{fmt.Errorf("--unit: %w", err)}
		}
		total, err := config.ParseSize(totalText)
		if err != nil {
			return usageError{fmt.Errorf("--total: %w", err)}
		}
		r, err := tier.MeasureDisk(cmd.Context(), dir, int(unit), int64(total), depth, tier.IO(by))
		if err != nil {
			return fmt.Errorf("bench kvio: %w", err)
		}
		if asJSON {
			return json.NewEncoder(cmd.OutOrStdout()).Encode(r)
		}
		_, err = fmt.Fprintf(cmd.OutOrStdout(), "%d units of %v, %d at a time by %s: write %.2f GB/s, read in random order %.2f GB/s; processor time %.2f and %.2f s a GB\n",
			r.Units, unit, r.Depth, r.IO, r.Write/1e9, r.Read/1e9, r.WriteCPU, r.ReadCPU)
		return err
	}
	return cmd
}
