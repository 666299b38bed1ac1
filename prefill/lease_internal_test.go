package prefill

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/xpyd/xpyd/engine"
)

// TestEarlyClaimsAreBounded: claims that come before their prompts count as leases, whose number
// is bounded; after the end there are none.
func TestEarlyClaimsAreBounded(t *testing.T) {
	l := newLeases(time.Minute, time.Minute, time.Minute, 2, nil)
	reserve := func(id string, want error) {
		t.Helper()
		if k, err := l.reserve(id); !errors.Is(err, want) || (k == nil) != (want != nil) {
			t.Errorf("%s: %v, %v, want %v", id, k, err, want)
		}
	}
	reserve(EarlyClaim+"a", nil)
	reserve(EarlyClaim+"b", nil)
	reserve(EarlyClaim+"c", ErrTooManyLeases)
	if len(l.byID) != 2 {
		t.Errorf("%d leases", len(l.byID))
	}
	l.remove(l.byID[EarlyClaim+"a"])
	l.byID[EarlyClaim+"b"].err, l.byID[EarlyClaim+"b"].claimed = errors.New("it failed"), false
	reserve(EarlyClaim+"c", nil) // there is room: the one that failed stays, to say why
	if l.byID[EarlyClaim+"b"] == nil {
		t.Error("a failed one was removed for room that there was")
	}
	l.closed = true
	l.remove(l.byID[EarlyClaim+"b"])
	reserve(EarlyClaim+"d", engine.ErrClosed)
}

// TestLeaseTable: a lease is renewed only while it waits with its blocks, is removed once, and takes
// nothing once it has been.
func TestLeaseTable(t *testing.T) {
	l := newLeases(time.Minute, time.Minute, time.Minute, 2, nil)
	k, err := l.begin("a", nil, "", func(error) {})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := l.renew("a"); !errors.Is(err, ErrNoLease) {
		t.Errorf("while its prompt is computed: %v", err)
	}
	if err := l.keep(k, &engine.Handle{}, nil); err != nil {
		t.Error(err)
	}
	if left, most, err := l.renew("a"); err != nil || left <= 0 || most <= 0 {
		t.Errorf("%v, %v, %v", left, most, err)
	}
	k.claimed = true
	if _, _, err := l.renew("a"); !errors.Is(err, ErrNoLease) {
		t.Errorf("once it is claimed: %v", err)
	}
	if !l.remove(k) || l.remove(k) {
		t.Error("it is removed once")
	}
	gone, err := l.begin("b", nil, "", func(error) {})
	if err != nil || !l.remove(gone) {
		t.Fatal(err)
	}
	if err := l.keep(gone, &engine.Handle{}, nil); !errors.Is(err, ErrClaimGone) || gone.handle != nil {
		t.Errorf("a lease that was given up: %v", err)
	}
}

// TestGoneIsBounded: of the rooms that are over so many are remembered, the latest.
func TestGoneIsBounded(t *testing.T) {
	l := newLeases(time.Minute, time.Minute, time.Minute, 2, nil)
	for i := range remembered + 3 {
		k, err := l.begin(fmt.Sprint(EarlyRoom, i), nil, "", func(error) {})
		if err != nil {
			t.Fatal(err)
		}
		if err := l.keep(k, &engine.Handle{}, nil); err != nil || !l.remove(k) {
			t.Fatal(err)
		}
	}
	if len(l.gone) != remembered || len(l.goneBy) != remembered || l.gone[EarlyRoom+"2"] || !l.gone[EarlyRoom+"3"] {
		t.Errorf("%d and %d are remembered, want %d", len(l.gone), len(l.goneBy), remembered)
	}
	k, err := l.begin(EarlyRoom+"3", nil, "", func(error) {}) // a number that comes again
	if err != nil {
		t.Fatal(err)
	}
	if claimed, err := l.reserve(EarlyRoom + "3"); err != nil || claimed != k {
		t.Errorf("%v, %v", claimed, err)
	}
	if l.remove(k); len(l.gone) != remembered {
		t.Errorf("%d are remembered", len(l.gone))
	}
}
