package main

import (
	"fmt"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/xpyd/xpyd/kvconn"
)

// version is set by the linker for releases: -X main.version=v1.2.3.
var version = "dev"

// build names this binary: its version, and the commit when the build knows it.
func build() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" && len(s.Value) >= 12 {
				return version + "+" + s.Value[:12]
			}
		}
	}
	return version
}

func newVersion() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version and the KV protocol range", Example: "  xpyd version", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "xpyd %s, KV protocol %d-%d\n", build(), kvconn.ProtocolMin, kvconn.ProtocolMax)
			return err
		},
	}
}
