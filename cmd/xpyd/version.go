package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"github.com/xpyd/xpyd/kvconn"
)

// stamped is set by the linker for releases: -X main.stamped=v1.2.3.
var stamped string

// version is a release's, that of `go install …@VERSION`, or "dev".
func version() string {
	if stamped != "" {
		return stamped
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		return ofModule(info.Main.Version, revision())
	}
	return "dev"
}

// ofModule is the version of a binary without a stamp: that of its module, unless it was built in a
// checkout, whose commit says more.
func ofModule(module, revision string) string {
	if module == "" || module == "(devel)" || revision != "" {
		return "dev"
	}
	return module
}

// build names this binary: its version, and its commit if known.
func build() string {
	if rev := revision(); len(rev) >= 12 {
		return version() + "+" + rev[:12]
	}
	return version()
}

// revision is the commit of this binary, "" if unknown.
func revision() string { return stamp("vcs.revision") }

// stamp is what the compiler noted of the checkout, "" if it was none.
func stamp(key string) string {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == key {
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
	var asJSON bool
	cmd := &cobra.Command{
		Use: "version", Short: "Print the version and the KV protocol range", Example: "  xpyd version\n  xpyd version --json    with the commit, its time, and what it was built by and for",
		RunE: func(cmd *cobra.Command, args []string) error {
			if asJSON {
				return printJSON(cmd.OutOrStdout(), map[string]any{
					"version": version(), "commit": revision(), "commit_time": stamp("vcs.time"), "modified": stamp("vcs.modified") == "true",
					"go": runtime.Version(), "platform": runtime.GOOS + "/" + runtime.GOARCH,
					"kv_protocol_min": kvconn.ProtocolMin, "kv_protocol_max": kvconn.ProtocolMax,
				})
			}
			_, err := fmt.Fprint(cmd.OutOrStdout(), versionLine())
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "as JSON, with all that is known of the build")
	return cmd
}

func buildInfo() prometheus.Collector {
	g := prometheus.NewGauge(prometheus.GaugeOpts{Name: "xpyd_build_info", Help: "1, with the build in its labels.",
		ConstLabels: prometheus.Labels{"version": version(), "revision": revision(), "go": runtime.Version()}})
	g.Set(1)
	return g
}
