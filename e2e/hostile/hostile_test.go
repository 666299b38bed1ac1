package hostile

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/internal/fleet"
)

func TestMain(m *testing.M) {
	if text := os.Getenv(actEnv); text != "" {
		os.Exit(attack(text))
	}
	os.Exit(cluster.Main(m))
}

// scene is a fleet that others use meanwhile, and the attacker.
type scene struct {
	*cluster.Router
	*attacker
	t testing.TB
}

// row is one attack.
type row struct {
	name   string
	before string // what it had got when nobody was asked for the fleet's secret
	do     func(t *testing.T, s *scene)
}

// TestHostile: each row is an attack by another user of the machine, on real
// processes. None gets what it is after, and nobody who uses the fleet
// meanwhile notices.
func TestHostile(t *testing.T) {
	s := &scene{t: t, attacker: newAttacker(t), Router: cluster.Up(t, "--device", "cpu", "--prefill", "2", "--decode", "2", "--threads", "1")}
	s.WaitServing(t, 20*time.Second, 2, 2)
	b := startBystanders(t, s.Router)
	for _, rows := range [][]row{workerRows, linkRows, portRows, requestRows} {
		for _, r := range rows {
			t.Run(r.name, func(t *testing.T) {
				s := &scene{Router: s.Router, attacker: &attacker{t, s.self}, t: t}
				answers := b.answers.Load()
				r.do(t, s)
				b.judge(t)
				t.Logf("refused; before: %s; %d bystanders answered", r.before, b.answers.Load()-answers)
			})
		}
	}
	b.stop()
	b.judge(t)
	t.Logf("%d bystanders' answers, all right", b.answers.Load())
	cluster.Wait(t, 10*time.Second, "ledgers empty", s.Idle)
}

// TestHeldPorts: with few files a process, and while a stranger holds as many idle
// connections to a port as he likes, the fleet is used, looked at, changed and joined.
// Before, each of these ports was full, or the process had no file left.
func TestHeldPorts(t *testing.T) {
	s := &scene{t: t, attacker: newAttacker(t), Router: cluster.UpWithFiles(t, 512, "--device", "cpu", "--decode", "2", "--threads", "1")}
	s.WaitServing(t, 20*time.Second, 1, 2)
	b := startBystanders(t, s.Router)
	host := func(url string) string { return strings.TrimPrefix(url, "http://") }
	nats, err := url.Parse(s.NATS)
	if err != nil {
		t.Fatal(err)
	}
	for name, addr := range map[string]string{"a prefill's HTTP port": host(s.member(fleet.Prefill).URL), "a decode's HTTP port": host(s.member(fleet.Decode).URL),
		"the admin port": host(s.Admin), "NATS": nats.Host} {
		t.Run(name, func(t *testing.T) {
			release := s.holds(800, addr)
			defer release()
			answers := b.answers.Load()
			cluster.Wait(t, 30*time.Second, "30 answers", func() error {
				if n := b.answers.Load() - answers; n < 30 {
					return fmt.Errorf("%d", n)
				}
				return nil
			})
			b.judge(t)
			if _, err := s.Fleet(); err != nil {
				t.Errorf("the admin port: %v", err)
			}
			late := s.Worker(t, fleet.Decode, "--id", "late", "--device", "cpu", "--threads", "1")
			s.WaitServing(t, 20*time.Second, 1, 3)
			late.Signal(syscall.SIGTERM)
			if code := late.Exit(t, 20*time.Second); code != 0 {
				t.Errorf("exit code %d", code)
			}
			s.WaitServing(t, 20*time.Second, 1, 2)
		})
	}
	b.stop()
	b.judge(t)
	cluster.Wait(t, 10*time.Second, "ledgers empty", s.Idle)
}

// bystanders ask all the time, and know what the answers are.
type bystanders struct {
	answers atomic.Int64
	quit    chan struct{}
	wg      sync.WaitGroup

	mu  sync.Mutex
	bad []string
}

func startBystanders(t *testing.T, r *cluster.Router) *bystanders {
	t.Helper()
	b := &bystanders{quit: make(chan struct{})}
	client := cluster.NewClient(t)
	type ask struct{ body, want string }
	var list []ask
	for i := range 20 {
		body := fmt.Sprintf(`{"model":"stories260k","prompt":"Once upon a time there were %d dogs","max_tokens":24,"ignore_eos":true,"stream":%t,"temperature":0.8,"seed":%d}`, i, i%2 == 0, i)
		got := cluster.Post(t.Context(), client, r.URL+"/v1/completions", body)
		if !got.Good() {
			t.Fatalf("undisturbed: %v", got)
		}
		list = append(list, ask{body, got.Text})
	}
	for n := range 4 {
		rng := rand.New(rand.NewPCG(uint64(n), 3))
		b.wg.Go(func() {
			for {
				select {
				case <-b.quit:
					return
				default:
				}
				a := list[rng.IntN(len(list))]
				ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
				got := cluster.Post(ctx, client, r.URL+"/v1/completions", a.body)
				cancel()
				b.answers.Add(1)
				if !got.Good() || got.Text != a.want {
					b.mu.Lock()
					b.bad = append(b.bad, fmt.Sprintf("%v\n got %q\nwant %q", got, got.Text, a.want))
					b.mu.Unlock()
					time.Sleep(50 * time.Millisecond) // a failure is told once or a few times
				}
			}
		})
	}
	t.Cleanup(b.stop) // of a test that gave up
	return b
}

// judge fails the test for what bystanders met since the last call.
func (b *bystanders) judge(t *testing.T) {
	t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, bad := range b.bad {
		t.Errorf("a bystander: %s", bad)
	}
	b.bad = nil
}

func (b *bystanders) stop() {
	select {
	case <-b.quit:
	default:
		close(b.quit)
	}
	b.wg.Wait()
}

// member is a worker that serves a role.
func (s *scene) member(role fleet.Role) *cluster.Instance {
	s.t.Helper()
	f, err := s.Fleet()
	if err != nil {
		s.t.Fatal(err)
	}
	for i := range f.Instances {
		if m := &f.Instances[i]; m.Role == role && m.State == fleet.Live {
			return m
		}
	}
	s.t.Fatalf("no %s worker", role)
	return nil
}

// refused checks that an answer is a 401 or a 403 in OpenAI's shape.
func refused(t *testing.T, what string, g got) {
	t.Helper()
	var e struct{ Error struct{ Message string } }
	if g.Status != http.StatusUnauthorized && g.Status != http.StatusForbidden || json.Unmarshal([]byte(g.Text), &e) != nil || e.Error.Message == "" {
		t.Errorf("%s: status %d, %.200s", what, g.Status, g.Text)
	}
}

const completion = `{"model":"stories260k","prompt":"Once upon a time","max_tokens":8,"temperature":0}`

// workerRows: workers' HTTP ports.
var workerRows = []row{
	{"a worker is asked directly", "an answer, whatever API keys the router asks for", func(t *testing.T, s *scene) {
		for _, role := range []fleet.Role{fleet.Prefill, fleet.Decode} {
			m := s.member(role)
			for path, body := range map[string]string{
				"/v1/completions": completion, "/v1/chat/completions": `{"model":"stories260k","messages":[{"role":"user","content":"hi"}]}`,
				"/tokenize": `{"prompt":"hi"}`, "/detokenize": `{"tokens":[5]}`, "/xpyd/v1/prefill": `{}`,
			} {
				refused(t, path, s.asks("POST", m.URL+path, body, nil))
				refused(t, path+" with a made-up token", s.asks("POST", m.URL+path, body, map[string]string{"x-xpyd-fleet": "3238efab.Wm_d2CqJCHqp8aO_uclNZHIYSc8Y0T3Y", "Authorization": "Bearer x"}))
			}
		}
	}},
	{"a worker is ordered about", "drained, and its role changed", func(t *testing.T, s *scene) {
		m := s.member(fleet.Decode)
		for path, body := range map[string]string{"/xpyd/v1/drain": "", "/xpyd/v1/undrain": "", "/xpyd/v1/role": `{"role":"prefill"}`,
			"/xpyd/v1/cache/flush": "", "/xpyd/v1/cache/pin": `{"prompt":"x"}`, "/xpyd/v1/profile": ""} {
			refused(t, path, s.asks("POST", m.URL+path, body, nil))
		}
		if now := s.member(fleet.Decode); now.ID != m.ID || now.Draining {
			t.Errorf("%s is %s, draining %t", now.ID, now.Role, now.Draining)
		}
	}},
	{"a worker is read", "every request's id and state", func(t *testing.T, s *scene) {
		m := s.member(fleet.Decode)
		for _, path := range []string{"/debug/ledger", "/debug/steps", "/xpyd/v1/cache", "/xpyd/v1/cache/pin", "/xpyd/v1/profile", "/xpyd/v1/lifeline", "/v1/models", "/version", "/query"} {
			refused(t, path, s.asks("GET", m.URL+path, "", nil))
		}
		if g := s.asks("GET", m.URL+"/health", "", nil); g.Status != 200 {
			t.Errorf("/health is for everybody: %d", g.Status)
		}
	}},
	{"a large body for nobody", "64 MiB read from anybody", func(t *testing.T, s *scene) {
		m := s.member(fleet.Decode)
		addr := strings.TrimPrefix(m.URL, "http://")
		g := s.does(act{Do: "raw", Addrs: []string{addr}, Body: "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 60000000\r\n\r\n" + strings.Repeat(" ", 64<<10)})
		if !strings.HasPrefix(g.Text, "HTTP/1.1 401") {
			t.Errorf("before its body came: %.100q %s", g.Text, g.Err)
		}
	}},
}
