package router

import (
	"fmt"
	"testing"
	"time"

	"github.com/xpyd/xpyd/router/limit"
)

// TestTenantLabels: the label tenant has a bounded number of values.
func TestTenantLabels(t *testing.T) {
	s := newStatsByName()
	for i := range 10 * maxTenants {
		s.of(fmt.Sprint(i)).limited("queue")
	}
	if len(s.all) != maxTenants+1 || s.of("5").name != "5" || s.of("x").name != otherTenants {
		t.Errorf("%d", len(s.all))
	}
}

// TestShedErrors: each reason has its status, and Retry-After is what was
// measured.
func TestShedErrors(t *testing.T) {
	f := func(why limit.Why, status, after int) {
		t.Helper()
		e := shedError(&limit.Refusal{Why: why, After: 2500 * time.Millisecond, Limits: limit.Limits{Wait: time.Second}})
		if e.Status != status || e.RetryAfter != after {
			t.Errorf("%s: %d %d", why, e.Status, e.RetryAfter)
		}
	}
	f(limit.Full, 429, 3)
	f(limit.Displaced, 429, 3)
	f(limit.Late, 503, 3)
	f(limit.Hopeless, 503, 3)
	f(limit.Deadline, 504, 0)
	if seconds(0) != 1 || seconds(1) != 1 || seconds(time.Minute) != 60 {
		t.Error("seconds")
	}
}

// TestTally: what a stream says counts, else its events.
func TestTally(t *testing.T) {
	a := &admission{tenant: &tenant{}}
	a.tally([]byte("data: {\"a\":1}\n\ndata: {\"b\":1}\n\n"), true)
	if a.events != 2 || a.told {
		t.Errorf("%+v", a)
	}
	a.tally([]byte("data: {\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":2}}\n\ndata: [DONE]\n\n"), true)
	if !a.told || a.asked+a.generated != 7 || a.generated != 2 {
		t.Errorf("%+v", a)
	}
	a = &admission{tenant: &tenant{}}
	a.tally([]byte(`{"usage":{"prompt_tokens":5}}`), false)
	if !a.told || a.asked != 5 {
		t.Errorf("%+v", a)
	}
	var none *admission
	none.tally([]byte("x"), true)
}

// TestAdmitCostsNothing: without keys and with places free, admission
// allocates nothing but what ends it.
func TestAdmitCostsNothing(t *testing.T) {
	g := newGate(DefaultConfig().Limits)
	if n := testing.AllocsPerRun(100, func() {
		if !g.TryEnter() {
			t.Fatal("no place")
		}
		g.Leave(time.Time{}, true)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
	k := &keyring{}
	if n := testing.AllocsPerRun(100, func() {
		if _, ok := k.identify(nil); !ok {
			t.Fatal("refused")
		}
		if hosts(nil).check(nil) != nil {
			t.Fatal("refused")
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
