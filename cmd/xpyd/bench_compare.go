package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/xpyd/xpyd/internal/chart"
	"github.com/xpyd/xpyd/internal/loadgen/report"
)

// mostCompared is how many files are read: each may have some megabytes.
const mostCompared = 64

func newBenchCompare() *cobra.Command {
	var page string
	cmd := &cobra.Command{
		Use:   "compare FILE FILE...",
		Short: "Compare reports of xpyd bench --json: differences with their spread, and a page of plots",
		Long: `Compare runs of xpyd bench with the first one, by the files that its --json wrote: throughput,
percentiles, goodput and failures of the phases that they share, with the spread of each
difference.

Several files of one name, as NAME=FILE, are rounds of one run: the table has their medians,
and the spread is what they differ by, round by round if both runs have as many. Of single
files the spread is what their requests tell of a percentile, which is less than what runs
differ by.`,
		Example: `  xpyd bench compare before.json after.json
  xpyd bench compare before.json after.json other.json --html compare.html
  xpyd bench compare before=b1.json before=b2.json after=a1.json after=a2.json`,
		Args: cobra.ArbitraryArgs,
	}
	cmd.Flags().StringVar(&page, "html", "", "write a page of plots to this file")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		runs, err := comparedRuns(args)
		if err != nil {
			return err
		}
		c, err := report.NewCompare(runs)
		if err != nil {
			return usageError{fmt.Errorf("bench compare: %w", err)}
		}
		if over(page, args) {
			return usageError{fmt.Errorf("--html: %s is one of the files that are compared", page)}
		}
		out, err := createOut(page)
		if err != nil {
			return usageError{fmt.Errorf("--html: %w", err)}
		}
		var text strings.Builder
		if err := c.WriteText(&text); err != nil {
			return err
		}
		for line := range strings.Lines(text.String()) { // names are what the files say
			fmt.Fprintln(cmd.OutOrStdout(), plain(strings.TrimSuffix(line, "\n")))
		}
		return named("bench compare: --html", out.keep(c.WriteHTML))
	}
	return cmd
}

// over reports whether a page would be written over one of the files that are named.
func over(page string, args []string) bool {
	to, err := os.Stat(page)
	if err != nil {
		return false
	}
	return slices.ContainsFunc(args, func(arg string) bool {
		_, path, given := strings.Cut(arg, "=")
		for _, name := range []string{arg, path} {
			if from, err := os.Stat(name); err == nil && os.SameFile(from, to) && (name == arg || given) {
				return true
			}
		}
		return false
	})
}

// comparedRuns reads the files that are named, as FILE or NAME=FILE.
func comparedRuns(args []string) (runs []report.Run, err error) {
	if len(args) < 2 || len(args) > mostCompared {
		return nil, usageError{fmt.Errorf("bench compare: %d files: want 2 to %d that xpyd bench --json wrote", len(args), mostCompared)}
	}
	at := map[string]int{}
	for _, arg := range args {
		name, path, given := strings.Cut(arg, "=")
		if _, err := os.Stat(arg); err == nil || !given {
			name, path, given = strings.TrimSuffix(filepath.Base(arg), ".json"), arg, false
		}
		r, err := readReport(path)
		if err != nil {
			return nil, usageError{fmt.Errorf("bench compare: %s: %w", path, err)}
		}
		i, known := at[name]
		if known && !given {
			name, known = path, false // two files of one name, in two folders
			if _, twice := at[name]; twice {
				return nil, usageError{fmt.Errorf("bench compare: %s: it is there twice", path)}
			}
		}
		if known {
			runs[i].Rounds = append(runs[i].Rounds, r)
			continue
		}
		at[name] = len(runs)
		runs = append(runs, report.Run{Name: name, Rounds: []*report.Report{r}})
	}
	if n := len(runs); n < 2 || n > chart.Colors {
		return nil, usageError{fmt.Errorf("bench compare: %d runs: want 2 to %d with names of their own", n, chart.Colors)}
	}
	return runs, nil
}

func readReport(path string) (*report.Report, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, errors.Unwrap(err)
	}
	defer f.Close()
	return report.Read(f)
}
