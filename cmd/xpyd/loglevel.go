package main

import (
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"github.com/xpyd/xpyd/internal/logbuf"
)

func newLogLevel() *cobra.Command {
	return adminCommand(&cobra.Command{
		Use: "log-level [ID] [debug|info|warn|error]", Short: "Show the level of a log, or change it while the process runs",
		Long: `Show the level of the router's log, or with an ID of a worker's. With a level, change it: until that
process starts again, or somebody changes it back. What changes is in the audit file (audit_file)
whatever the level is.`,
		Example: "  xpyd log-level debug\n  xpyd log-level decode-0 debug\n  xpyd log-level decode-0",
		Args:    cobra.MaximumNArgs(2),
	}, func(cmd *cobra.Command, admin *adminFlags, args []string) error {
		path, of := "/admin/v1/log", "router"
		level := ""
		if n := len(args); n > 0 && slices.Contains(logbuf.Levels(), args[n-1]) {
			level, args = args[n-1], args[:n-1]
		}
		switch {
		case len(args) == 2:
			return usageError{fmt.Errorf("log-level: %q: want debug, info, warn or error", args[1])}
		case len(args) == 1:
			if err := workerID(args[0]); err != nil {
				return err
			}
			path, of = "/admin/v1/instances/"+args[0]+"/log", args[0]
		}
		type body struct {
			Level string `json:"level"`
		}
		var out body
		var err error
		if level == "" {
			err = admin.call(cmd.Context(), "GET", path, nil, &out)
		} else {
			err = admin.call(cmd.Context(), "POST", path, body{level}, &out)
		}
		if err == nil {
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s: %s\n", of, out.Level)
		}
		return err
	})
}
