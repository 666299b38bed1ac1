package console

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
)

// TestServeMetrics: what could be gathered is served, and an error if there is nothing, or nonsense.
func TestServeMetrics(t *testing.T) {
	name, kind, value := "a", dto.MetricType_GAUGE, 7.0
	good := &dto.MetricFamily{Name: &name, Type: &kind, Metric: []*dto.Metric{{Gauge: &dto.Gauge{Value: &value}}}}
	for _, c := range []struct {
		families []*dto.MetricFamily
		err      error
		status   int
		body     string
	}{
		{[]*dto.MetricFamily{good}, nil, 200, "a 7\n"},
		{[]*dto.MetricFamily{good}, errors.New("another broke"), 200, "a 7\n"},
		{nil, nil, 200, ""},
		{nil, errors.New("all broke"), 500, "all broke"},
		{[]*dto.MetricFamily{good, {Name: &name}}, nil, 500, "encode metrics"},
	} {
		var ctx fasthttp.RequestCtx
		ServeMetrics(&ctx, prometheus.GathererFunc(func() ([]*dto.MetricFamily, error) { return c.families, c.err }))
		if body := string(ctx.Response.Body()); ctx.Response.StatusCode() != c.status || !strings.Contains(body, c.body) {
			t.Errorf("%v, %v: %d %s", c.families, c.err, ctx.Response.StatusCode(), body)
		}
	}
}

// TestReplyUnsaid: an answer that JSON cannot hold is an error.
func TestReplyUnsaid(t *testing.T) {
	var ctx fasthttp.RequestCtx
	if err := reply(&ctx, 201, map[string]int{"a": 1}); err != nil || ctx.Response.StatusCode() != 201 || string(ctx.Response.Body()) != `{"a":1}` {
		t.Errorf("%v, %d %s", err, ctx.Response.StatusCode(), ctx.Response.Body())
	}
	if err := reply(&ctx, 200, func() {}); err == nil || err.Status != 500 {
		t.Error(err)
	}
}

// TestAuditLimit: who is denied writes a few lines at once, then one in a while; orders write all.
func TestAuditLimit(t *testing.T) {
	var log bytes.Buffer
	a, err := newAuditor("", slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	now := a.earned
	f := func(times int, denied bool, want int) {
		t.Helper()
		log.Reset()
		for range times {
			a.write(&Audited{Time: now, Action: "x"}, denied)
		}
		if n := strings.Count(log.String(), "\n"); n != want {
			t.Errorf("%d of %d lines, want %d", n, times, want)
		}
	}
	f(auditBurst+5, true, auditBurst)
	f(1, false, 1)
	if !strings.Contains(log.String(), "refused_before=5") {
		t.Errorf("%s", log.String())
	}
	now = now.Add(auditEvery / 2)
	f(3, true, 0)
	now = now.Add(auditEvery / 2)
	f(3, true, 1)
	now = now.Add(2 * auditEvery)
	f(5, true, 2)
	now = now.Add(time.Hour)
	f(auditBurst+5, true, auditBurst)
	f(20, false, 20)
}

// TestTurned: how long an order of another role looks at the fleet.
func TestTurned(t *testing.T) {
	was := fleet.Member{Instance: fleet.Instance{Epoch: 3, Role: fleet.Prefill}}
	for _, c := range []struct {
		epoch uint64
		role  fleet.Role
		want  bool
	}{{3, fleet.Prefill, false}, {3, fleet.Decode, true}, {4, fleet.Prefill, true}} {
		now := was
		now.Epoch, now.Role = c.epoch, c.role
		if turned(&was, fleet.Decode)(&now) != c.want {
			t.Errorf("%+v", c)
		}
	}
	if !turned(&was, fleet.Decode)(nil) {
		t.Error("one that is gone is waited for")
	}
}

// TestEmptied: how long an order of another role waits for streams to move.
func TestEmptied(t *testing.T) {
	was := fleet.Member{Instance: fleet.Instance{Epoch: 3}}
	for _, c := range []struct {
		now  *fleet.Member
		left int
		want bool
	}{{nil, 1, true}, {&fleet.Member{Instance: fleet.Instance{Epoch: 4}}, 1, true}, {&was, 1, false}, {&was, 0, true}} {
		if emptied(&was, func(*fleet.Member) int { return c.left })(c.now) != c.want {
			t.Errorf("%+v", c)
		}
	}
}

// TestAsked: what the audit log has of a request, and not of one with a client's words.
func TestAsked(t *testing.T) {
	long := strings.Repeat("x", maxAsked)
	for _, c := range []struct{ path, query, body, want string }{
		{"/admin/v1/scale", "", "", ""}, {"/admin/v1/scale", "", "{}", "{}"}, {"/admin/v1/scale", "a=b", "", "?a=b"}, {"/admin/v1/scale", "a=b", "{}", "?a=b {}"},
		{"/admin/v1/scale", "", long, long}, {"/admin/v1/scale", "", long + "y", long + "…"}, {"/admin/v1/scale", long + "y", "", "?" + long},
		{"/admin/v1/cache/pin", "", "", ""}, {"/admin/v1/cache/pin", "a=b", "x", "1 bytes"}, {"/admin/v1/cache/pin", "", "word", "4 bytes"},
	} {
		var ctx fasthttp.RequestCtx
		ctx.Request.SetRequestURI(c.path + "?" + c.query)
		ctx.Request.SetBodyString(c.body)
		if got := asked(&ctx, c.path); got != c.want {
			t.Errorf("%.60v: %.60q, want %.60q", c, got, c.want)
		}
	}
}

// TestNotes: who changes a revocation hears what has no effect yet.
func TestNotes(t *testing.T) {
	w, err := fleet.Watch(fleet.WatcherConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	c := &Console{Deps: Deps{Fleet: w}}
	up := w.Snapshot().Link.Up
	for verb, unknown := range map[string]bool{"GET": false, "POST": true, "DELETE": false} {
		said := strings.Join(c.notes(verb, "d0"), "; ")
		if strings.Contains(said, "no worker of this name is known") != unknown || strings.Contains(said, "NATS is down") != (!up && verb != "GET") {
			t.Errorf("%s with the link up %t: %q", verb, up, said)
		}
	}
}

// TestAsText: programs get JSON, people text; format says it in so many words.
func TestAsText(t *testing.T) {
	for _, c := range []struct {
		query, accept string
		want          bool
	}{
		{"", "", false}, {"", "application/json", false}, {"", "text/html,*/*", true}, {"format=text", "", true}, {"format=json", "text/html", false}, {"format=", "text/html", true}, {"format=", "", false},
	} {
		var ctx fasthttp.RequestCtx
		ctx.Request.SetRequestURI("/x?" + c.query)
		ctx.Request.Header.Set("Accept", c.accept)
		if asText(&ctx) != c.want {
			t.Errorf("%+v", c)
		}
	}
}

// TestRoutes: who may ask for what, as the reference says.
func TestRoutes(t *testing.T) {
	who, mounted := map[string]string{}, map[string]bool{}
	for _, r := range Routes() {
		who[r.Method+" "+r.Path], mounted[r.Path] = r.For, r.Mounted
	}
	for path, want := range map[string]bool{"/admin/v1/scale": true, "/admin/v1/secret": true, "/admin/v1/instances": false, "/metrics": false} {
		if mounted[path] != want {
			t.Errorf("%s is mounted: %t", path, !want)
		}
	}
	for route, want := range map[string]string{"GET /metrics": "anybody", "GET /health": "anybody", "GET /dashboard": "anybody", "POST /admin/v1/try/completions": "the admin token", "GET /admin/v1/events": "either token", "GET /admin/v1/instances": "either token", "POST /admin/v1/instances": "the admin token",
		"GET /admin/v1/profile": "the admin token", "GET /debug/pprof{…}": "the admin token", "POST /debug/pprof{…}": "the admin token", "DELETE /admin/v1/cache/pin": "the admin token"} {
		if who[route] != want {
			t.Errorf("%s is for %q, want %q", route, who[route], want)
		}
	}
}
