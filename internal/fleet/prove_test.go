package fleet_test

import (
	"bytes"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/netip"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/trust"
)

func ring(t *testing.T, secrets ...trust.Secret) *trust.Ring {
	t.Helper()
	r, err := trust.NewRing(secrets...)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func set(t *testing.T, r *trust.Ring, secrets ...trust.Secret) {
	t.Helper()
	if err := r.Set(secrets...); err != nil {
		t.Fatal(err)
	}
}

// lines is a log that a test reads while it is written.
type lines struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *lines) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.buf.String(), text)
}

func (l *lines) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

// member connects with a ring.
func member(t *testing.T, url string, r *trust.Ring, log *slog.Logger) *fleet.Conn {
	t.Helper()
	return join(t, fleet.ConnConfig{URL: url, Ring: r, Log: log})
}

func up(t *testing.T, what string, c *fleet.Conn) {
	t.Helper()
	within(t, what+" does not come in", func() bool { return c.Link().Up })
}

// TestSecretOpens: who has the secret comes in, whoever has not does not, and
// neither end fills its log with it. Before, a secret of each start was in the URL.
func TestSecretOpens(t *testing.T) {
	noLeak(t)
	one, two := trust.NewSecret(), trust.NewSecret()
	var server, stray lines
	s := startServer(t, fleet.ServerConfig{Ring: ring(t, one), Log: server.logger()})
	if url := s.ClientURL(); strings.Contains(url, "@") {
		t.Errorf("credentials in %s", url)
	}
	up(t, "a member", member(t, s.ClientURL(), ring(t, one), nil))
	up(t, "who knows a newer one too", member(t, s.ClientURL(), ring(t, two, one), nil))
	host := hostOf(t, s.ClientURL())
	outside := []*fleet.Conn{
		member(t, s.ClientURL(), ring(t, two), stray.logger()),
		connect(t, s.ClientURL()),
		connect(t, "nats://"+one.ID()+":"+one.Token(trust.Cluster, "")+"@"+host),
	}
	within(t, "nobody is refused", func() bool {
		return server.count("wrong fleet secret") > 0 && stray.count("does not know this fleet secret") > 0
	})
	time.Sleep(700 * time.Millisecond) // for more attempts of each
	for i, c := range outside {
		if c.Link().Up {
			t.Errorf("stranger %d came in", i)
		}
	}
	if n := server.count("\n") - server.count("level=INFO"); n != 1 {
		t.Errorf("the server said %d lines:\n%s", n, &server.buf)
	}
	if n := stray.count("\n"); n != 1 || stray.count(host) != 1 || stray.count("copy its join-url here again") != 1 {
		t.Errorf("the stray said %d lines:\n%s", n, &stray.buf)
	}
}

// TestNobodyBetween: who listens in the server's place is told nothing, whatever he
// says, and who asks in a member's place is not let in, though he knows the secret's
// ID. Before, he passed the server's nonce on to a member, and what that signed back.
func TestNobodyBetween(t *testing.T) {
	noLeak(t)
	one, own := trust.NewSecret(), trust.NewSecret()
	var log lines
	s := startServer(t, fleet.ServerConfig{Ring: ring(t, one), Log: log.logger()})
	asks := func(conf *tls.Config) string { // a client who knows the ID, and no more
		t.Helper()
		conn, err := net.Dial("tcp", hostOf(t, s.ClientURL()))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
		if conf != nil {
			conn = tls.Client(conn, conf)
		}
		fmt.Fprintf(conn, "CONNECT {}\r\nPING\r\n")
		heard, _ := io.ReadAll(conn)
		return string(heard)
	}
	if heard := asks(nil); strings.Contains(heard, "INFO") {
		t.Errorf("without TLS: %q", heard)
	}
	conf, err := trust.PinnedClient(own)
	if err != nil {
		t.Fatal(err)
	}
	conf.ServerName, conf.VerifyConnection = one.ID()+".xpyd", nil
	if heard := asks(conf); heard != "" {
		t.Errorf("by another key: %q", heard)
	}
	conf.Certificates = nil
	if heard := asks(conf); heard != "" {
		t.Errorf("by no key: %q", heard)
	}
	if conf, err = trust.PinnedClient(one); err != nil {
		t.Fatal(err)
	}
	if heard := asks(conf); !strings.Contains(heard, "INFO") || !strings.Contains(heard, "PONG") {
		t.Errorf("a member: %q", heard)
	}
	within(t, "refusals are told", func() bool { return log.count("wrong fleet secret") > 0 })

	stolen, err := trust.NewRing(own)
	if err != nil {
		t.Fatal(err)
	}
	impostor, err := stolen.PinnedServer().GetConfigForClient(&tls.ClientHelloInfo{ServerName: own.ID() + ".xpyd"})
	if err != nil {
		t.Fatal(err)
	}
	for name, serve := range map[string]func(net.Conn) string{
		"says what a server says": func(c net.Conn) string {
			fmt.Fprintf(c, "INFO {\"nonce\":\"anything\",\"max_payload\":1024}\r\n")
			return listen(c)
		},
		"has a key of his own": func(c net.Conn) string { return listen(tls.Server(c, impostor)) },
	} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		heard := make(chan string, 1)
		go func() {
			victim, err := l.Accept()
			if err != nil {
				heard <- err.Error()
				return
			}
			defer victim.Close()
			heard <- serve(victim)
		}()
		c := member(t, "nats://"+l.Addr().String(), ring(t, one), nil)
		if said := <-heard; strings.Contains(said, "CONNECT") || c.Link().Up {
			t.Errorf("who %s heard %q; the member's link is up: %t", name, said, c.Link().Up)
		}
		l.Close()
	}
}

// listen returns what a connection says until it ends or says nothing more.
func listen(c net.Conn) string {
	_ = c.SetReadDeadline(time.Now().Add(time.Second))
	heard, _ := io.ReadAll(c)
	return string(heard)
}

// TestStrangersAtTheDoor: connections that say nothing are bounded, and keep no
// member out.
func TestStrangersAtTheDoor(t *testing.T) {
	noLeak(t)
	one := trust.NewSecret()
	s := startServer(t, fleet.ServerConfig{Ring: ring(t, one)})
	before := runtime.NumGoroutine()
	for range 3 * fleet.MaxGuests {
		conn, err := net.Dial("tcp", hostOf(t, s.ClientURL()))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
	}
	up(t, "a member among them", member(t, s.ClientURL(), ring(t, one), nil))
	if n := runtime.NumGoroutine() - before; n > fleet.MaxGuests+100 {
		t.Errorf("%d goroutines for strangers", n)
	}
}

// TestRenew: a secret is replaced under connections that stay, until the older is
// retired; then who has the newer comes in again.
func TestRenew(t *testing.T) {
	noLeak(t)
	one, two := trust.NewSecret(), trust.NewSecret()
	servers := ring(t, one)
	s := startServer(t, fleet.ServerConfig{Ring: servers})
	renew := func(secrets ...trust.Secret) {
		t.Helper()
		set(t, servers, secrets...)
		if err := s.Renew(); err != nil {
			t.Fatal(err)
		}
	}
	told, forgotten := ring(t, one), ring(t, one)
	a, b := member(t, s.ClientURL(), told, nil), member(t, s.ClientURL(), forgotten, nil)
	up(t, "a", a)
	up(t, "b", b)
	renew(two, one)
	set(t, told, two, one)
	newcomer := member(t, s.ClientURL(), ring(t, two, one), nil)
	up(t, "a newcomer", newcomer)
	for _, c := range []*fleet.Conn{a, b} {
		if l := c.Link(); !l.Up || l.Reconnects != 0 {
			t.Errorf("while both are in force: %+v", l)
		}
	}
	renew(two)
	within(t, "a does not come again", func() bool { return a.Link().Up && a.Link().Reconnects == 1 })
	within(t, "b stays", func() bool { return !b.Link().Up })
	if l := newcomer.Link(); l.Reconnects != 0 {
		t.Errorf("who came with the new one is disconnected: %+v", l)
	}
	set(t, forgotten, two)
	if err := b.Rejoin(s.ClientURL()); err != nil {
		t.Fatal(err)
	}
	up(t, "b with the new secret", b)
}

// TestRejoin: another server is gone to without a restart.
func TestRejoin(t *testing.T) {
	noLeak(t)
	one := trust.NewSecret()
	a, b := startServer(t, fleet.ServerConfig{Ring: ring(t, one)}), startServer(t, fleet.ServerConfig{Ring: ring(t, one)})
	c := member(t, a.ClientURL(), ring(t, one), nil)
	w := watch(t, fleet.WatcherConfig{Conn: member(t, b.ClientURL(), ring(t, one), nil)})
	announce(t, c, instance("p", fleet.Prefill))
	up(t, "the member", c)
	if err := c.Rejoin("http://x"); err == nil {
		t.Error("nonsense is taken")
	}
	plain := startServer(t, fleet.ServerConfig{User: "u", Password: "p"})
	if err := c.Rejoin(plain.ClientURL()); err == nil || !strings.Contains(err.Error(), "takes a restart") {
		t.Errorf("a server that is no router's own: %v", err)
	}
	if err := c.Rejoin(a.ClientURL()); err != nil {
		t.Error("the same server", err)
	}
	if n, err := c.Reconnects(); n != 0 || err != nil {
		t.Errorf("left the same server %d times, %v", n, err)
	}
	if err := c.Rejoin(b.ClientURL()); err != nil {
		t.Fatal(err)
	}
	eventually(t, w, "p at the other server", is("p", fleet.Live))
}

// clusterSecret: servers of one secret find each other, also while it is
// replaced in one after the other, and when one comes again after that.
func clusterSecret(t *testing.T) {
	one, two := trust.NewSecret(), trust.NewSecret()
	ringA, ringB := ring(t, one), ring(t, one)
	a, err := fleet.StartServer(fleet.ServerConfig{Ring: ringA, ClusterListen: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close() })
	again := fleet.ServerConfig{Listen: hostOf(t, a.ClientURL()), Ring: ringA, ClusterListen: hostOf(t, a.ClusterURL())}
	b := startServer(t, fleet.ServerConfig{Ring: ringB, ClusterListen: "127.0.0.1:0", ClusterRoutes: []string{a.ClusterURL()}})
	w := watch(t, fleet.WatcherConfig{Conn: member(t, a.ClientURL(), ringA, nil)})
	announce(t, member(t, b.ClientURL(), ringB, nil), instance("p", fleet.Prefill))
	eventually(t, w, "join", is("p", fleet.Live))
	heard := func(what string) {
		t.Helper()
		from := time.Now()
		within(t, "no route "+what, func() bool { return w.Snapshot().Get("p").Heard.After(from) })
	}
	for _, step := range []struct {
		r   *trust.Ring
		s   *fleet.Server
		now []trust.Secret
	}{{ringA, a, []trust.Secret{two, one}}, {ringB, b, []trust.Secret{two, one}}, {ringB, b, []trust.Secret{two}}, {ringA, a, []trust.Secret{two}}} {
		set(t, step.r, step.now...)
		if err := step.s.Renew(); err != nil {
			t.Fatal(err)
		}
		heard("while the secret is replaced")
	}
	a.Close()
	if a, err = fleet.StartServer(again); err != nil {
		t.Fatal(err)
	}
	heard("with the new secret")
	var log lines
	stray := startServer(t, fleet.ServerConfig{Ring: ring(t, one), ClusterListen: "127.0.0.1:0", ClusterRoutes: []string{a.ClusterURL()}, Log: log.logger()})
	time.Sleep(200 * time.Millisecond)
	if n := stray.Routes(); n > 0 {
		t.Errorf("a server of the retired secret has %d routes", n)
	}
}

// TestWrongSecretLines: one line a minute, with what came since the last.
func TestWrongSecretLines(t *testing.T) {
	var log lines
	r := fleet.NewRefusals(log.logger())
	at := time.Unix(1e9, 0)
	for i := range 3000 {
		r.Add(net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 1)), at)
	}
	r.Add(&net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}, at.Add(59*time.Second))
	if log.count("\n") != 1 || log.count("1 connection with a wrong fleet secret from 10.0.0.0 in the last minute") != 1 {
		t.Errorf("%s", &log.buf)
	}
	r.Add(nil, at.Add(time.Minute))
	if log.count("\n") != 2 || log.count("3001 connections with a wrong fleet secret from 10.0.0.1, 10.0.0.10, 10.0.0.11, 10.0.0.12 and 60 more hosts in") != 1 {
		t.Errorf("%s", &log.buf)
	}
}

func TestRetryDelay(t *testing.T) {
	f := func(n int, refused bool, want time.Duration) {
		t.Helper()
		least, most := time.Hour, time.Duration(0)
		for range 200 {
			d := fleet.RetryDelay(n, refused)
			least, most = min(least, d), max(most, d)
		}
		if least < want*3/4 || least > want*85/100 || most < want*115/100 || most > want*5/4 {
			t.Errorf("attempt %d: %v to %v, want a quarter less and more than %v", n, least, most, want)
		}
	}
	f(1, false, 100*time.Millisecond)
	f(3, false, 400*time.Millisecond)
	f(1000, false, 1600*time.Millisecond) // within the three seconds after which silence kills
	f(math.MaxInt, false, 1600*time.Millisecond)
	f(1, true, 100*time.Millisecond)
	f(1000, true, 5*time.Second)
}
