package main

import (
	"fmt"
	"net/url"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
)

// requestID is what the ID of a request may consist of.
const requestID = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-"

// newTrace is `xpyd trace`: where a request's time went.
func newTrace() *cobra.Command {
	var asJSON bool
	var most int
	cmd := adminCommand(&cobra.Command{
		Use: "trace [REQUEST]", Short: "Show where the time of a request went, or list the latest requests",
		Long: `Draw the times of a request that runs or ended lately: admission, choice of a pair, prefill,
decode, first token, and each attempt with its worker. Without REQUEST the latest requests
are listed. REQUEST is what the answer's X-Request-Id says.`,
		Example: "  xpyd trace\n  xpyd trace req-5f1c2a\n  xpyd trace req-5f1c2a --json",
		Args:    cobra.MaximumNArgs(1),
	}, func(cmd *cobra.Command, admin *adminFlags, args []string) error {
		if most < 1 {
			return usageError{fmt.Errorf("-n %d: want at least 1", most)}
		}
		format := url.Values{"format": {"text"}}
		if asJSON {
			format.Set("format", "json")
		}
		path := "/debug/requests"
		if len(args) == 1 {
			if id := args[0]; strings.Trim(id, ".") == "" || strings.Trim(id, requestID) != "" {
				return usageError{fmt.Errorf("%q is no request's ID", id)}
			}
			path += "/" + url.PathEscape(args[0])
		} else {
			format.Set("n", strconv.Itoa(most))
		}
		text, err := admin.ask(cmd.Context(), "GET", path+"?"+format.Encode(), nil)
		if err != nil {
			return err
		}
		if n := len(text); n == 0 || text[n-1] != '\n' {
			text = append(text, '\n')
		}
		_, err = cmd.OutOrStdout().Write(text)
		return err
	})
	cmd.Flags().BoolVar(&asJSON, "json", false, "as JSON")
	cmd.Flags().IntVarP(&most, "number", "n", 20, "without REQUEST: how many, the newest first")
	return cmd
}
