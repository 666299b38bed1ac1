package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"github.com/xpyd/xpyd/kvconn"
)

// version is set by the linker for releases: -X main.version=v1.2.3.
var version = "dev"

// build names this binary: its version, and its commit if known.
func build() string {
	if rev := revision(); len(rev) >= 12 {
		return version + "+" + rev[:12]
	}
	return version
}

// revision is the commit of this binary, "" if unknown.
func revision() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				return s.Value
			}
		}
	}
	return ""
}

// versionLine is what `xpyd version` and `xpyd --version` print.
func versionLine() string {
	return fmt.Sprintf("xpyd %s, KV protocol %d-%d\n", build(), kvconn.ProtocolMin, kvconn.ProtocolMax)
}

func newVersion() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version and the KV protocol range", Example: "  xpyd version",
		RunE: func(cmd *cobra.Command, args []string) error {
			_, err := fmt.Fprint(cmd.OutOrStdout(), versionLine())
			return err
		},
	}
}

func buildInfo() prometheus.Collector {
	g := prometheus.NewGauge(prometheus.GaugeOpts{Name: "xpyd_build_info", Help: "1, with the build in its labels.",
		ConstLabels: prometheus.Labels{"version": version, "revision": revision(), "go": runtime.Version()}})
	g.Set(1)
	return g
}
