package prefill_test

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/handoff"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/prefill"
)

// TestRooms: a room is claimed once, by the prompt and the salt that it was filled with, and nobody
// waits for one that is over.
func TestRooms(t *testing.T) {
	p := tokens(4, 10)
	const id = prefill.EarlyRoom + "7"
	at := func(r *rig, most time.Duration, what func()) {
		r.t.Helper()
		began := time.Now()
		if what(); time.Since(began) != most {
			r.t.Errorf("after %v, want %v", time.Since(began), most)
		}
	}
	bubble(t, nil, nil, func(r *rig) { // asked twice
		in := r.send(claim(id, p))
		if _, err := r.keep(id, p); err != nil {
			r.t.Error(err)
		}
		r.gets(in, ticket.Done, "")
		at(r, 0, func() { r.gets(r.send(claim(id, p)), ticket.Late, "has ended") })
	})
	bubble(t, nil, nil, func(r *rig) { // never asked
		if _, err := r.keep(id, p); err != nil {
			r.t.Error(err)
		}
		time.Sleep(29 * time.Second)
		if l := r.Ledger(); len(l) != 1 || l[0].Kind != "leased" {
			r.t.Errorf("%+v", l)
		}
		time.Sleep(time.Second)
		r.empty()
		at(r, 0, func() { r.gets(r.send(claim(id, p)), ticket.Late, "has ended") })
	})
	bubble(t, nil, nil, func(r *rig) { // of nobody, which may come yet
		at(r, 10*time.Second, func() { r.gets(r.send(claim(id, p)), ticket.Late, "no prompt") })
		if _, err := r.keep(id, p); err != nil { // and comes
			r.t.Error(err)
		}
		r.gets(r.send(claim(id, p)), ticket.Done, "")
	})
	bubble(t, nil, nil, func(r *rig) { // whose prompt cannot come any more
		in := r.send(claim(id, p))
		synctest.Wait()
		r.Lapse()
		at(r, 0, func() {
			r.gets(in, ticket.NoSpace, "is closed")
			r.gets(r.send(claim(prefill.EarlyRoom+"8", p)), ticket.NoSpace, "is closed")
		})
	})
	bubble(t, nil, nil, func(r *rig) { // of another tenant
		q := &engine.Request{ID: "keep", Prompt: p, Salt: "a", Logprobs: -1, PromptLogprobs: -1}
		for i, c := range []struct {
			salt string
			want ticket.Outcome
		}{{"b", ticket.Refused}, {"", ticket.Refused}, {"a", ticket.Done}} {
			room := fmt.Sprint(prefill.EarlyRoom, i)
			if _, err := r.Keep(r.t.Context(), q, room); err != nil {
				r.t.Error(err)
			}
			s := claim(room, p)
			s.First = order(func(o *handoff.Order) { o.Salt = c.salt })
			r.gets(r.send(s), c.want, "cache_salt")
		}
	})
	bubble(t, nil, nil, func(r *rig) { // whose order cannot be read
		if _, err := r.keep(id, p); err != nil {
			r.t.Error(err)
		}
		s := claim(id, p)
		s.First = []byte("{")
		r.gets(r.send(s), ticket.Refused, "read order")
	})
}

// TestLeaseMetrics: what is held is told by what names it, and how each ended.
func TestLeaseMetrics(t *testing.T) {
	p := tokens(4, 10)
	reg := prometheus.NewRegistry()
	shows := func(r *rig, name, want string) {
		r.t.Helper()
		synctest.Wait()
		families, err := reg.Gather()
		if err != nil {
			r.t.Fatal(err)
		}
		var got []string
		for _, f := range families {
			for _, m := range f.Metric {
				labels := ""
				for _, l := range m.Label {
					labels += l.GetValue() + " "
				}
				if v := m.GetGauge().GetValue() + m.GetCounter().GetValue(); f.GetName() == name && v != 0 {
					got = append(got, fmt.Sprint(labels, v))
				}
			}
		}
		if s := strings.Join(got, ", "); s != want {
			r.t.Errorf("%s: %s, want %s", name, s, want)
		}
	}
	bubble(t, func(c *prefill.Config) {
		var err error
		if c.Metrics, err = prefill.NewMetrics(reg); err != nil {
			t.Fatal(err)
		}
	}, nil, func(r *rig) {
		for _, id := range []string{prefill.EarlyRoom + "1", prefill.EarlyRoom + "2", prefill.EarlyClaim + "1", ""} {
			if _, err := r.keep(id, p); err != nil {
				r.t.Fatal(err)
			}
		}
		waits := r.send(claim(prefill.EarlyRoom+"3", p))
		shows(r, "xpyd_prefill_leases", "bootstrap_room 3, kv_transfer_params 1, transfer_id 1")
		r.gets(r.send(claim(prefill.EarlyRoom+"1", p)), ticket.Done, "")
		r.gets(waits, ticket.Late, "no prompt")
		time.Sleep(time.Minute)
		if _, err := r.keep(prefill.EarlyRoom+"4", make([]int32, 4096)); err == nil {
			r.t.Error("kept what no pool holds")
		}
		time.Sleep(time.Minute)
		shows(r, "xpyd_prefill_leases", "")
		shows(r, "xpyd_prefill_leases_total", "bootstrap_room expired 1, bootstrap_room failed 1, bootstrap_room given_up 1, bootstrap_room taken 1, kv_transfer_params expired 1, transfer_id expired 1")
	})
	if _, err := prefill.NewMetrics(reg); err == nil {
		t.Error("registered twice")
	}
	if problems, err := testutil.GatherAndLint(reg); err != nil || len(problems) > 0 {
		t.Errorf("%+v, %v", problems, err)
	}
}
