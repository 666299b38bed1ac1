package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"slices"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/xpyd/xpyd/internal/datadir"
	"github.com/xpyd/xpyd/internal/fleet"
)

// fileRevoked outlives the router, like the secret.
const fileRevoked = "revoked"

// routerName is a router's name at NATS; workers have their ids.
const routerName = "router"

// revoker keeps the list of revoked members in the data folder and at the embedded NATS. follow
// adds other routers' revocations.
type revoker struct {
	*fleet.Watcher
	data *datadir.Dir
	heed func(revoked []string) error // retires secrets among them
	log  *slog.Logger

	mu   sync.Mutex
	nats *fleet.Server // nil with an external one
	kept []fleet.Revocation
}

func readRevoked(data *datadir.Dir) (list []fleet.Revocation, err error) {
	text, err := data.Read(fileRevoked)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &list)
	}
	if err != nil {
		return nil, fmt.Errorf("%s/%s: %w; put it back, or remove it: nobody is revoked then", data.Path(), fileRevoked, err)
	}
	return list, nil
}

// Revoke implements console.Revoker.
func (r *revoker) Revoke(id string) error { return r.after(r.Watcher.Revoke(id)) }

// Unrevoke implements console.Revoker.
func (r *revoker) Unrevoke(id string) error { return r.after(r.Watcher.Unrevoke(id)) }

func (r *revoker) after(err error) error {
	if err != nil {
		return err
	}
	if err := r.keep(); err != nil {
		return fmt.Errorf("it holds now, but not after a restart of the router: %w", err)
	}
	return nil
}

// host names the embedded NATS, which the next keep tells everything; nil: there is none.
func (r *revoker) host(nats *fleet.Server) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.nats, r.kept = nats, nil
}

// keep writes a changed list and applies it to NATS.
func (r *revoker) keep() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	list := r.Revocations()
	if slices.Equal(list, r.kept) {
		return nil
	}
	errs := []error{r.heed(r.Snapshot().Revoked)}
	if r.nats != nil {
		names := slices.DeleteFunc(slices.Clone(r.Snapshot().Revoked), func(id string) bool { return id == routerName })
		errs = append(errs, r.nats.Revoke(names))
	}
	text, err := json.Marshal(list)
	if err == nil {
		err = r.data.Write(fileRevoked, append(text, '\n'))
	}
	if err == nil {
		r.kept = list
	}
	return errors.Join(append(errs, err)...)
}

// follow stores other routers' revocations until ctx ends.
func (r *revoker) follow(ctx context.Context) {
	for version := uint64(0); ; {
		s, err := r.Wait(ctx, version)
		if err != nil {
			return
		}
		version = s.Version
		if err := r.keep(); err != nil {
			r.log.Error("revocations are not kept", "err", err)
		}
	}
}

const stillKnows = `Whoever is at that machine still knows the fleet's secret, and can come back under
another name: replace the secret with ` + "`xpyd secret rotate`" + `, give the new join line to all
others, and end the older one with ` + "`xpyd secret retire`" + `.`

func newRevoke() *cobra.Command {
	return adminCommand(&cobra.Command{
		Use: "revoke [ID]", Short: "Shut a worker out of the fleet; without an ID, list the revoked ones",
		Long: `Shut a worker out of the fleet, by its ID: its running requests end, and no router and
no worker hears it or talks to it any more, even after routers restart.

` + stillKnows,
		Example: "  xpyd revoke decode-3\n  xpyd revoke",
		Args:    cobra.MaximumNArgs(1),
	}, func(cmd *cobra.Command, admin *adminFlags, args []string) error {
		if len(args) == 0 {
			return admin.listRevoked(cmd)
		}
		return admin.revocation(cmd, "POST", args[0], "revoked\n"+stillKnows)
	})
}

func newUnrevoke() *cobra.Command {
	return adminCommand(&cobra.Command{
		Use: "unrevoke ID", Short: "Let a revoked worker come back",
		Long: `Let a revoked worker come back. One that still runs does so by itself. If the secret
was replaced since, it needs the new join line.`,
		Example: "  xpyd unrevoke decode-3",
		Args:    cobra.ExactArgs(1),
	}, func(cmd *cobra.Command, admin *adminFlags, args []string) error {
		return admin.revocation(cmd, "DELETE", args[0], "not revoked any more")
	})
}

// revocation revokes a member, or takes that back, and prints what was done.
func (a *adminFlags) revocation(cmd *cobra.Command, verb, id, done string) error {
	if err := workerID(id); err != nil {
		return err
	}
	var out struct{ Notes []string }
	err := a.call(cmd.Context(), verb, "/admin/v1/revocations/"+id, nil, &out)
	for _, note := range out.Notes {
		fmt.Fprintln(cmd.ErrOrStderr(), "xpyd: "+note)
	}
	if err == nil {
		_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s: %s\n", id, done)
	}
	return err
}

func (a *adminFlags) listRevoked(cmd *cobra.Command) error {
	var out struct {
		Revoked []struct {
			ID    string
			Since time.Time
		}
	}
	if err := a.call(cmd.Context(), "GET", "/admin/v1/revocations", nil, &out); err != nil {
		return err
	}
	t := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "REVOKED\tSINCE")
	for _, x := range out.Revoked {
		fmt.Fprintf(t, "%s\t%s\n", x.ID, x.Since.Local().Format(time.DateTime))
	}
	return t.Flush()
}
