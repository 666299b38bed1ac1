package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/worker"
)

// fleetLedger is the response of GET /debug/ledger?fleet=1: what the router and each worker hold.
type fleetLedger struct {
	Process  string
	At       time.Time
	Requests []struct {
		ID       string    `json:"request_id"`
		State    string    `json:"state"`
		Since    time.Time `json:"since"`
		Path     string    `json:"path"`
		Internal bool      `json:"internal"`
		Attempts []struct {
			Prefill, Decode struct{ ID string }
		}
	}
	Legs, Running, Waiting int
	Fleet                  map[string]json.RawMessage
}

// line is one thing that one process holds.
type line struct {
	Process string    `json:"process"`
	Kind    string    `json:"kind"` // "request", "ticket", "blocks", "lease", "link"; "unknown" when the process did not answer
	ID      string    `json:"id"`   // of the request, lease or link
	State   string    `json:"state"`
	Since   time.Time `json:"since"`
	Age     float64   `json:"age_s"`
	Blocks  int       `json:"blocks"`
	Missing int       `json:"missing"` // blocks of a layer that a ticket still moves
	Peer    string    `json:"peer,omitempty"`
	Why     string    `json:"why"`
}

// heldLines is everything that the fleet holds, oldest first.
type heldLines struct {
	At          time.Time `json:"at"`
	Lines       []line    `json:"lines"`
	Quarantined int       `json:"quarantined_blocks"`
	Leased      int       `json:"leased_blocks"`
}

// lines flattens the ledgers of all processes. A process that did not answer also gets a line.
func (f *fleetLedger) lines() *heldLines {
	out := &heldLines{At: f.At, Lines: []line{}}
	for _, q := range f.Requests {
		if q.Internal {
			continue // a probe, or this request
		}
		l := line{Process: f.Process, Kind: "request", ID: q.ID, State: q.State, Since: q.Since, Why: "a client waits for its answer to " + q.Path}
		if n := len(q.Attempts); n > 0 {
			l.Peer = q.Attempts[n-1].Prefill.ID + ", " + q.Attempts[n-1].Decode.ID
		}
		out.Lines = append(out.Lines, l)
	}
	for id, raw := range f.Fleet {
		out.worker(id, raw)
	}
	for i := range out.Lines {
		if l := &out.Lines[i]; !l.Since.IsZero() {
			l.Age = max(0, out.At.Sub(l.Since).Seconds())
		}
	}
	slices.SortFunc(out.Lines, func(a, b line) int {
		return cmp.Or(cmp.Compare(b.Age, a.Age), cmp.Compare(a.Process, b.Process), cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.ID, b.ID), cmp.Compare(a.State, b.State))
	})
	return out
}

// worker adds one worker's ledger.
func (h *heldLines) worker(id string, raw json.RawMessage) {
	var w struct {
		worker.Ledger
		Error *struct{ Message string } `json:"error"`
	}
	err := json.Unmarshal(raw, &w)
	switch {
	case err == nil && w.Error != nil:
		err = fmt.Errorf("%s", w.Error.Message)
	case err == nil && w.Blocks == nil:
		err = fmt.Errorf("it keeps no ledger")
	}
	if err != nil {
		h.Lines = append(h.Lines, line{Process: id, Kind: "unknown", State: "unknown", Why: err.Error()})
		return
	}
	for _, r := range w.Requests {
		h.Lines = append(h.Lines, line{Process: id, Kind: "request", ID: r.ID, State: r.State, Since: r.Since, Why: r.Why})
	}
	for _, b := range w.Blocks {
		if b.State == kvcache.StateQuarantined {
			h.Quarantined += len(b.Blocks)
		}
		h.Lines = append(h.Lines, line{Process: id, Kind: "blocks", ID: b.Owner, State: b.State, Since: b.Since, Blocks: len(b.Blocks), Why: b.Why})
	}
	for _, t := range w.Tickets {
		to := "to "
		if t.Side == kvconn.SideReceiver {
			to = "from "
		}
		h.Lines = append(h.Lines, line{Process: id, Kind: "ticket", ID: t.RequestID, State: t.State, Since: t.Since, Blocks: t.Blocks, Missing: t.Missing,
			Peer: to + t.Peer.String(), Why: t.Why})
	}
	for _, e := range w.Held {
		kind := "lease"
		if e.Kind == "awaited" || e.Kind == "linked" {
			kind = "link"
		}
		if e.Kind == "leased" {
			h.Leased += e.Blocks
		}
		h.Lines = append(h.Lines, line{Process: id, Kind: kind, ID: e.ID, State: e.Kind, Since: e.Since, Blocks: e.Blocks, Why: e.Why})
	}
}

func (h *heldLines) print(w io.Writer) error {
	if len(h.Lines) == 0 {
		_, err := fmt.Fprintln(w, "nothing is held")
		return err
	}
	fmt.Fprintf(w, "%d held; %d blocks quarantined, %d leased\n\n", len(h.Lines), h.Quarantined, h.Leased)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "AGE\tPROCESS\tKIND\tID\tSTATE\tBLOCKS\tMISSING\tPEER\tWHY")
	count := func(n int) string {
		if n == 0 {
			return "-"
		}
		return fmt.Sprint(n)
	}
	for _, l := range h.Lines {
		age := "-"
		if !l.Since.IsZero() {
			age = (time.Duration(l.Age*1e3) * time.Millisecond).String()
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", age, l.Process, l.Kind, cmp.Or(l.ID, "-"), l.State, count(l.Blocks), count(l.Missing),
			cmp.Or(l.Peer, "-"), plain(l.Why))
	}
	return t.Flush()
}

// plain keeps a text from another process on one line, and from steering the terminal.
func plain(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) { // controls, and what turns the direction of writing
			return ' '
		}
		return r
	}, s)
}
