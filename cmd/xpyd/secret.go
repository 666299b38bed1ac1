package main

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/xpyd/xpyd/internal/datadir"
	"github.com/xpyd/xpyd/internal/trust"
)

func newSecret() *cobra.Command {
	cmd := adminCommand(&cobra.Command{
		Use:   "secret",
		Short: "Show the fleet's secrets by their IDs, and who has which; replace them",
		Long: `A router makes the fleet's secret at its first start and keeps it in its data folder.
Workers have it from their join file. To replace it, rotate, let every join file be
followed or copied, then retire the older one; nothing is restarted. A member without
the new secret is then shut out.`,
		Example: "  xpyd secret\n  xpyd secret rotate\n  xpyd secret retire",
	}, func(cmd *cobra.Command, admin *adminFlags, args []string) error {
		return admin.secret(cmd, "GET", "", nil)
	})
	cmd.AddCommand(newRotate(), newRetire(), newScrapeToken(), newJoinLine())
	return cmd
}

func newRotate() *cobra.Command {
	return adminCommand(&cobra.Command{
		Use: "rotate", Short: "Make a new secret; the older one is accepted beside it until it is retired", Example: "  xpyd secret rotate",
	}, func(cmd *cobra.Command, admin *adminFlags, args []string) error {
		return admin.secret(cmd, "POST", "/rotate", nil)
	})
}

func newRetire() *cobra.Command {
	var force bool
	cmd := adminCommand(&cobra.Command{
		Use: "retire", Short: "End the older secret, once every member has the newer one",
		Example: "  xpyd secret retire\n  xpyd secret retire --force     shuts out members without the newer one",
	}, func(cmd *cobra.Command, admin *adminFlags, args []string) error {
		return admin.secret(cmd, "POST", "/retire", map[string]bool{"force": force})
	})
	cmd.Flags().BoolVar(&force, "force", false, "also if that shuts members out")
	return cmd
}

// secret makes a request about the fleet's secrets and prints their state.
func (a *adminFlags) secret(cmd *cobra.Command, method, path string, in any) error {
	var s secretStatus
	if err := a.call(cmd.Context(), method, "/admin/v1/secret"+path, in, &s); err != nil {
		return err
	}
	t := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "SECRET\t")
	for i, id := range s.Secrets {
		what := "in force"
		switch {
		case i > 0:
			what = "older, accepted until `xpyd secret retire`"
		case s.From != "":
			what += ", from " + s.From
		}
		fmt.Fprintf(t, "%s\t%s\n", id, what)
	}
	fmt.Fprintln(t, "\t\nMEMBER\tHAS")
	for _, m := range s.Members {
		fmt.Fprintf(t, "%s\t%s\n", m.ID, cmp.Or(m.Secrets, "trusts everyone"))
	}
	if len(s.Lacking) > 0 {
		fmt.Fprintf(t, "\t\nwithout %s\t%s\n", s.Secrets[0], strings.Join(s.Lacking, ", "))
	}
	return t.Flush()
}

func newJoinLine() *cobra.Command {
	return &cobra.Command{
		Use:   "new",
		Short: "Print a new join line for workers behind a foreign proxy, without a router of ours",
		Long: `Print a join line with a new secret, without NATS. Workers that are started with it
are in no fleet, but pass KV to each other and trust each other. The proxy in front of
them needs a key of their api_keys_file.`,
		Example: "  (umask 077; xpyd secret new >join)\n  xpyd prefill --join-file join --config prefill.yaml",
		RunE: func(cmd *cobra.Command, args []string) error {
			line := trust.Join{Secrets: []trust.Secret{trust.NewSecret()}}
			_, err := fmt.Fprintln(cmd.OutOrStdout(), line.Reveal())
			return err
		},
	}
}

func newScrapeToken() *cobra.Command {
	var file, data string
	cmd := &cobra.Command{
		Use:   "scrape-token",
		Short: "Print the bearer token with which Prometheus may read workers' /metrics from other hosts",
		Long: `Print the bearer token with which Prometheus may read workers' /metrics from other
hosts. It opens nothing else. A router also keeps it in its data folder, as scrape-token,
for credentials_file; it changes when an older secret is retired.`,
		Example: "  xpyd secret scrape-token\n  xpyd secret scrape-token --join-file /run/user/1000/xpyd/join-url",
		RunE: func(cmd *cobra.Command, args []string) error {
			j, err := readJoining(cmd.Context(), "", file)
			if err != nil {
				return usageError{err}
			}
			if file == "" {
				if j.Join, err = joinOf(data); err != nil {
					return err
				}
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), scrapeToken(j.Secrets))
			return err
		},
	}
	cmd.Flags().StringVar(&file, "join-file", "", "the fleet's join file; default: the one in --data")
	cmd.Flags().StringVar(&data, "data", dataDefault(), "data folder of the router")
	return cmd
}

// joinOf returns the join line in a router's data folder.
func joinOf(data string) (trust.Join, error) {
	if data == "" {
		return trust.Join{}, errNoData
	}
	dir, err := datadir.Open(data)
	if errors.Is(err, fs.ErrNotExist) {
		return trust.Join{}, fmt.Errorf("%w; say where with --data or --join-file", err)
	}
	if err != nil {
		return trust.Join{}, err
	}
	defer dir.Close()
	text, err := dir.Read(fileJoin)
	if err != nil {
		return trust.Join{}, err
	}
	line, err := trust.ParseJoin(string(text))
	if err != nil {
		err = fmt.Errorf("%s/%s: %w; a router writes it again when it starts", dir.Path(), fileJoin, err)
	}
	return line, err
}
