package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// farthest is the number of edits from which on a name is no longer taken for a slip.
const farthest = 3

// meant returns " (did you mean …?)" with the one of names that is nearest to wrong, or "" if none
// is near.
func meant(wrong string, names []string) string {
	best, at := "", min(farthest, len(wrong))
	for _, name := range names {
		d := edits(strings.ToLower(wrong), name)
		if strings.HasPrefix(name, wrong) {
			d = min(d, 1)
		}
		if d < at {
			best, at = name, d
		}
	}
	if best == "" {
		return ""
	}
	return fmt.Sprintf(" (did you mean %s?)", best)
}

// edits is the Levenshtein distance of two words, in bytes.
func edits(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			change := diagonal
			if a[i] != b[j] {
				change++
			}
			diagonal = row[j+1]
			row[j+1] = min(change, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

// meantFlag adds to the error of an unknown flag which one may have been meant.
func meantFlag(cmd *cobra.Command, err error) error {
	wrong, found := strings.CutPrefix(err.Error(), "unknown flag: --")
	if !found {
		return err
	}
	var names []string
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if !f.Hidden {
			names = append(names, "--"+f.Name)
		}
	})
	return fmt.Errorf("%w%s", err, meant("--"+wrong, names))
}

// meantCommand says which command below parent may have been meant.
func meantCommand(parent *cobra.Command, wrong string) string {
	var names []string
	for _, c := range parent.Commands() {
		if c.IsAvailableCommand() {
			names = append(names, c.Name())
		}
	}
	slices.Sort(names)
	return meant(wrong, names)
}
