package main

import (
	"bytes"
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
)

// desk is an admin listener that gives each path's answers one after another, the
// last for ever, and calls asked for each.
type desk struct {
	mu      sync.Mutex
	answers map[string][]string
	asked   func(path string)
}

func (d *desk) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	d.mu.Lock()
	list := d.answers[r.URL.Path]
	if len(list) == 0 {
		list = []string{"{}"}
	}
	if d.answers[r.URL.Path] = list; len(list) > 1 {
		d.answers[r.URL.Path] = list[1:]
	}
	d.mu.Unlock()
	if d.asked != nil {
		d.asked(r.URL.Path)
	}
	_, _ = w.Write([]byte(list[0]))
}

const (
	instancesPath = "/admin/v1/instances"
	workersPath   = "/admin/v1/workers"
	ledgerPath    = "/debug/ledger"
)

// at runs a command against a desk.
func at(t *testing.T, ctx context.Context, d *desk, args ...string) (out, errs string, code int) {
	t.Helper()
	srv := httptest.NewServer(d)
	defer srv.Close()
	var o, e bytes.Buffer
	code = run(ctx, append(args, "--admin", srv.URL, "--token", "x", "--data", t.TempDir()), &o, &e)
	return o.String(), e.String(), code
}

const (
	drained = `{"instances":[{"id":"d0","dialect":"native","role":"decode","state":"live","draining":true,"in_flight":{"legs":1}}]}`
	quiet   = `{"instances":[{"id":"d0","dialect":"native","role":"decode","state":"live","draining":true}]}`
)

func holding(what string) string {
	return `{"fleet":{"d0":{"blocks":[{"state":"quarantined","blocks":[1]}]` + what + `}}}`
}

// TestDrainWait: it ends when the worker has no request, ticket or lease left.
func TestDrainWait(t *testing.T) {
	t.Parallel()
	f := func(instances, ledgers []string, wantCode int, wantErr ...string) {
		t.Helper()
		d := &desk{answers: map[string][]string{instancesPath: instances, ledgerPath: ledgers}}
		out, errs, code := at(t, t.Context(), d, "drain", "d0", "--wait")
		if code != wantCode || out != "d0: drain\n" {
			t.Errorf("%d %q %q", code, out, errs)
		}
		for _, want := range wantErr {
			if !strings.Contains(errs, want) {
				t.Errorf("%q is not in %q", want, errs)
			}
		}
		if n := strings.Count(errs, "\n"); n > 2 {
			t.Errorf("%d lines in a moment: %q", n, errs)
		}
	}
	f([]string{drained, quiet}, []string{
		holding(`,"requests":[{},{}],"tickets":[{}]`), holding(`,"held":[{"kind":"leased"}]`), holding(`,"held":[{"kind":"linked"}]`), holding(""),
	}, 0, "d0: 2 requests, 1 ticket\n")
	f([]string{strings.Replace(drained, `"in_flight"`, `"to_move":2,"in_flight"`, 1), quiet}, []string{holding(`,"requests":[{},{},{}]`), holding("")}, 0, "d0: 3 requests (2 to move, 1 to end)\n")
	f([]string{drained, `{}`}, []string{holding("")}, 0, "d0: 1 request\n") // the router's own; then it has left
	f([]string{quiet}, []string{`{"fleet":{"d0":{"error":{"message":"no"}}}}`, holding("")}, 0, "d0: does not answer\n")
	f([]string{quiet, strings.Replace(quiet, "true", "false", 1)}, []string{holding(`,"requests":[{}]`)}, 1, "d0 is not drained any more")
	f([]string{strings.Replace(drained, "native", "openai", 1), strings.Replace(quiet, "native", "openai", 1)}, nil, 0, "d0: 1 request\n")
}

// TestWaitEnds: the waiting is bounded, and Ctrl-C ends it; both say what is left,
// and fail.
func TestWaitEnds(t *testing.T) {
	t.Parallel()
	answers := func() map[string][]string {
		return map[string][]string{instancesPath: {quiet}, ledgerPath: {holding(`,"requests":[{}]`)}}
	}
	_, errs, code := at(t, t.Context(), &desk{answers: answers()}, "drain", "d0", "--wait", "--timeout", "300ms")
	if code != exitFailed || !strings.Contains(errs, "not done in 300ms: d0: 1 request; the drain goes on") {
		t.Errorf("%d %q", code, errs)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	looks := 0
	d := &desk{answers: answers(), asked: func(path string) {
		if path == ledgerPath {
			if looks++; looks == 2 {
				cancel()
			}
		}
	}}
	_, errs, code = at(t, ctx, d, "drain", "d0", "--wait")
	if code != exitFailed || !strings.Contains(errs, "no longer waiting: d0: 1 request; the drain goes on") {
		t.Errorf("%d %q", code, errs)
	}
}

// TestScaleWait: it ends when those that came serve and those that went have
// ended; one that stays drained is told of, and not waited for.
func TestScaleWait(t *testing.T) {
	t.Parallel()
	const scalePath = "/admin/v1/scale"
	member := func(id, rest string) string { return `{"id":"` + id + `","role":"decode","state":"live"` + rest + `}` }
	fleetOf := func(members ...string) string { return `{"instances":[` + strings.Join(members, ",") + `]}` }
	d := &desk{answers: map[string][]string{
		scalePath: {`{"decode":{"added":["d2"],"removed":["d1"],"kept":["d0"]}}`},
		instancesPath: {
			fleetOf(member("d0", `,"draining":true`), member("d1", `,"probed":true`)),
			fleetOf(member("d1", `,"probed":true,"to_move":3,"in_flight":{"legs":3}`)),
			fleetOf(member("d2", ``)),
			fleetOf(member("d2", `,"probed":true`)),
		},
		workersPath: {
			`[{"name":"d0","state":"ready"},{"name":"d1","state":"draining"},{"name":"d2","state":"starting"}]`,
			`[{"name":"d0","state":"ready"},{"name":"d2","state":"ready"}]`,
		},
	}}
	out, errs, code := at(t, t.Context(), d, "scale", "decode=2", "--wait")
	if code != 0 || errs != "d1: draining, 3 requests (3 to move, 0 to end); d2: starting\n" || !strings.Contains(out, "decode: d0 counts, but is drained") {
		t.Errorf("%d %q %q", code, out, errs)
	}
	d = &desk{answers: map[string][]string{scalePath: {`{"decode":{"added":["d2"]}}`}, workersPath: {`[{"name":"d2","state":"draining"}]`}}}
	if _, errs, code := at(t, t.Context(), d, "scale", "decode=2", "--wait"); code != exitFailed || !strings.Contains(errs, "d2 is being ended by somebody else") {
		t.Errorf("%d %q", code, errs)
	}
}
