package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/supervise"
)

// waiting is --wait and --timeout, for commands that start something.
type waiting struct {
	on      bool
	timeout time.Duration
}

func (w *waiting) register(cmd *cobra.Command, until string) {
	f := cmd.Flags()
	f.BoolVar(&w.on, "wait", false, "wait "+until+"; Ctrl-C ends only the waiting")
	f.DurationVar(&w.timeout, "timeout", 5*time.Minute, "with --wait: fail if it takes longer; 0: never")
	cmd.PreRunE = func(*cobra.Command, []string) error {
		if w.timeout < 0 {
			return usageError{fmt.Errorf("--timeout %v: want 0 or more", w.timeout)}
		}
		return nil
	}
}

const (
	waitLook = 250 * time.Millisecond
	waitTell = time.Second // between lines, at least
)

// until polls pending until nothing is missing, and shows on standard error what is.
func (w *waiting) until(cmd *cobra.Command, what string, pending func(context.Context) (string, error)) error {
	if !w.on {
		return nil
	}
	ctx := cmd.Context()
	if w.timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, w.timeout)
		defer cancel()
	}
	look := time.NewTicker(waitLook)
	defer look.Stop()
	var told, last string
	var at time.Time
	for {
		left, err := pending(ctx)
		switch {
		case ctx.Err() != nil:
		case err != nil:
			return err
		case left == "":
			return nil
		case left != told && time.Since(at) >= waitTell:
			told, at = left, time.Now()
			fmt.Fprintln(cmd.ErrOrStderr(), left)
			fallthrough
		default:
			last = left
		}
		select {
		case <-look.C:
			continue
		case <-ctx.Done():
		}
		last = cmp.Or(last, "nothing was heard")
		if cmd.Context().Err() != nil {
			return fmt.Errorf("no longer waiting: %s; %s goes on", last, what)
		}
		return fmt.Errorf("not done in %v: %s; %s goes on", w.timeout, last, what)
	}
}

// scaling is what `xpyd scale` waits for.
type scaling struct {
	changes map[string]supervise.Scaled
	skip    map[string]bool // workers that stay drained
}

// tell prints the changes, by role.
func (s *scaling) tell(w io.Writer, want map[string]int, f *fleetStatus) {
	for _, role := range []string{"prefill", "decode"} {
		c, ok := s.changes[role]
		if !ok {
			continue
		}
		if len(c.Added)+len(c.Removed) == 0 {
			fmt.Fprintf(w, "%s: %d already\n", role, want[role])
		}
		for _, id := range c.Added {
			fmt.Fprintf(w, "%s: starting %s\n", role, id)
		}
		for _, id := range c.Removed {
			fmt.Fprintf(w, "%s: draining %s\n", role, id)
		}
		for _, id := range c.Kept {
			if m := f.get(id); m != nil && m.Draining {
				s.skip[id] = true
				fmt.Fprintf(w, "%s: %s counts, but is drained; `xpyd undrain %s` makes it serve\n", role, id, id)
			}
		}
	}
}

// pending returns which new workers do not serve yet, and which removed ones have not ended.
func (s *scaling) pending(ctx context.Context, admin *adminFlags) (string, error) {
	var f fleetStatus
	var workers []supervise.Status
	if err := admin.call(ctx, "GET", "/admin/v1/instances", nil, &f); err != nil {
		return "", err
	}
	if err := admin.call(ctx, "GET", "/admin/v1/workers", nil, &workers); err != nil {
		return "", err
	}
	state := map[string]supervise.State{}
	for _, w := range workers {
		state[w.Name] = w.State
	}
	var left []string
	for _, c := range s.changes {
		for _, id := range slices.Concat(c.Added, c.Kept) {
			m := f.get(id)
			switch st, there := state[id]; {
			case s.skip[id]:
			case !there || st == supervise.Draining || st == supervise.Stopped:
				return "", fmt.Errorf("%s is being ended by somebody else", id)
			case st != supervise.Ready:
				left = append(left, fmt.Sprintf("%s: %s", id, st))
			case m == nil || !m.Serves() || !m.Probed:
				left = append(left, fmt.Sprintf("%s: not probed yet", id))
			}
		}
		for _, id := range c.Removed {
			if _, there := state[id]; there {
				text := id + ": draining"
				if m := f.get(id); m != nil {
					n := max(m.InFlight.Legs, m.Load.Running+m.Load.Waiting) // its load counts choices
					if m.ToMove > 0 {
						n = m.InFlight.Legs
					}
					if n > 0 {
						text += ", " + requests(n, m.ToMove)
					}
				}
				left = append(left, text)
			}
		}
	}
	slices.Sort(left)
	return strings.Join(left, "; "), nil
}

// stillHeld returns what a drained worker still has to finish.
func stillHeld(ctx context.Context, admin *adminFlags, id string) (string, error) {
	var f fleetStatus
	if err := admin.call(ctx, "GET", "/admin/v1/instances", nil, &f); err != nil {
		return "", err
	}
	m := f.get(id)
	if m == nil || m.State == fleet.Gone || m.State == fleet.Dead {
		return "", nil
	}
	if !m.Draining {
		return "", fmt.Errorf("%s is not drained any more: somebody has taken the drain back", id)
	}
	if m.Dialect != fleet.Native { // only the router's own part is known
		if m.InFlight.Legs == 0 {
			return "", nil
		}
		return id + ": " + count(m.InFlight.Legs, "request"), nil
	}
	var l fleetLedger
	if err := admin.call(ctx, "GET", "/debug/ledger?fleet=1", nil, &l); err != nil {
		return "", err
	}
	raw, ok := l.Fleet[id]
	if !ok {
		raw = json.RawMessage(`{}`) // it left between the two requests; the next poll will tell
	}
	var held heldLines
	held.worker(id, raw)
	kinds := map[string]int{}
	for _, line := range held.Lines {
		if line.Kind != "blocks" || line.State != "quarantined" {
			kinds[line.Kind]++
		}
	}
	if kinds["unknown"] > 0 {
		return id + ": does not answer", nil
	}
	kinds["request"] = max(kinds["request"], m.InFlight.Legs)
	var parts []string
	for _, kind := range []string{"request", "ticket", "lease", "link"} {
		if n := kinds[kind]; n > 0 && kind == "request" {
			parts = append(parts, requests(n, m.ToMove))
		} else if n > 0 {
			parts = append(parts, count(n, kind))
		}
	}
	if len(parts) == 0 && kinds["blocks"] > 0 {
		parts = append(parts, "blocks")
	}
	if len(parts) == 0 {
		return "", nil
	}
	return id + ": " + strings.Join(parts, ", "), nil
}

// requests is "3 requests", or "3 requests (2 to move, 1 to end)".
func requests(n, move int) string {
	text := count(n, "request")
	if move = min(n, move); move > 0 {
		text += fmt.Sprintf(" (%d to move, %d to end)", move, n-move)
	}
	return text
}

// count is "1 request" or "2 requests".
func count(n int, what string) string {
	if n != 1 {
		what += "s"
	}
	return fmt.Sprintf("%d %s", n, what)
}
