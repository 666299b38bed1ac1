package soak

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/internal/fleet"
)

func TestMain(m *testing.M) { os.Exit(cluster.Main(m)) }

// scene is `up` with 2 + 2 workers and 1 + 1 that were started apart and to
// which nothing is done, all of them with NATS behind a wire that can be cut.
type scene struct {
	*cluster.Router
	t    *testing.T // the whole test's
	nats *cluster.NATS
	wire *wire
}

func open(t *testing.T) *scene {
	t.Helper()
	nats := cluster.StartNATS(t)
	at := strings.LastIndex(nats.URL, "@") + 1
	w := newWire(t, nats.URL[at:])
	s := &scene{t: t, nats: nats, wire: w,
		Router: cluster.Up(t, "--device", "cpu", "--prefill", "2", "--decode", "2", "--threads", "1", "--kv-memory", "16MiB", "--nats", nats.URL[:at]+w.addr)}
	for _, role := range []fleet.Role{fleet.Prefill, fleet.Decode} {
		s.Worker(t, role, "--id", "apart-"+string(role), "--device", "cpu", "--kv-memory", "16MiB")
	}
	if err := s.counts(2, 2); err != nil {
		t.Fatal(err)
	}
	return s
}

// setting is an environment variable or a default, parsed.
func setting[T any](t *testing.T, name, def string, parse func(string) (T, error)) T {
	t.Helper()
	v, err := parse(cmp.Or(os.Getenv(name), def))
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return v
}

// TestEdgeSoak is a bad day: kills, stops, scale, role, drain, NATS cut on either
// side or gone, no descriptors, no memory, and requests that ask for too much,
// one after another under load. No answer is wrong, none fails but those that ran
// while a worker was killed or a process had no descriptors, and in the end
// nothing is held. XPYD_EDGE_SOAK=30m makes it long (`make edge-soak`), and
// XPYD_EDGE_OUT=bench has it write its figures; XPYD_EDGE_SEED is another day.
func TestEdgeSoak(t *testing.T) {
	length := setting(t, "XPYD_EDGE_SOAK", "15s", time.ParseDuration)
	seed := setting(t, "XPYD_EDGE_SEED", "1", func(s string) (n uint64, err error) { _, err = fmt.Sscan(s, &n); return })
	s := open(t)
	list := asks(200)
	record(t, s.Router, list)
	rng := rand.New(rand.NewPCG(seed, 0))
	s.warm(t, list)
	before := s.usage(t)
	l := startLoad(t, s.Router, list, 16)
	var done []run
	start := time.Now()
	for n := 0; time.Since(start) < length || n < 3; n++ {
		if n%len(ops) == 0 { // each as often as the others
			rng.Shuffle(len(ops), func(i, k int) { ops[i], ops[k] = ops[k], ops[i] })
		}
		r := run{op: ops[n%len(ops)], begin: time.Now()}
		had := l.answers.Load()
		if err := r.do(s, t, rng); err != nil {
			t.Errorf("%s: %v", r.name, err)
		}
		if err := s.counts(2, 2); err != nil {
			t.Fatalf("after %s: %v", r.name, err)
		}
		r.end = time.Now()
		done = append(done, r)
		t.Logf("%6.0f s  %-36s %5.1f s, %d answers", time.Since(start).Seconds(), r.name, r.end.Sub(r.begin).Seconds(), l.answers.Load()-had)
	}
	failures := l.stop()
	took := time.Since(start)
	unexplained, byOp := 0, map[string]int{}
	for i := range failures {
		if name := explain(done, &failures[i]); name != "" {
			byOp[name]++
		} else {
			unexplained++
			t.Errorf("no operation explains: %v\n%s", failures[i].Reply, failures[i].body)
		}
	}
	cluster.Wait(t, 10*time.Second, "ledgers empty", s.Idle)
	after := s.usage(t)
	t.Logf("%d answers in %v, %d wrong, %d failed and explained %v, %d not explained, %d operations",
		l.answers.Load(), took.Round(time.Second), l.wrong.Load(), len(failures)-unexplained, byOp, unexplained, len(done))
	for id, b := range before {
		t.Logf("%s: before %v, after %v", id, b, after[id])
	}
	if out := os.Getenv("XPYD_EDGE_OUT"); out != "" {
		report(t, out, &day{answers: int(l.answers.Load()), wrong: int(l.wrong.Load()), unexplained: unexplained, explained: byOp, ops: len(done), took: took, before: before, after: after})
	}
}

// explain names the op that a failure may come from, "" for none.
func explain(done []run, f *failure) string {
	for i := range done {
		if done[i].explains(f) {
			return done[i].name
		}
	}
	return ""
}

// warm has the load run undisturbed for a moment, so that what is held at the
// start is compared with what is held at the end: connections that stay open for
// the next request are as many in both.
func (s *scene) warm(t *testing.T, list []*ask) {
	t.Helper()
	l := startLoad(t, s.Router, list, 16)
	cluster.Wait(t, time.Minute, "500 answers", func() error {
		if n := l.answers.Load(); n < 500 {
			return fmt.Errorf("%d answers", n)
		}
		return nil
	})
	for _, f := range l.stop() {
		t.Errorf("undisturbed: %v\n%s", f.Reply, f.body)
	}
	cluster.Wait(t, 10*time.Second, "ledgers empty", s.Idle)
}

// usage is of the router and of the two workers that live as long as the test.
func (s *scene) usage(t *testing.T) map[string]cluster.Usage {
	t.Helper()
	all, err := s.Usage()
	if err != nil {
		t.Fatal(err)
	}
	for id := range all {
		if id != "router" && !strings.HasPrefix(id, "apart-") {
			delete(all, id)
		}
	}
	return all
}

// day is what a soak came to.
type day struct {
	answers, wrong, unexplained, ops int
	explained                        map[string]int
	took                             time.Duration
	before, after                    map[string]cluster.Usage
}

// report appends the figures, and what was used at start and end, to out.
func report(t *testing.T, out string, d *day) {
	t.Helper()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir(root)
	const command = "make edge-soak"
	book, err := figures.Open(out, "edge", command)
	if err != nil {
		t.Fatal(err)
	}
	defer book.Close()
	book.Logf("soak: %d answers in %v, %d wrong, %d errors not explained, explained %v, %d operations", d.answers, d.took.Round(time.Second), d.wrong, d.unexplained, d.explained, d.ops)
	var use []string
	for id, b := range d.before {
		line := fmt.Sprintf("%s %v, then %v", id, b, d.after[id])
		use = append(use, line)
		book.Logf("soak: %s", line)
	}
	for name, v := range map[string][2]int{"answers": {d.answers, 200_000}, "wrong": {d.wrong, 0}, "errors": {d.unexplained, 0}} {
		err := book.Add(figures.Figure{Name: "edge.soak_" + name, Value: float64(v[0]), PeerValue: float64(v[1]), Peer: "limit", Unit: "in " + d.took.Round(time.Minute).String(),
			Model: "stories260k, 2P2D and 1P1D apart, 16 clients", Command: command, Runs: 1, Spread: strings.Join(use, "; ")})
		if err != nil {
			t.Fatal(err)
		}
	}
}
