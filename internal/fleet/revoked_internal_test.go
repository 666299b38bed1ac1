package fleet

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestRevoked: who is shut out ends and is not heard, whatever he announces, and is
// heard again when he may come back.
func TestRevoked(t *testing.T) {
	c := newClock(t, 10)
	a, b := worker("a", 1), worker("b", 1)
	c.announce(a)
	c.announce(b)
	c.run(time.Second, a, b)
	at := c.now.UnixMicro()
	revoke := func(back bool) {
		at++
		c.r.apply(&message{kind: kindRevoked, revoked: []Revocation{{ID: "a", At: at, Back: back}}}, c.now)
	}
	before := c.r.version
	revoke(false)
	if m := c.r.snapshot(c.now).Get("a"); m.State != Gone || !m.Revoked || m.Reason != "revoked" || c.r.version == before {
		t.Fatalf("%+v", m)
	}
	if s := c.r.snapshot(c.now); !slices.Equal(s.Revoked, []string{"a"}) {
		t.Errorf("%v", s.Revoked)
	}
	c.run(time.Second, a, b)
	next := worker("a", 2)
	c.announce(next)
	c.announce(a)
	c.run(2*time.Second, next, b)
	c.r.reportAlive("a", 1, c.now)
	c.want("a", Gone)
	c.want("b", Live)
	c.run(70*time.Second, next, b)
	c.want("a", "") // and it is forgotten in the end, though it goes on
	if c.announce(next); len(c.r.members) != 1 || c.beat(next) != "" {
		t.Error("it joins, or is asked to")
	}

	version := c.r.version
	revoke(true)
	if c.beat(next) != "a" || c.r.version == version { // it is asked who it is
		t.Error("it is not heard")
	}
	c.announce(next)
	c.want("a", Live)

	// Back within the minute, at the same epoch: no restart is needed.
	revoke(false)
	c.want("a", Gone)
	revoke(true)
	c.announce(next)
	c.want("a", Live)
	if m := c.r.snapshot(c.now).Get("a"); m.Revoked {
		t.Errorf("%+v", m)
	}
}

// TestRevocationsMerge: the newest word counts, in whatever order they come, and
// there is no end of bad ones.
func TestRevocationsMerge(t *testing.T) {
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	at := func(d time.Duration) int64 { return now.Add(d).UnixMicro() }
	words := []Revocation{{"a", at(-3), false}, {"a", at(-2 * time.Second), true}, {"a", at(-1 * time.Second), false},
		{"b", at(-2 * time.Second), false}, {"b", at(-time.Second), true}, {"c", at(0), false}, {"c", at(0), true}}
	words[0].At = at(-3 * time.Second)
	for i := range 40 {
		tab := revocations{}
		order := slices.Clone(words)
		for k := range order { // some permutation
			j := (k*7 + i*13 + k*i) % len(order)
			order[k], order[j] = order[j], order[k]
		}
		for _, w := range order {
			tab.merge([]Revocation{w}, now)
		}
		if got := tab.shutOut(); !slices.Equal(got, []string{"a", "c"}) {
			t.Fatalf("%v: %v", order, got)
		}
		if news := tab.merge(order, now); len(news) > 0 {
			t.Fatalf("heard again: %v", news)
		}
	}
	tab := revocations{}
	for _, bad := range []Revocation{{"", 1, false}, {"a b", 1, false}, {"a", 0, false}, {"a", -1, false}, {"a", at(6 * time.Minute), false}} {
		if tab.merge([]Revocation{bad}, now); len(tab) > 0 {
			t.Errorf("%+v is taken", bad)
		}
	}
	if tab.merge([]Revocation{{"a", at(4 * time.Minute), false}}, now); !tab.has("a") {
		t.Error("a clock that is a little ahead")
	}
	for i := range 2 * maxRevocations {
		tab.merge([]Revocation{{fmt.Sprint("x", i), at(0), false}}, now)
	}
	if len(tab) != maxRevocations || !tab.has("a") {
		t.Errorf("%d", len(tab))
	}
	tab.merge([]Revocation{{"a", at(4*time.Minute) + 1, true}}, now)
	if tab.merge([]Revocation{{"y", at(0), false}}, now); !tab.has("y") || len(tab) != maxRevocations {
		t.Error("the one that may come back does not make room")
	}
	b, err := json.Marshal(revokedMessage{tab.list()})
	if err != nil || len(b) > maxMessageBytes {
		t.Errorf("%d bytes, %v", len(b), err)
	}
	long := revocations{}
	for i := range maxRevocations {
		id := fmt.Sprintf("%03d%s", i, strings.Repeat("x", maxIDBytes-3))
		long[id] = Revocation{id, at(0), true}
	}
	if b, _ = json.Marshal(revokedMessage{long.list()}); len(b) > maxMessageBytes {
		t.Errorf("%d bytes", len(b))
	}
	if got, err := decodeRevoked(b); err != nil || !slices.Equal(got, long.list()) {
		t.Errorf("%d, %v", len(got), err)
	}
	for _, bad := range []string{"", "[]", `{"revoked":[{"id":"a b","at":1}]}`, `{"revoked":[` + strings.Repeat(`{"id":"a","at":1},`, maxRevocations) + `{"id":"a","at":1}]}`} {
		if _, err := decode(subjectRevoked, []byte(bad)); err == nil {
			t.Errorf("%.40s is taken", bad)
		}
	}
}

func TestRevokeErrors(t *testing.T) {
	w, err := Watch(WatcherConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if w.Revoke("a b") == nil || !errors.Is(w.Unrevoke("a"), ErrNotRevoked) {
		t.Error("taken")
	}
	if err := errors.Join(w.Revoke("a"), w.Revoke("a"), w.Unrevoke("a"), w.Revoke("a")); err != nil {
		t.Error(err)
	}
	if err := w.AddStatic(*worker("a", 1), Static); err == nil || !strings.Contains(err.Error(), "revoked") {
		t.Errorf("%v", err)
	}
	for i := range maxRevocations - 1 {
		if err := w.Revoke(fmt.Sprint("x", i)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Revoke("y"); !errors.Is(err, ErrManyRevoked) {
		t.Errorf("%v", err)
	}
	// One that does not announce itself is looked for when it may come back.
	if err := errors.Join(w.Unrevoke("a"), w.AddStatic(*worker("a", 1), Static), w.Revoke("a")); err != nil {
		t.Fatal(err)
	}
	if m := w.Snapshot().Get("a"); m.State != Gone || !m.Revoked {
		t.Errorf("%+v", m)
	}
	if err := w.Unrevoke("a"); err != nil {
		t.Fatal(err)
	}
	if m := w.Snapshot().Get("a"); m.State != Dead || m.Revoked {
		t.Errorf("%+v", m)
	}
	if !w.ReportAlive("a", 1) || w.Snapshot().Get("a").State != Live {
		t.Error("it does not come back")
	}
	ahead, err := Watch(WatcherConfig{Revoked: []Revocation{{"a", time.Now().Add(time.Minute).UnixMicro(), false}}})
	if err != nil {
		t.Fatal(err)
	}
	defer ahead.Close()
	if err := ahead.Unrevoke("a"); err != nil || len(ahead.Snapshot().Revoked) > 0 {
		t.Errorf("shut out by a router whose clock is ahead: %v, %v", err, ahead.Snapshot().Revoked)
	}
	again, err := Watch(WatcherConfig{Revoked: w.Revocations()})
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if !slices.Equal(again.Snapshot().Revoked, w.Snapshot().Revoked) || len(again.Snapshot().Revoked) != maxRevocations-1 {
		t.Error("they are not as they were")
	}
}
