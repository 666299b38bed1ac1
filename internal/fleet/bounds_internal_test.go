package fleet

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/kvlayout"
)

func twoSecrets(t *testing.T) *trust.Ring {
	t.Helper()
	r, err := trust.NewRing(trust.NewSecret(), trust.NewSecret())
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestConnURLs: which servers a process connects to, whether by a door, and what is refused without
// showing a password.
func TestConnURLs(t *testing.T) {
	ring := twoSecrets(t)
	const far = "nats://192.0.2.1:4222"
	for _, c := range []struct {
		cfg  ConnConfig
		want string // joined; "" is refused
		door bool
	}{
		{ConnConfig{}, "", false},
		{ConnConfig{URL: " , "}, "", false},
		{ConnConfig{URL: "127.0.0.1:4222"}, "nats://127.0.0.1:4222", false},
		{ConnConfig{URL: "localhost:1, [::1]:2,"}, "nats://localhost:1 nats://[::1]:2", false},
		{ConnConfig{URL: "http://127.0.0.1:1"}, "", false},
		{ConnConfig{URL: "nats://:4222"}, "", false},
		{ConnConfig{URL: "nats://%zz"}, "", false},
		{ConnConfig{URL: far}, "", false},
		{ConnConfig{URL: "127.0.0.1:1," + far}, "", false},
		{ConnConfig{URL: far, Insecure: true}, far, false},
		{ConnConfig{URL: far, CredsFile: "x"}, far, false},
		{ConnConfig{URL: far, TLSCert: "x"}, far, false},
		{ConnConfig{URL: far, TLSCA: "x"}, far, false},
		{ConnConfig{URL: far, TLSKey: "x"}, "", false},
		{ConnConfig{URL: "tls://192.0.2.1:1"}, "tls://192.0.2.1:1", false},
		{ConnConfig{URL: "nats://u:secret@192.0.2.1:1"}, "nats://u:secret@192.0.2.1:1", false},
		{ConnConfig{URL: far, Ring: ring}, far, true},
		{ConnConfig{URL: "127.0.0.1:1", Ring: ring}, "nats://127.0.0.1:1", true},
		{ConnConfig{URL: far, Ring: ring, Insecure: true}, far, false},
		{ConnConfig{URL: far, Ring: ring, CredsFile: "x"}, far, false},
		{ConnConfig{URL: far, Ring: ring, TLSCA: "x"}, far, true},
		{ConnConfig{URL: "tls://192.0.2.1:1", Ring: ring}, "tls://192.0.2.1:1", false},
		{ConnConfig{URL: far + ",nats://192.0.2.2:1", Ring: ring}, far + " nats://192.0.2.2:1", true},
		{ConnConfig{URL: far + ",nats://u:secret@192.0.2.2:1", Ring: ring}, "", false},
	} {
		urls, door, err := c.cfg.urls()
		if got := strings.Join(urls, " "); got != c.want || door != c.door || (err == nil) != (c.want != "") || (c.cfg.Validate() == nil) != (err == nil) {
			t.Errorf("%+v: %q, door %t, %v", c.cfg, got, door, err)
		}
		if c.want == "" {
			if conn, err := Connect(c.cfg); err == nil || conn != nil {
				t.Errorf("%+v: connects", c.cfg)
			}
		}
		if err != nil && strings.Contains(err.Error(), "secret@") {
			t.Errorf("a password is shown: %v", err)
		}
	}
	for _, cfg := range []ConnConfig{ // files that cannot be read
		{URL: far, Ring: ring, TLSCert: "/nowhere/cert", TLSKey: "/nowhere/key", TLSCA: "/nowhere/ca"},
		{URL: far, TLSCA: "/nowhere/ca"}, {URL: far, TLSCert: "/nowhere/cert", TLSKey: "/nowhere/key"}, {URL: far, CredsFile: "/nowhere/creds"},
	} {
		cfg.Log = slog.New(slog.DiscardHandler)
		if conn, err := Connect(cfg); err == nil || conn != nil || !strings.Contains(err.Error(), "/nowhere/") {
			t.Errorf("%+v: connects, %v", cfg, err)
		}
	}
	if !sameServer("nats://u:p@h:1", "tls://h:1") || sameServer("nats://h:1", "nats://h:2") || hosts([]string{"nats://u:p@a:1", "%zz", "tls://b:2"}) != "a:1,b:2" {
		t.Errorf("hosts %s", hosts([]string{"nats://u:p@a:1", "%zz", "tls://b:2"}))
	}
	for host, is := range map[string]bool{"localhost": true, "127.0.0.1": true, "127.1.2.3": true, "::1": true, "": false, "0.0.0.0": false, "192.0.2.1": false, "localhost.example": false} {
		if loopback(host) != is {
			t.Errorf("%q is this machine: %t", host, !is)
		}
	}
}

// TestServerSettings: what a router's own server may listen on, and the credentials of its routes.
func TestServerSettings(t *testing.T) {
	ring := twoSecrets(t)
	for _, c := range []struct {
		cfg ServerConfig
		ok  bool
	}{
		{ServerConfig{}, true}, {ServerConfig{Listen: "127.0.0.1:0"}, true}, {ServerConfig{Listen: "127.0.0.1:65535"}, true}, {ServerConfig{Listen: "127.0.0.1:65536"}, false},
		{ServerConfig{Listen: "127.0.0.1:-1"}, false}, {ServerConfig{Listen: "127.0.0.1"}, false}, {ServerConfig{Listen: "127.0.0.1:x"}, false},
		{ServerConfig{Listen: "0.0.0.0:1"}, false}, {ServerConfig{Listen: ":1"}, false}, {ServerConfig{Listen: ":1", User: "u"}, true}, {ServerConfig{Listen: ":1", TLSCert: "x"}, true},
		{ServerConfig{Listen: ":1", TLSCA: "x"}, false}, {ServerConfig{Listen: ":1", Insecure: true}, true}, {ServerConfig{Listen: ":1", Ring: ring}, true}, {ServerConfig{Listen: ":1", ClusterUser: "u"}, false},
		{ServerConfig{ClusterRoutes: []string{"nats-route://h:1"}}, false}, {ServerConfig{ClusterListen: "127.0.0.1:0", ClusterRoutes: []string{"nats-route://h:1"}}, true},
		{ServerConfig{ClusterListen: "127.0.0.1:0", ClusterRoutes: []string{"nats-route://h:1", "h"}}, false}, {ServerConfig{ClusterListen: "127.0.0.1:0", ClusterRoutes: []string{"nats-route://%zz"}}, false},
		{ServerConfig{ClusterListen: ":1"}, false}, {ServerConfig{ClusterListen: ":1", User: "u"}, false}, {ServerConfig{ClusterListen: ":1", ClusterUser: "u"}, true}, {ServerConfig{ClusterListen: ":1", Ring: ring}, true},
		{ServerConfig{ClusterListen: "127.0.0.1:70000"}, false},
	} {
		if err := c.cfg.Validate(); (err == nil) != c.ok {
			t.Errorf("%+v: %v", c.cfg, err)
		}
	}
	for _, r := range []*trust.Ring{nil, ring} {
		if s, err := StartServer(ServerConfig{Ring: r, TLSCert: "/none/cert", TLSKey: "/none/key"}); err == nil || !strings.Contains(err.Error(), "embedded nats tls") {
			t.Errorf("a certificate that is not there: %v, %v", s, err)
		}
	}
	older := ring.Secrets()[1]
	for _, c := range []struct {
		cfg  ServerConfig
		user string
	}{
		{ServerConfig{}, ""}, {ServerConfig{ClusterUser: "cu", ClusterPassword: "cp"}, "cu:cp"}, {ServerConfig{ClusterUser: "cu", ClusterPassword: "cp", Ring: ring}, "cu:cp"},
		{ServerConfig{Ring: ring}, older.ID() + ":" + older.Token(trust.Cluster, "")},
	} {
		c.cfg.ClusterRoutes = []string{"nats-route://a:1", "nats-route://u:p@b:2"}
		got, err := c.cfg.routes()
		if err != nil || len(got) != 2 || got[0].Host != "a:1" || got[0].User.String() != c.user || got[1].Host != "b:2" || got[1].User.String() != "u:p" {
			t.Errorf("%+v: %v, %v", c.cfg, got, err)
		}
	}
	for _, route := range []string{"nats-route://%zz", "nats-route://u:p%zz@h:1"} {
		bad := ServerConfig{ClusterRoutes: []string{"nats-route://a:1", route}}
		if got, err := bad.routes(); err == nil || strings.Contains(err.Error(), route) {
			t.Errorf("%s: %v, %v", route, got, err)
		}
	}
	routed, err := StartServer(ServerConfig{Ring: ring, ClusterListen: "127.0.0.1:0", ClusterRoutes: []string{"nats-route://127.0.0.1:1"}})
	if err != nil {
		t.Fatal(err)
	}
	defer routed.Close()
	if err := routed.Renew(); err != nil {
		t.Error(err)
	}
	routed.cfg.ClusterRoutes = []string{"nats-route://%zz"}
	if err := routed.Renew(); err == nil || !strings.Contains(err.Error(), "embedded nats: ") {
		t.Errorf("a route to nowhere is renewed: %v", err)
	}
	s := &Server{cfg: ServerConfig{}}
	for _, c := range []struct{ addr, advertise, want string }{
		{"127.0.0.1:5", "", "nats://127.0.0.1:5"}, {"0.0.0.0:5", "", "nats://127.0.0.1:5"}, {"[::]:5", "", "nats://127.0.0.1:5"}, {"0.0.0.0:5", "h", "nats://h:5"}, {"192.0.2.1:5", "h", "nats://192.0.2.1:5"}, {"[2001:db8::1]:5", "", "nats://[2001:db8::1]:5"},
	} {
		addr, err := net.ResolveTCPAddr("tcp", c.addr)
		if err != nil {
			t.Fatal(err)
		}
		s.cfg.Advertise = c.advertise
		if got := s.url("nats", addr, "", "p"); got != c.want {
			t.Errorf("%+v: %s", c, got)
		}
		if got := s.url("nats", addr, "u", "p"); got != strings.Replace(c.want, "://", "://u:p@", 1) {
			t.Errorf("%+v with a user: %s", c, got)
		}
	}
}

// TestFatal: the first fatal error of the embedded server is kept, with the setting that is at fault
// and its cause; with a door the server itself listens for nobody.
func TestFatal(t *testing.T) {
	cause := errors.New("Taken")
	for _, c := range []struct {
		door   bool
		format string
		want   string
	}{
		{false, "Error listening on port: %s, %q", "fleet.listen: "}, {true, "Error listening on port: %s, %q", ""},
		{true, "Error listening on router port: %d - %v", "fleet.cluster_listen: "}, {false, "Other: %v", "other: "},
	} {
		l := &serverLog{log: slog.New(slog.DiscardHandler), door: c.door}
		l.Fatalf(c.format, cause)
		err := l.first()
		if (err == nil) != (c.want == "") || err != nil && (!strings.HasPrefix(err.Error(), c.want) || !errors.Is(err, cause) || !strings.Contains(err.Error(), "taken")) {
			t.Errorf("%s: %v", c.format, err)
		}
		l.Fatalf("Second")
		if again := l.first(); err != nil && again != err || again == nil {
			t.Errorf("%s: then %v", c.format, again)
		}
	}
}

// TestAnnounceRefuses: nothing is announced that others would not take.
func TestAnnounceRefuses(t *testing.T) {
	for name, change := range map[string]func(*AnnouncerConfig){
		"heartbeat -1ns": func(c *AnnouncerConfig) { c.Heartbeat = -1 },
		fmt.Sprintf("heartbeat %v", MaxHeartbeat+1): func(c *AnnouncerConfig) { c.Heartbeat = MaxHeartbeat + 1 },
		"epoch": func(c *AnnouncerConfig) { c.Instance.Epoch = 0 },
		"role":  func(c *AnnouncerConfig) { c.Instance.Role = "x" },
	} {
		cfg := AnnouncerConfig{Instance: *worker("a", 1)}
		change(&cfg)
		if a, err := Announce(cfg); err == nil || a != nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
	before := uint64(time.Now().UnixMicro())
	if e := NewEpoch(); e < before || e > uint64(time.Now().UnixMicro()) {
		t.Errorf("epoch %d", e)
	}
}

// TestBounds: each bound of what a peer may say, at it and just beyond.
func TestBounds(t *testing.T) {
	f := func(ok bool, change func(*Instance)) {
		t.Helper()
		i := *worker("a", 1)
		change(&i)
		if err := i.Validate(); (err == nil) != ok {
			t.Errorf("%+v: %v", i, err)
		}
	}
	long := strings.Repeat("x", maxFieldBytes)
	f(true, func(i *Instance) { i.Model, i.Build = long, "ä ö" })
	f(false, func(i *Instance) { i.Model = long + "x" })
	f(true, func(i *Instance) { i.Blocks, i.MaxBatch, i.Load.Running = maxCount, 0, maxCount })
	f(false, func(i *Instance) { i.Blocks = maxCount + 1 })
	f(false, func(i *Instance) { i.Load.QueuedTokens = maxCount + 1 })
	f(true, func(i *Instance) { i.Load.KVUsed = 1 })
	f(false, func(i *Instance) { i.Load.KVUsed = -0.1 })
	f(true, func(i *Instance) { i.ProtocolMin, i.ProtocolMax = 2, 2 })
	f(true, func(i *Instance) { i.URL = "https://h" })
	f(false, func(i *Instance) { i.URL = "http://" })
	f(false, func(i *Instance) { i.URL = "http://%zz" })
	for _, set := range []func(*Instance, string){func(i *Instance, s string) { i.KVAddr = s }, func(i *Instance, s string) { i.Bootstrap = s },
		func(i *Instance, s string) { i.KVEvents = s }, func(i *Instance, s string) { i.KVReplay = s }} {
		for addr, ok := range map[string]bool{"": true, "h:1": true, "h:65535": true, "[::1]:9": true, "h:0": false, "h:65536": false, ":1": false, "h": false, "h:x": false} {
			f(ok, func(i *Instance) { set(i, addr) })
		}
	}
	f(true, func(i *Instance) { i.Dialect, i.Role = "openai", Decode })
	f(false, func(i *Instance) { i.Dialect, i.Role = "openai", Prefill })
	f(false, func(i *Instance) { i.Layout.Groups = "[" })
	f(true, func(i *Instance) { i.Layout = kvlayout.Plain(2, 2, 4, 16, "f32").Form() })
	f(false, func(i *Instance) { i.Layout.BlockTokens = -1 })
	f(true, func(i *Instance) { // a text, but not bounded like one
		l := kvlayout.Plain(1, 2, 4, 16, "f32")
		for n := 1; len(l.Form().Groups) <= maxFieldBytes; n++ {
			g := l.Groups[0]
			g.Layers, g.Window = kvlayout.Run(n, 1), n
			l.Groups = append(l.Groups, g)
		}
		i.Layout = l.Form()
	})
	f(true, func(i *Instance) {
		i.KVWays = map[string]string{}
		for n := range maxWays {
			i.KVWays[fmt.Sprint("w", n)] = long
		}
	})
	for payload, want := range map[string]time.Duration{"0": 0, "7": 7, "9223372036854775807": 1<<63 - 1, "-1": -1, "": -1, "9223372036854775808": -1, "1x": -1, strings.Repeat("0", 20) + "1": -1, strings.Repeat("0", 19) + "1": 1} {
		if got, err := decodeEcho([]byte(payload)); (err == nil) != (want >= 0) || err == nil && got != want {
			t.Errorf("%q: %d, %v", payload, got, err)
		}
	}
	if clip(strings.Repeat("x", maxIDBytes)) != strings.Repeat("x", maxIDBytes) || clip(strings.Repeat("x", maxIDBytes-1)+"ä") != strings.Repeat("x", maxIDBytes-1)+"..." {
		t.Error(clip(strings.Repeat("x", maxIDBytes-1) + "ä"))
	}
}

// TestAddStaticRefuses: why a member that does not announce itself is not taken in.
func TestAddStaticRefuses(t *testing.T) {
	w, err := Watch(WatcherConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	f := func(want string, i *Instance, source Source) {
		t.Helper()
		if err := w.AddStatic(*i, source); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	f("announces itself", worker("a", 5), NATS)
	f("announces itself", worker("a", 5), "")
	bad := *worker("a", 5)
	bad.URL = "x"
	f("url", &bad, "file")
	f("", worker("a", 5), "file")
	f("", worker("a", 5), "file")
	f("which is newer than 4", worker("a", 4), "file")
	if !w.Remove("a", "test") || w.Remove("nobody", "test") {
		t.Error("remove")
	}
	f("it was taken out at epoch 5", worker("a", 5), "file")
	f("", worker("a", 6), "file")
	if ok, err := w.Learn(*worker("a", 6), bad); ok || err == nil {
		t.Errorf("learnt %v", err)
	}
	more := *worker("a", 6)
	more.Model = "more"
	if ok, err := w.Learn(*worker("a", 6), more); !ok || err != nil || w.Snapshot().Get("a").Model != "more" {
		t.Errorf("%t, %v, %+v", ok, err, w.Snapshot().Get("a"))
	}
	w.change(func(now time.Time) { w.reg.announce(worker("b", 5), NATS, now) })
	f("taken by a worker that announced itself", worker("b", 4), Static)
	f("taken by a worker that announced itself", worker("b", 5), Static)
	f("b is a live worker of the fleet", worker("b", 6), Admin)
	f("", worker("b", 6), Static)
	w.change(func(now time.Time) {
		w.reg.announce(worker("c", 5), NATS, now)
		w.reg.end(w.reg.members["c"], Dead, causeSilence, "", now)
	})
	f("", worker("c", 5), Static) // it is over
	f("", worker("c", 6), Admin)  // and no worker of the fleet
	w.change(func(now time.Time) {
		w.reg.apply(&message{kind: kindRevoked, revoked: []Revocation{{ID: "d", At: 1}}}, now)
	})
	f("revoked", worker("d", 5), Static)
	if ok, err := w.Learn(*worker("a", 6), *worker("a", 6)); ok || err != nil {
		t.Errorf("learnt of what it is no longer: %t, %v", ok, err)
	}
}

// TestTold: who comes, comes back, says goodbye or was asked to leave is no reason to warn; who
// is replaced only to a router.
func TestTold(t *testing.T) {
	for _, leads := range []bool{false, true} {
		told(t, leads)
	}
}

func told(t *testing.T, leads bool) {
	t.Helper()
	var out bytes.Buffer
	w, err := Watch(WatcherConfig{Log: slog.New(slog.NewTextHandler(&out, nil)), Leads: leads})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	for _, c := range []struct {
		state    State
		cause    string
		draining bool
		warns    bool
	}{
		{Live, causeJoin, false, false}, {Live, causeBack, false, false}, {Suspect, causeSilence, false, false}, {Gone, causeBye, false, false}, {Gone, causeForget, false, false},
		{Dead, causeSilence, false, true}, {Unheard, causeSilence, false, true}, {Dead, causeReport, false, true}, {Dead, causeReport, true, false},
		{Gone, causeReplace, false, leads}, {Live, causeTwice, false, leads}, {Gone, causeRemove, false, true}, {Gone, causeRevoked, false, true}, {Gone, causeFull, false, true},
	} {
		for _, reason := range []string{"", "why"} {
			out.Reset()
			e := &untold{event: event{id: "a", role: Decode, epoch: 3, state: c.state, cause: c.cause, reason: reason, draining: c.draining}}
			if !w.tell(e, time.Now()) {
				t.Errorf("%+v: too early", c)
			}
			line := out.String()
			want := fmt.Sprintf("msg=fleet id=a role=decode epoch=3 state=%s cause=%s", c.state, c.cause)
			if reason != "" {
				want += " reason=why"
			}
			if strings.Contains(line, "level=WARN") != c.warns || !strings.HasSuffix(line, want+"\n") {
				t.Errorf("%+v: %s", c, line)
			}
		}
	}
}

// TestServerCredentials: clients show what is configured, or what nobody can guess, and so do routes.
func TestServerCredentials(t *testing.T) {
	for _, c := range []struct {
		cfg           ServerConfig
		client, route string // "user:password"; "…" for a password that was made
	}{
		{ServerConfig{}, "xpyd:…", ":"}, {ServerConfig{User: "u", Password: "p"}, "u:p", ":"}, {ServerConfig{User: "u"}, "u:", ":"}, {ServerConfig{Password: "p"}, ":p", ":"}, {ServerConfig{Insecure: true}, ":", ":"},
		{ServerConfig{ClusterListen: "127.0.0.1:0"}, "xpyd:…", "xpyd:…"}, {ServerConfig{ClusterListen: "127.0.0.1:0", ClusterUser: "cu", ClusterPassword: "cp"}, "xpyd:…", "cu:cp"},
		{ServerConfig{ClusterListen: "127.0.0.1:0", User: "u", Password: "p", ClusterPassword: "cp"}, "u:p", ":cp"}, {ServerConfig{ClusterListen: "127.0.0.1:0", Insecure: true}, ":", ":"},
	} {
		o, err := c.cfg.options(nil)
		if err != nil {
			t.Fatal(err)
		}
		for shown, want := range map[*string]string{new(o.Username + ":" + o.Password): c.client, new(o.Cluster.Username + ":" + o.Cluster.Password): c.route} {
			if user, made := strings.CutSuffix(want, "…"); made && strings.HasPrefix(*shown, user) && len(*shown) >= len(user)+20 {
				continue
			}
			if *shown != want {
				t.Errorf("%+v: %s, want %s", c.cfg, *shown, want)
			}
		}
		if again, err := c.cfg.options(nil); err != nil || strings.HasSuffix(c.client, "…") == (again.Password == o.Password) {
			t.Errorf("%+v: %q again, %v", c.cfg, again.Password, err)
		}
	}
}

// TestToldOnce: each event is logged once, when it comes.
func TestToldOnce(t *testing.T) {
	var out bytes.Buffer
	w, err := Watch(WatcherConfig{Log: slog.New(slog.NewTextHandler(&out, nil))})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	for _, c := range []struct {
		do   func() bool
		want string // the lines that are new
	}{
		{func() bool { return w.AddStatic(*worker("a", 5), Static) == nil }, "a join"},
		{func() bool { return w.AddStatic(*worker("b", 5), Static) == nil }, "b join"},
		{func() bool { w.ReportDead("a", 5, "why"); return true }, "a report"},
		{func() bool { w.ReportDead("a", 4, "why"); return true }, ""},
		{func() bool { return w.Remove("a", "why") }, "a removed"},
		{func() bool { return !w.Remove("a", "why") }, ""},
	} {
		out.Reset()
		if !c.do() {
			t.Errorf("%q: it fails", c.want)
		}
		var got []string
		for line := range strings.Lines(out.String()) {
			_, rest, _ := strings.Cut(line, "id=")
			id, rest, _ := strings.Cut(rest, " ")
			_, rest, _ = strings.Cut(rest, "cause=")
			cause, _, _ := strings.Cut(strings.TrimSpace(rest), " ")
			got = append(got, id+" "+cause)
		}
		if strings.Join(got, ", ") != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
}

// TestComplain: a link's errors are told now and then, and anew once it was up; refusals are counted
// and told once in a minute, with what to do.
func TestComplain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		log := slog.New(slog.NewTextHandler(&out, nil))
		c := &Conn{cfg: ConnConfig{Ring: twoSecrets(t)}, log: log, hosts: "h:1"}
		f := func(after time.Duration, err error, want string, refused int) {
			t.Helper()
			time.Sleep(after)
			out.Reset()
			c.complain(err)
			if line := out.String(); (line == "") != (want == "") || !strings.Contains(line, want) || int(c.refused) != refused {
				t.Errorf("%v: %s, %d refusals", err, line, c.refused)
			}
			if d := c.delay(99); (d > 2*lastRetry) != (refused > 0) {
				t.Errorf("%v: tries again after %v", err, d)
			}
		}
		other, away := errors.New("slow"), error(&refusal{errors.New("away")})
		f(0, other, "slow", 0)
		f(complaints-1, other, "", 0)
		f(1, other, "slow", 0)
		f(refusalLines-1, away, "", 1)
		f(1, away, "copy its join-url", 2)
		f(complaints, nats.ErrAuthorization, "", 3)
		f(refusalLines-complaints, nats.ErrAuthExpired, "h:1", 4)
		f(complaints, other, "slow", 0)
		c.cfg.Ring = nil
		f(refusalLines, nats.ErrAuthorization, nats.ErrAuthorization.Error(), 1)
		f(0, other, "", 0)
		for range 2 {
			c.set(true, nil)
			c.set(false, other)
			f(0, away, "away", 1)
		}
		if c.link.Reconnects != 1 || c.link.Up {
			t.Errorf("%+v", c.link)
		}
	})
}

// TestAdmit: a door lets so many members in, and only by secrets that are in force.
func TestAdmit(t *testing.T) {
	ring := twoSecrets(t)
	d := &door{ring: ring, most: 2, open: map[*visit]struct{}{}}
	a, b, c := &visit{by: ring.Secrets()[0]}, &visit{by: ring.Secrets()[1]}, &visit{by: ring.Secrets()[0]}
	if d.admit(&visit{by: trust.NewSecret()}) || !d.admit(a) || !d.admit(b) || d.admit(c) {
		t.Error("two may enter, of this fleet")
	}
	if d.leave(a); !d.admit(c) || d.admit(a) || len(d.open) != 2 {
		t.Error("one has left, one may enter")
	}
}

// TestHostShut: a member that comes while the server ends is let go.
func TestHostShut(t *testing.T) {
	ns, err := server.NewServer(&server.Options{DontListen: true})
	if err != nil {
		t.Fatal(err)
	}
	ns.Shutdown()
	inner, outer := net.Pipe()
	defer inner.Close()
	defer outer.Close()
	(&door{ns: ns}).host(&visit{Conn: inner})
}

// TestBus: routers hear each other's messages until they stop.
func TestBus(t *testing.T) {
	s, err := StartServer(ServerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if s.ClusterURL() != "" || !strings.HasPrefix(s.ClientURL(), "nats://") {
		t.Errorf("%s, cluster %q", s.ClientURL(), s.ClusterURL())
	}
	c, err := Connect(ConnConfig{URL: s.ClientURL(), Name: "a"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close(context.Background())
	heard := make(chan string, 9)
	stop, err := c.Bus().Subscribe(func(msg []byte) { heard <- string(msg) })
	if err != nil {
		t.Fatal(err)
	}
	flush := func() {
		t.Helper()
		if err := c.nc.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	flush()
	var got []string
	for _, text := range []string{"one", "two"} {
		if err := c.Bus().Publish([]byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		select {
		case text := <-heard:
			got = append(got, text)
		case <-time.After(time.Minute):
			t.Fatalf("heard %q", got)
		}
	}
	if !slices.Equal(got, []string{"one", "two"}) {
		t.Errorf("heard %q", got)
	}
	stop()
	if err := c.Bus().Publish([]byte("three")); err != nil {
		t.Fatal(err)
	}
	flush()
	if len(heard) > 0 {
		t.Errorf("heard %q after its stop", <-heard)
	}
}

// TestClosedConn: what needs a connection that is closed is refused, and leaves nothing behind.
func TestClosedConn(t *testing.T) {
	s, err := StartServer(ServerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	c, err := Connect(ConnConfig{URL: s.ClientURL(), Name: "a"})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	reg := prometheus.NewRegistry()
	if w, err := Watch(WatcherConfig{Conn: c, Registerer: reg}); w != nil || err == nil || !strings.Contains(err.Error(), "watch fleet: subscribe to "+subjectAnnounce) {
		t.Errorf("watch: %v", err)
	}
	w, err := Watch(WatcherConfig{Registerer: reg})
	if err != nil {
		t.Fatalf("after one that failed: %v", err)
	}
	w.Close()
	if a, err := Announce(AnnouncerConfig{Conn: c, Instance: *worker("a", 1)}); a != nil || err == nil || !strings.Contains(err.Error(), "announce: subscribe") {
		t.Errorf("announce: %v", err)
	}
	if stop, err := c.Bus().Subscribe(func([]byte) {}); stop != nil || err == nil || !strings.Contains(err.Error(), subjectShare) {
		t.Errorf("bus: %v", err)
	}
}

// TestMetricsTaken: a watcher whose metrics others have does not start, and takes only its own back.
func TestMetricsTaken(t *testing.T) {
	reg := prometheus.NewRegistry()
	other, err := newMetrics(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	reg.MustRegister(other.refused)
	if w, err := Watch(WatcherConfig{Registerer: reg}); w != nil || err == nil || !strings.Contains(err.Error(), "watch fleet: ") {
		t.Errorf("%v", err)
	}
	if !reg.Unregister(other.refused) {
		t.Error("the other's is gone")
	}
	for range 2 {
		w, err := Watch(WatcherConfig{Registerer: reg})
		if err != nil {
			t.Fatal(err)
		}
		w.Close()
	}
}

// TestUsable: those that may be given work, as far as they are wanted.
func TestUsable(t *testing.T) {
	now := time.Now()
	r := newRegistry(0, 9, now)
	for _, id := range []string{"b", "a", "c", "d"} {
		i := worker(id, 1)
		if i.Draining = id == "c"; id == "d" {
			i.Role = Decode
		}
		r.announce(i, Static, now)
	}
	s := r.snapshot(now)
	var got []string
	for m := range s.Usable(Prefill) {
		got = append(got, m.ID)
	}
	for m := range s.Usable(Prefill) {
		got = append(got, "first "+m.ID)
		break
	}
	if want := []string{"a", "b", "first a"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}
