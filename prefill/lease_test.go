package prefill_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/handoff"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/prefill"
)

// ---- leases

func (r *rig) keep(id string, prompt []int32) (*prefill.Kept, error) {
	return r.Keep(r.t.Context(), &engine.Request{ID: "keep", Prompt: prompt, Logprobs: -1, PromptLogprobs: -1}, id)
}

func claim(id string, prompt []int32) kvconn.TicketSpec {
	s := spec(prompt)
	s.LeaseID = id
	return s
}

func TestLease(t *testing.T) {
	p := tokens(4, 10)
	bubble(t, nil, nil, func(r *rig) {
		k, err := r.keep("", p)
		if err != nil || len(k.First) != 1 || k.Info.Tokens != 10 || len(k.Blocks) != 3 || k.First[0].Finish == "" {
			r.t.Fatalf("%+v, %v", k, err)
		}
		if l := r.Ledger(); len(l) != 1 || l[0].Kind != "leased" || l[0].Blocks != 3 || l[0].ID != k.ID {
			r.t.Errorf("%+v", l)
		}
		time.Sleep(29 * time.Second)
		s := claim(k.ID, p)
		in := r.send(s)
		d := r.gets(in, ticket.Done, "")
		if c, err := in.Wait(r.t.Context()); err != nil || c.Units != 6 || len(d.First) != 0 || len(s.Sink.(*sink).rows) != 6 {
			r.t.Errorf("%+v, %d blocks: %+v, %v", d, len(s.Sink.(*sink).rows), c, err)
		}
		r.gets(r.send(claim(k.ID, p)), ticket.Late, "has ended") // once
	})
	bubble(t, nil, nil, func(r *rig) { // expired
		k, err := r.keep("", p)
		if err != nil {
			r.t.Fatal(err)
		}
		time.Sleep(30 * time.Second)
		r.empty()
		r.gets(r.send(claim(k.ID, p)), ticket.Late, "has ended")
	})
	bubble(t, nil, nil, func(r *rig) { // of another prompt
		k, err := r.keep("", p)
		if err != nil {
			r.t.Fatal(err)
		}
		r.gets(r.send(claim(k.ID, tokens(5, 10))), ticket.Refused, "another prompt")
	})
	bubble(t, nil, nil, func(r *rig) { // a claim that ended before it was looked at is none
		k, err := r.keep("", p)
		if err != nil {
			r.t.Fatal(err)
		}
		r.slow = make(chan struct{})
		in := r.send(claim(k.ID, p))
		synctest.Wait()
		if err := in.Revoke(r.t.Context()); err != nil {
			r.t.Fatal(err)
		}
		synctest.Wait()
		close(r.slow)
		synctest.Wait()
		r.gets(r.send(claim(k.ID, p)), ticket.Done, "")
	})
	bubble(t, func(c *prefill.Config) { c.MaxLeases = 2 }, nil, func(r *rig) { // bounded; Close gives all back
		for range 2 {
			if _, err := r.keep("", p); err != nil {
				r.t.Fatal(err)
			}
		}
		if _, err := r.keep("", p); !errors.Is(err, prefill.ErrTooManyLeases) {
			r.t.Error(err)
		}
		r.Close()
		r.empty()
		if _, err := r.keep("", p); !errors.Is(err, engine.ErrClosed) {
			r.t.Error(err)
		}
	})
	bubble(t, nil, nil, func(r *rig) { // Idle waits for the last one
		k, err := r.keep("", p)
		if err != nil {
			r.t.Fatal(err)
		}
		idle := make(chan error, 1)
		go func() { idle <- r.Idle(r.t.Context()) }()
		synctest.Wait()
		if len(idle) > 0 {
			r.t.Error("idle with a lease")
		}
		r.gets(r.send(claim(k.ID, p)), ticket.Done, "")
		if err := <-idle; err != nil {
			r.t.Error(err)
		}
	})
}

// TestRenew: a lease lives for as long as somebody wants it, and no longer than it
// may in all.
func TestRenew(t *testing.T) {
	p := tokens(4, 10)
	bubble(t, func(c *prefill.Config) { c.MaxLease = 100 * time.Second }, nil, func(r *rig) {
		k, err := r.keep("", p)
		if err != nil {
			r.t.Fatal(err)
		}
		if l := r.Ledger(); len(l) != 1 || strings.Contains(l[0].Why, "renewed") {
			r.t.Errorf("%+v", l)
		}
		for i, want := range []time.Duration{30, 30, 30, 20} {
			time.Sleep(20 * time.Second)
			left, most, err := r.Renew(k.ID)
			if all := time.Duration(80-20*i) * time.Second; err != nil || left != want*time.Second || most != all {
				r.t.Errorf("renewed %d times: %v and %v left, %v", i+1, left, most, err)
			}
		}
		if l := r.Ledger(); len(l) != 1 || l[0].Kind != "leased" || !strings.Contains(l[0].Why, "renewed 4 times") {
			r.t.Errorf("%+v", l)
		}
		time.Sleep(20 * time.Second)
		synctest.Wait()
		r.empty()
		if _, _, err := r.Renew(k.ID); !errors.Is(err, prefill.ErrNoLease) {
			r.t.Error(err)
		}
		r.gets(r.send(claim(k.ID, p)), ticket.Late, "has ended")
	})
	bubble(t, nil, nil, func(r *rig) { // what is renewed is still collected, once
		k, err := r.keep("", p)
		if err != nil {
			r.t.Fatal(err)
		}
		time.Sleep(29 * time.Second)
		if _, _, err := r.Renew(k.ID); err != nil {
			r.t.Error(err)
		}
		time.Sleep(29 * time.Second)
		r.gets(r.send(claim(k.ID, p)), ticket.Done, "")
		if _, _, err := r.Renew(k.ID); !errors.Is(err, prefill.ErrNoLease) {
			r.t.Error(err)
		}
	})
	bubble(t, nil, nil, func(r *rig) { // a claim without a prompt is no lease
		in := r.send(claim(prefill.EarlyClaim+"1", p))
		synctest.Wait()
		if _, _, err := r.Renew(prefill.EarlyClaim + "1"); !errors.Is(err, prefill.ErrNoLease) {
			r.t.Error(err)
		}
		r.gets(in, ticket.Late, "no prompt")
	})
}

// TestEarlyClaim: decode may ask before prefill was asked.
func TestEarlyClaim(t *testing.T) {
	p := tokens(4, 10)
	const id = prefill.EarlyClaim + "1"
	bubble(t, nil, nil, func(r *rig) {
		in := r.send(claim(id, p))
		time.Sleep(9 * time.Second)
		if _, err := r.keep(id, p); err != nil {
			r.t.Error(err)
		}
		r.gets(in, ticket.Done, "")
	})
	bubble(t, nil, nil, func(r *rig) { // and no prompt comes
		began := time.Now()
		r.gets(r.send(claim(id, p)), ticket.Late, "no prompt")
		if d := time.Since(began); d != 10*time.Second {
			r.t.Errorf("after %v", d)
		}
	})
	bubble(t, nil, nil, func(r *rig) { // there is one claim
		in := r.send(claim(id, p))
		synctest.Wait()
		r.gets(r.send(claim(id, p)), ticket.Refused, "claimed already")
		if _, err := r.keep(id, p); err != nil {
			r.t.Error(err)
		}
		r.gets(in, ticket.Done, "")
	})
	bubble(t, nil, nil, func(r *rig) { // and one prompt
		if _, err := r.keep(id, p); err != nil {
			r.t.Error(err)
		}
		if _, err := r.keep(id, p); !errors.Is(err, prefill.ErrLeaseExists) {
			r.t.Error(err)
		}
		r.gets(r.send(claim(id, p)), ticket.Done, "")
	})
	bubble(t, nil, func(*kernels.Step) error { return errors.New("broken") }, func(r *rig) { // the prompt fails
		before := r.send(claim(id, p))
		synctest.Wait()
		if _, err := r.keep(id, p); err == nil {
			r.t.Error("kept")
		}
		r.gets(before, ticket.Dead, "broken")
		const later = prefill.EarlyClaim + "2"
		if _, err := r.keep(later, p); err == nil {
			r.t.Error("kept")
		}
		if err := r.Idle(r.t.Context()); err != nil {
			r.t.Error(err)
		}
		r.gets(r.send(claim(later, p)), ticket.Dead, "broken") // told at once
	})
	failing := true
	bubble(t, func(c *prefill.Config) { c.MaxLeases = 2 }, func(*kernels.Step) error {
		if failing {
			return errors.New("broken")
		}
		return nil
	}, func(r *rig) { // what has failed takes nobody's place
		for i := range 5 {
			if _, err := r.keep(fmt.Sprint(prefill.EarlyClaim, i), p); err == nil || errors.Is(err, prefill.ErrTooManyLeases) {
				r.t.Error(err)
			}
		}
		failing = false
		k, err := r.keep("", p)
		if err != nil {
			r.t.Fatal(err)
		}
		r.gets(r.send(claim(k.ID, p)), ticket.Done, "")
	})
	synctest.Test(t, func(t *testing.T) { // the claim leaves
		onStep, release := hold()
		r := newRig(t, nil, onStep)
		in := r.send(claim(id, p))
		kept := make(chan error, 1)
		go func() { _, err := r.keep(id, p); kept <- err }()
		time.Sleep(20 * time.Second) // longer than a claim waits for its prompt to come
		if l := r.Ledger(); len(l) != 1 || l[0].Kind != "leasing" {
			t.Errorf("%+v", l)
		}
		if err := in.Revoke(t.Context()); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		release()
		if err := <-kept; err == nil {
			t.Error("kept for a claim that has left")
		}
		r.empty()
		r.close()
	})
	synctest.Test(t, func(t *testing.T) { // the proxy leaves
		onStep, release := hold()
		r := newRig(t, nil, onStep)
		in := r.send(claim(id, p))
		ctx, leave := context.WithCancel(t.Context())
		go func() {
			_, _ = r.Keep(ctx, &engine.Request{ID: "keep", Prompt: p, Logprobs: -1, PromptLogprobs: -1}, id)
		}()
		synctest.Wait()
		leave()
		r.gets(in, ticket.Cancelled, "")
		release()
		r.empty()
		r.close()
	})
}

// TestLeasePromptLogprobs: what prefill was asked for is collected too.
func TestLeasePromptLogprobs(t *testing.T) {
	p := tokens(4, 10)
	bubble(t, nil, nil, func(r *rig) {
		k, err := r.Keep(r.t.Context(), &engine.Request{ID: "keep", Prompt: p, Logprobs: -1, PromptLogprobs: 1}, "")
		if err != nil {
			r.t.Fatal(err)
		}
		spec := claim(k.ID, p)
		if spec.First, err = (&handoff.Order{N: 1, Of: 1, Logprobs: -1, PromptLogprobs: 1}).Encode(); err != nil {
			r.t.Fatal(err)
		}
		c, err := r.send(spec).Wait(r.t.Context())
		if err != nil {
			r.t.Fatal(err)
		}
		d, err := handoff.ParseDraft(c.Payload, &handoff.Order{PromptLogprobs: 1}, true, len(p), vocab)
		if err != nil || len(d.Prompt) != 9 || !slices.EqualFunc(d.Prompt, k.Info.Logprobs, func(a, b kernels.PromptLogprob) bool { return a.Self == b.Self }) {
			r.t.Errorf("%+v, %v", d, err)
		}
	})
}
