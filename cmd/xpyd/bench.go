package main

import (
	"github.com/spf13/cobra"
)

// newBench is `xpyd bench` and what belongs to it, one file a subcommand.
func newBench() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "bench",
		Short:   "Drive load and report",
		Example: "  xpyd bench --help",
		Args:    cobra.NoArgs,
		RunE:    func(cmd *cobra.Command, args []string) error { return cmd.Help() },
	}
	cmd.AddCommand(benchCommands()...)
	for _, c := range cmd.Commands() {
		c.Args = usageArgs(c.Args)
	}
	return cmd
}

// benchCommands are the subcommands of bench. Each sets Args, as those of the
// root do, and has an example that begins with its whole name.
func benchCommands() []*cobra.Command {
	return []*cobra.Command{newBenchKV()}
}
