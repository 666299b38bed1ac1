package sense

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router/discover"
	"github.com/xpyd/xpyd/router/pick"
)

func live(id string, role fleet.Role, dialect string) fleet.Member {
	return fleet.Member{Instance: fleet.Instance{ID: id, Epoch: 1, Role: role, Dialect: dialect, Model: "m", URL: "http://10.0.0.1:80"}, State: fleet.Live}
}

func bare(t *testing.T, w *fleet.Watcher) *Members {
	return NewMembers(MembersDeps{Picker: pick.New(pick.Config{Policy: pick.RoundRobin}, nil), Fleet: w, Log: slog.New(slog.DiscardHandler), Ctx: t.Context(),
		HTTP: &http.Client{Transport: says{nil, func() {}}}})
}

// TestPlan: who has not passed is probed with a partner, once at a time and not before its time.
func TestPlan(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ms := bare(t, &fleet.Watcher{})
		dead := live("z0", fleet.Decode, "openai")
		dead.State = fleet.Dead
		all := fleet.NewSnapshot(7, time.Now(), []fleet.Member{live("d0", fleet.Decode, fleet.Native), live("e0", fleet.Decode, "openai"), live("p0", fleet.Prefill, fleet.Native), dead})
		is := func(what string, after time.Duration, want ...string) {
			t.Helper()
			pairs, wait := ms.plan(all)
			var got []string
			for _, pr := range pairs {
				got = append(got, pr.Prefill.ID+" "+pr.Decode.ID)
				if pr.Version != 7 {
					t.Errorf("%s: version %d", what, pr.Version)
				}
			}
			if !slices.Equal(got, want) || wait != after {
				t.Errorf("%s: %v, and again after %v; want %v, %v", what, got, wait, want, after)
			}
		}
		of := func(id string) *probeState { return ms.state(all.Get(id)) }
		is("at first", time.Minute, "p0 d0", "e0 e0")
		is("while they are probed", time.Minute)
		*of("p0"), *of("d0") = probeState{next: time.Now().Add(3 * time.Second), fails: 1}, probeState{ok: true}
		is("after a failure", 3*time.Second)
		*of("e0") = probeState{next: time.Now().Add(2 * time.Second), fails: 1}
		is("after two", 2*time.Second)
		time.Sleep(2 * time.Second)
		is("in time", time.Second, "e0 e0")
		time.Sleep(time.Second)
		is("with one that has passed", time.Minute, "p0 d0")
		*of("p0"), *of("d0") = probeState{refuses: true, next: time.Now().Add(time.Second)}, probeState{}
		is("with one that refuses us", time.Second)
		time.Sleep(time.Second)
		is("later", time.Minute, "p0 d0")
		if of("p0").refuses || !of("p0").running || !of("d0").running {
			t.Errorf("%+v, %+v", of("p0"), of("d0"))
		}
		ms.marked["d0"] = mark{epoch: 1}
		*of("p0"), *of("d0") = probeState{}, probeState{ok: true}
		is("with one that is drained", time.Minute)
		d1 := live("d1", fleet.Decode, fleet.Native)
		all = fleet.NewSnapshot(7, time.Now(), append(slices.Clone(all.Members), d1, live("p1", fleet.Prefill, "sglang")))
		*of("d1"), *of("e0"), ms.marked = probeState{ok: true}, probeState{ok: true}, map[string]mark{}
		for fails, with := range []string{"d0", "d1", "d0"} { // who has failed gets another partner
			*of("p0") = probeState{fails: fails}
			is("with two", time.Minute, "p0 "+with)
		}
		for id, ok := range map[string]bool{"d0": true, "p0": false, "p1": false, "z0": false, "e0": true} {
			if got, err := ms.ProbeState(all.Get(id)); got != ok || ms.passed(all.Get(id)) != ok || err != "" {
				t.Errorf("%s has passed: %t, %q", id, got, err)
			}
			if ms.Serves(all.Get(id)) != ok {
				t.Errorf("%s serves: %t", id, !ok)
			}
		}
		ms.marked["d0"], ms.marked["e0"] = mark{epoch: 1}, mark{epoch: 2} // of another run
		ms.state(&dead).ok = true
		for id, want := range map[string]bool{"d0": false, "d1": true, "e0": true, "z0": false} {
			if ms.Serves(all.Get(id)) != want {
				t.Errorf("%s serves: %t", id, !want)
			}
		}
	})
}

// tries answers probes.
type tries func(pr *Pair, path string) error

func (f tries) Try(pr *Pair, path, _ string) error { return f(pr, path) }

// TestProbe: what is known after a probe, and when the next one is.
func TestProbe(t *testing.T) {
	fault := errors.New("a fault")
	status := func(n int) error { return &ProbeError{Err: fault, Status: n} }
	for name, c := range map[string]struct {
		dialect  string
		was      probeState // of both, beside that they are probed
		says     error
		embeds   error // that it says of embeddings
		tries    string
		want     probeState
		after    time.Duration // until the next; 0: none
		result   string
		embedder bool
	}{
		"passes":                    {dialect: fleet.Native, tries: "/v1/completions", want: probeState{ok: true}, result: "ok"},
		"passes after failures":     {dialect: "sglang", was: probeState{fails: 3, err: "x"}, tries: "/v1/completions", want: probeState{ok: true}, result: "ok"},
		"fails":                     {dialect: fleet.Native, says: fault, tries: "/v1/completions", want: probeState{fails: 1, err: "a fault"}, after: 100 * time.Millisecond, result: "failed"},
		"fails again":               {dialect: fleet.Native, was: probeState{fails: 3, err: "x"}, says: fault, tries: "/v1/completions", want: probeState{fails: 4, err: "a fault"}, after: 800 * time.Millisecond, result: "failed"},
		"fails and fails":           {dialect: fleet.Native, was: probeState{fails: 99, err: "x"}, says: fault, tries: "/v1/completions", want: probeState{fails: 100, err: "a fault"}, after: 2 * time.Second, result: "failed"},
		"has passed before":         {dialect: fleet.Native, was: probeState{ok: true}, says: fault, tries: "/v1/completions", want: probeState{ok: true}, result: "failed"},
		"refuses us":                {dialect: fleet.Native, was: probeState{refuses: true, err: "x"}, says: fault, tries: "/v1/completions", want: probeState{refuses: true, err: "x"}, result: "failed"},
		"we lack something":         {dialect: fleet.Native, was: probeState{fails: 2}, says: &ProbeError{Err: fault, Shortage: true}, tries: "/v1/completions", want: probeState{fails: 2}, after: 2 * time.Second, result: "shortage"},
		"half of a pair":            {dialect: "sglang", says: status(404), tries: "/v1/completions", want: probeState{fails: 1, err: "a fault"}, after: 100 * time.Millisecond, result: "failed"},
		"embeds":                    {dialect: "openai", says: status(404), tries: "/v1/completions /v1/embeddings", want: probeState{ok: true, embeds: true}, result: "ok", embedder: true},
		"does not allow it":         {dialect: "openai", says: status(405), tries: "/v1/completions /v1/embeddings", want: probeState{ok: true, embeds: true}, result: "ok", embedder: true},
		"does neither":              {dialect: "openai", says: status(400), embeds: errors.New("y"), tries: "/v1/completions /v1/embeddings", want: probeState{fails: 1, err: "a fault"}, after: 100 * time.Millisecond, result: "failed"},
		"is broken":                 {dialect: "openai", says: status(500), tries: "/v1/completions", want: probeState{fails: 1, err: "a fault"}, after: 100 * time.Millisecond, result: "failed"},
		"the router ends meanwhile": {dialect: "openai", says: context.Canceled, tries: "/v1/completions", want: probeState{running: true}},
	} {
		synctest.Test(t, func(t *testing.T) {
			w := watch(t)
			ms, asked := bare(t, w), []string{}
			var end context.CancelFunc
			ms.Ctx, end = context.WithCancel(t.Context())
			defer end()
			p, d := live("p0", fleet.Prefill, c.dialect), live("d0", fleet.Decode, c.dialect)
			pr := Pair{Prefill: &p, Decode: &d}
			if d.Alone() {
				pr.Prefill = &d
			}
			ms.trier = tries(func(got *Pair, path string) error {
				if got.Prefill != pr.Prefill || got.Decode != pr.Decode {
					t.Errorf("%s: it tries %+v", name, got)
				}
				if asked = append(asked, path); path == "/v1/embeddings" {
					return c.embeds
				}
				if errors.Is(c.says, context.Canceled) {
					end()
				}
				return c.says
			})
			for _, m := range pr.Members() {
				st := ms.state(m)
				*st = c.was
				st.running = true
			}
			change := ms.Probed()
			ms.probe(pr)
			if got := strings.Join(asked, " "); got != c.tries {
				t.Errorf("%s: it tries %s", name, got)
			}
			if c.after > 0 {
				c.want.next = time.Now().Add(c.after)
			}
			for _, m := range pr.Members() {
				if got := *ms.state(m); got != c.want {
					t.Errorf("%s: of %s it knows %+v, want %+v", name, m.ID, got, c.want)
				}
			}
			for _, result := range []string{"ok", "failed", "shortage"} {
				if n := testutil.ToFloat64(ms.sent.WithLabelValues(result)); (n == 1) != (result == c.result) {
					t.Errorf("%s: %v are counted %s", name, n, result)
				}
			}
			passes, more := c.result == "ok", false
			select {
			case <-change:
				more = true
			default:
			}
			if now := ms.probed.Load(); more != passes || (now.generation == 1) != passes || now.generated != (passes && !c.embedder) || (len(ms.Embedders()) == 1) != c.embedder {
				t.Errorf("%s: it is told %t, %+v", name, more, now)
			}
			if woken := len(ms.poke) == 1; woken != (c.result != "") {
				t.Errorf("%s: probes are planned: %t", name, woken)
			}
			clear(ms.known) // they leave
			if ms.probe(pr); len(ms.known) != 0 {
				t.Errorf("%s: %d are known", name, len(ms.known))
			}
		})
	}
}

// TestProbeLearns: an engine of which more becomes known is not probed before that is looked at.
func TestProbeLearns(t *testing.T) {
	w := watch(t)
	ms, d := bare(t, w), live("d0", fleet.Decode, "openai")
	if err := w.AddStatic(d.Instance, fleet.Static); err != nil {
		t.Fatal(err)
	}
	m := w.Snapshot().Get("d0")
	ms.HTTP = &http.Client{Transport: says{map[string]string{"/version": `{"version":"1"}`}, func() {}}}
	ms.trier = tries(func(*Pair, string) error { t.Error("it is probed"); return nil })
	ms.state(m).running = true
	ms.probe(Pair{Prefill: m, Decode: m})
	if st := ms.state(m); *st != (probeState{}) || len(ms.poke) != 1 {
		t.Errorf("%+v, planned %d", st, len(ms.poke))
	}
}

// TestProbeLevel: a failed probe is a warning only where somebody should look.
func TestProbeLevel(t *testing.T) {
	fault := errors.New("a fault")
	for name, c := range map[string]struct {
		err      error
		fails    int
		edit     func(*fleet.Instance)
		drained  bool
		stranger bool
		want     slog.Level
	}{
		"first":             {err: fault, fails: 2, want: slog.LevelInfo},
		"fourth":            {err: fault, fails: 3, want: slog.LevelWarn},
		"of a probe":        {err: &ProbeError{Err: fault}, fails: 3, want: slog.LevelWarn},
		"full":              {err: &ProbeError{Err: fault, Full: true}, fails: 9, want: slog.LevelInfo},
		"refuses us":        {err: &ProbeError{Err: fault, Refuses: true}, want: slog.LevelWarn},
		"drained here":      {err: fault, fails: 9, drained: true, want: slog.LevelInfo},
		"leaves":            {err: fault, fails: 9, edit: func(i *fleet.Instance) { i.Draining = true }, want: slog.LevelInfo},
		"another by now":    {err: fault, fails: 9, edit: func(i *fleet.Instance) { i.Epoch = 2 }, want: slog.LevelInfo},
		"has left":          {err: fault, fails: 9, edit: func(i *fleet.Instance) { i.ID = "d1" }, want: slog.LevelInfo},
		"of nobody we know": {err: fault, stranger: true, want: slog.LevelInfo},
	} {
		w := watch(t)
		ms, p, d := bare(t, w), live("p0", fleet.Prefill, "sglang"), live("d0", fleet.Decode, "sglang")
		now := d.Instance
		if c.edit != nil {
			c.edit(&now)
		}
		if err := errors.Join(w.AddStatic(p.Instance, fleet.Static), w.AddStatic(now, fleet.Static)); err != nil {
			t.Fatal(err)
		}
		if !c.stranger {
			ms.state(&p).fails = 1
			ms.state(&d).fails = c.fails
		}
		if c.drained {
			ms.marked["d0"] = mark{epoch: 1}
		}
		if got := ms.level(Pair{Prefill: &p, Decode: &d}, c.err); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// TestDiscover: engines are found only as the configuration says, and what cannot be is an error with
// the key.
func TestDiscover(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	for want, edit := range map[string]func(*discover.Config){
		"":                         func(*discover.Config) {},
		"discovery.p2p_listen: ":   func(c *discover.Config) { c.P2PListen = "nowhere" },
		"discovery.kubernetes.api": func(c *discover.Config) { c.Kubernetes.Services = make([]discover.Service, 1) },
		"p2p":                      func(c *discover.Config) { c.P2PListen = "127.0.0.1:0" },
	} {
		ms, cfg := bare(t, &fleet.Watcher{}), discover.DefaultConfig()
		edit(&cfg)
		err := ms.Discover(cfg)
		var key *config.KeyError
		if bad := strings.HasPrefix(want, "discovery"); bad != (err != nil) || bad && !strings.HasPrefix(err.Error(), want) || strings.Contains(want, "kubernetes") != errors.As(err, &key) {
			t.Errorf("%q: %v", want, err)
		}
		if on := want == "p2p"; (ms.P2PAddr() != nil) != on || (len(ms.found) == 1) != on || ms.Refusals() == nil {
			t.Errorf("%q: at %v, %d ways", want, ms.P2PAddr(), len(ms.found))
		}
		if err := ms.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestMetrics: the names under which others ask.
func TestMetrics(t *testing.T) {
	reg := prometheus.NewRegistry()
	ms := bare(t, &fleet.Watcher{})
	ms.sent.WithLabelValues("ok")
	for _, c := range ms.Collectors() {
		if err := reg.Register(c); err != nil {
			t.Fatal(err)
		}
	}
	list, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range list {
		names = append(names, f.GetName())
		if !strings.Contains(f.GetHelp(), " ") {
			t.Errorf("%s: %q", f.GetName(), f.GetHelp())
		}
	}
	if want := []string{"xpyd_router_breaker_opened_total", "xpyd_router_breakers_open", "xpyd_router_ejections_total", "xpyd_router_prefix_bytes", "xpyd_router_probes_total", "xpyd_router_workers_ejected"}; !slices.Equal(names, want) {
		t.Errorf("%v", names)
	}
}
