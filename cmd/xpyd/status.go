package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router/discover"
	"github.com/xpyd/xpyd/router/flight"
	"github.com/xpyd/xpyd/router/pick"
	"github.com/xpyd/xpyd/router/share"
)

// fleetStatus is what the table needs of GET /admin/v1/instances.
type fleetStatus struct {
	Ready     bool
	Doing     string
	Planner   string
	At        time.Time // the router's clock
	Link      fleet.Link
	Revoked   []string
	Refusals  []fleet.Refusal
	Strangers []discover.Refusal
	Router    string
	Routers   []share.Peer
	Open      bool `json:"trusts_everyone"`
	Instances []instanceStatus
}

type instanceStatus struct {
	fleet.Member
	Probed     bool       `json:"probed"`
	ProbeError string     `json:"probe_error"`
	Embeds     bool       `json:"embeds_only"`
	Draining   bool       `json:"draining"`
	InFlight   pick.Loads `json:"in_flight"`
	ToMove     int        `json:"to_move"`
	Moved      flight.Moved
	Breaker    pick.Guard `json:"breaker"`
}

// get returns the instance with that id, nil if there is none.
func (s *fleetStatus) get(id string) *instanceStatus {
	for i := range s.Instances {
		if s.Instances[i].ID == id {
			return &s.Instances[i]
		}
	}
	return nil
}

// lonely reports whether an engine waits for a partner that only another engine of its dialect
// could be; Refusals are about those that are there. One of our own decodes may mix.
func (s *fleetStatus) lonely(m *instanceStatus) bool {
	return m.Serves() && m.Dialect != fleet.Native && m.Dialect != "" && !m.Alone() &&
		!slices.ContainsFunc(s.Instances, func(o instanceStatus) bool {
			return o.State != fleet.Gone && o.Role != m.Role && o.Dialect == m.Dialect
		})
}

func newStatus() *cobra.Command {
	var watch, asJSON, ledger bool
	cmd := adminCommand(&cobra.Command{
		Use: "status", Short: "Show the fleet: the workers, their state and load",
		Example: "  xpyd status\n  xpyd status --watch\n  xpyd status --json | jq .instances\n  xpyd status --ledger        every ticket and block held, by whom, since when, why",
	}, func(cmd *cobra.Command, admin *adminFlags, args []string) error {
		path, show := "/admin/v1/instances", showFleet
		if ledger {
			path, show = "/debug/ledger?fleet=1", showLedger
		}
		again := func() error {
			var raw json.RawMessage
			if err := admin.call(cmd.Context(), "GET", path, nil, &raw); err != nil {
				return err
			}
			return show(cmd.OutOrStdout(), raw, asJSON)
		}
		if !watch {
			return again()
		}
		return every(cmd.Context(), time.Second, func() error {
			fmt.Fprint(cmd.OutOrStdout(), "\033[H\033[2J")
			return again()
		})
	})
	cmd.Flags().BoolVar(&watch, "watch", false, "again every second")
	cmd.Flags().BoolVar(&asJSON, "json", false, "as JSON")
	cmd.Flags().BoolVar(&ledger, "ledger", false, "what every process holds, oldest first; --json for programs")
	return cmd
}

func showFleet(w io.Writer, raw json.RawMessage, asJSON bool) error {
	if asJSON {
		return printJSON(w, raw)
	}
	var s fleetStatus
	if err := json.Unmarshal(raw, &s); err != nil {
		return err
	}
	if s.At.IsZero() { // from an older router
		s.At = time.Now()
	}
	return s.print(w, s.At)
}

func showLedger(w io.Writer, raw json.RawMessage, asJSON bool) error {
	var f fleetLedger
	if err := json.Unmarshal(raw, &f); err != nil {
		return err
	}
	held := f.lines()
	if asJSON {
		return printJSON(w, held)
	}
	return held.print(w)
}

func printJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// every calls f at once and then each interval, until ctx ends.
func every(ctx context.Context, interval time.Duration, f func() error) error {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		if err := f(); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// pool shows how much of a KV pool is held, and its size if known.
func pool(used float64, bytes int64) string {
	text := fmt.Sprintf("%.0f%%", 100*used)
	switch {
	case bytes >= 1<<30:
		text += fmt.Sprintf(" of %.1f GiB", float64(bytes)/(1<<30))
	case bytes > 0:
		text += fmt.Sprintf(" of %d MiB", max(bytes>>20, 1))
	}
	return text
}

// onCPU reports whether a worker of ours computes on the CPU.
func onCPU(m *fleet.Member) bool { return m != nil && strings.HasPrefix(m.Numerics, "cpu-") }

// shownUUID is how much of a UUID names a part of a GPU where room is short; the list of GPUs has all.
const shownUUID = len("cuda:MIG-01234567")

// deviceName names a GPU in few letters.
func deviceName(d *fleet.Device) string {
	name := plain(cmp.Or(d.Name, d.PCI))
	return name[:min(len(name), shownUUID)]
}

// gpu shows which GPU a worker has and what it reports; missing values are left out.
func gpu(m *fleet.Member) string {
	g := m.Load.GPU
	var parts []string
	for i := range m.Devices {
		if name := deviceName(&m.Devices[i]); name != "" {
			parts = append(parts, name)
		}
	}
	switch {
	case onCPU(m):
		return "cpu"
	case g == (fleet.GPU{}):
		return cmp.Or(strings.Join(parts, " "), "-")
	}
	parts = append(parts, fmt.Sprintf("%.0f%%", 100*g.Busy))
	if g.MemoryTotal > 0 {
		parts = append(parts, fmt.Sprintf("%.0f/%.0f GiB", float64(g.MemoryUsed)/(1<<30), float64(g.MemoryTotal)/(1<<30)))
	}
	if g.Watts > 0 {
		parts = append(parts, fmt.Sprintf("%.0f W", g.Watts))
	}
	if g.Celsius > 0 {
		parts = append(parts, fmt.Sprintf("%.0f °C", g.Celsius))
	}
	return strings.Join(parts, " ")
}

// printGPUs lists the GPUs, and who is on which.
func (s *fleetStatus) printGPUs(w io.Writer) error {
	type place struct {
		machine string
		fleet.Device
	}
	on := map[place][]string{}
	for i := range s.Instances {
		m := &s.Instances[i]
		if m.State == fleet.Dead || m.State == fleet.Gone {
			continue
		}
		for _, d := range m.Devices {
			machine, _, _ := strings.Cut(m.Machine, "/") // whoever is on it
			at := place{machine, d}
			on[at] = append(on[at], m.ID)
		}
	}
	if len(on) == 0 {
		return nil
	}
	all := slices.SortedFunc(maps.Keys(on), func(a, b place) int {
		return cmp.Or(cmp.Compare(a.machine, b.machine), cmp.Compare(len(a.Name), len(b.Name)), // cuda:10 behind cuda:9
			cmp.Compare(a.Name, b.Name), cmp.Compare(a.PCI, b.PCI), cmp.Compare(a.UUID, b.UUID), cmp.Compare(a.Model, b.Model))
	})
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "\nGPU\tMODEL\tUUID\tPCI\tWORKERS")
	known := func(v string) string { return cmp.Or(plain(v), "-") }
	for _, at := range all {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", known(at.Name), known(at.Model), known(at.UUID), known(at.PCI), strings.Join(on[at], ", "))
	}
	return t.Flush()
}

// lapseShown is how long late heartbeats are shown.
const lapseShown = 10 * time.Minute

func (s *fleetStatus) print(w io.Writer, now time.Time) error {
	ready := "ready"
	if !s.Ready {
		ready = "not ready: no live, probed, compatible pair"
	}
	nats := "up"
	if !s.Link.Up {
		nats = fmt.Sprintf("down for %v; the fleet below is what was known then", now.Sub(s.Link.Since).Round(time.Second))
	}
	open := ""
	if s.Open {
		open = "; trusts everyone"
	}
	fmt.Fprintf(w, "%s; nats %s%s\n\n", ready, nats, open)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "ID\tROLE\tSTATE\tFOR\tMODEL\tRUN\tWAIT\tKV\tGPU\tURL\tBUILD\tNOTE")
	for i := range s.Instances {
		m := &s.Instances[i]
		state, notes := string(m.State), []string{m.Reason}
		if m.Draining {
			state += ",draining"
		}
		if m.Serves() && !m.Probed {
			state += ",unprobed"
			notes = append(notes, m.ProbeError)
		}
		if b := m.Breaker; b.State != "" && b.State != pick.Closed {
			state += "," + string(b.State)
			why := b.Why
			if b.Until != nil && b.Until.After(now) {
				why += fmt.Sprintf(", for %v", b.Until.Sub(now).Round(100*time.Millisecond))
			}
			notes = append(notes, why)
		}
		ago := now.Sub(m.Lapsed)
		for _, n := range []struct {
			is   bool
			note string
		}{
			{m.Lapses > 0 && ago < lapseShown, fmt.Sprintf("late heartbeats: %d, last %v ago", m.Lapses, ago.Round(time.Second))},
			{m.Namesake != "", "another process has this id, and is not used: " + m.Namesake},
			{m.ToMove > 0, count(m.ToMove, "stream") + " to move"},
			{m.Moved.Shortage > 0, count(m.Moved.Shortage, "stream") + " moved away: short of KV blocks"},
			{m.Moved.Balance > 0, count(m.Moved.Balance, "stream") + " moved away: slower than its peers"},
			{m.Embeds, "embeds only"},
			{m.Dialect == fleet.Native && m.TP > 1, count(m.TP, "rank")},
			{s.lonely(m), "nobody of its dialect, " + m.Dialect + ", to pair with"},
			{m.KVPaths != "", "kv: " + m.KVPaths},
			{m.Unchecked, "kv.digest: off"},
			{m.Dialect == fleet.Native && m.Secrets == "", "trusts everyone"},
			{m.Convert, "kv.convert: allow"},
		} {
			if n.is {
				notes = append(notes, n.note)
			}
		}
		notes = slices.DeleteFunc(notes, func(n string) bool { return n == "" })
		fmt.Fprintf(t, "%s\t%s\t%s\t%v\t%s\t%d\t%d\t%s\t%s\t%s\t%s\t%s\n", m.ID, m.Role, state, now.Sub(m.Since).Round(time.Second),
			m.Model, m.Load.Running, m.Load.Waiting, pool(m.Load.KVUsed, m.KVBytes), gpu(&m.Member), m.URL, m.Build, strings.Join(notes, "; "))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if err := s.printGPUs(w); err != nil {
		return err
	}
	if s.Doing != "" {
		fmt.Fprintln(w, s.Doing)
	}
	if s.Planner != "" {
		fmt.Fprintln(w, s.Planner)
	}
	for _, r := range s.Routers {
		fmt.Fprintf(w, "router %s: heard %v ago, %d legs in flight to %d workers (this one is %s)\n", r.ID,
			time.Duration(r.SilentMS*float64(time.Millisecond)).Round(time.Millisecond), r.Legs, r.Workers, s.Router)
	}
	if len(s.Revoked) > 0 {
		fmt.Fprintf(w, "revoked: %s\n", strings.Join(s.Revoked, ", "))
	}
	for _, r := range s.Refusals {
		fmt.Fprintf(w, "refused: %s\n", r.String())
	}
	for _, r := range s.Strangers {
		fmt.Fprintf(w, "not added: %s\n", r.String())
	}
	return nil
}
