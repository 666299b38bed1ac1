package way

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// dials notes what was opened; local addresses fail with an error when set.
type dials struct {
	addrs []string
	fail  error
	tcp   error
}

func (d *dials) Open(ctx context.Context, addr string, peer kvconn.PeerID) (*kvconn.Session, error) {
	d.addrs = append(d.addrs, addr)
	if strings.HasPrefix(addr, "shm:") || strings.HasPrefix(addr, "cudaipc:") {
		return nil, d.fail
	}
	return nil, d.tcp
}

func (d *dials) last(n int) string { return strings.Join(d.addrs[max(len(d.addrs)-n, 0):], " ") }

// fake is a transport that is only listened by.
type fake struct {
	name   string
	listen error
}

func (f *fake) Name() string { return f.name }
func (f *fake) Dial(_ context.Context, addr string) (net.Conn, error) {
	return nil, dialled{f.name, addr}
}
func (f *fake) Listen(addr string) (net.Listener, error) {
	return fakeListener{f.name + ":" + cmp.Or(addr, "free")}, f.listen
}

// dialled is the error of a fake's Dial.
type dialled struct{ way, addr string }

func (d dialled) Error() string { return d.way + " dials " + d.addr }

type fakeListener struct{ addr string }

func (l fakeListener) Accept() (net.Conn, error) { return nil, net.ErrClosed }
func (l fakeListener) Close() error              { return nil }
func (l fakeListener) Addr() net.Addr            { return l }
func (l fakeListener) Network() string           { return "fake" }
func (l fakeListener) String() string            { return l.addr }

// kind makes a fake's; it lacks what is said.
func kind(name string, local bool, lacks error) Kind {
	return Kind{Name: name, Local: local, PoolIn: name + "'s memory", Open: func(Pool) (kvconn.Transport, *kvconn.Shared, error) {
		if lacks != nil {
			return nil, nil, lacks
		}
		return &fake{name: name}, &kvconn.Shared{}, nil
	}}
}

// member is one prefill worker of a fleet.
type member struct {
	Peer
	addr string // the network's
}

// find implements Config.Find over it.
func (m *member) find(addr string, id kvconn.PeerID) Peer {
	if id.ID == "" && m.addr == addr || id.ID == m.ID && (id.Epoch == 0 || id.Epoch == m.Epoch) {
		return m.Peer
	}
	return Peer{}
}

// chooser makes one over a member, of the machine boot/1.
func chooser(t *testing.T, kinds []Kind, setting string, recv Opener, m *member, publish func(string)) *Chooser {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	set, err := Open(kinds, setting, Pool{}, log)
	if err != nil {
		t.Fatal(err)
	}
	c, err := NewChooser(Config{Ways: set, Recv: recv, Machine: "boot/1", Find: m.find, Publish: publish, Log: log, Register: prometheus.NewPedanticRegistry()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// pathsRig makes a chooser between a near way and the network.
func pathsRig(t *testing.T, near, setting string, lacks error, change func(*member)) (*Chooser, *dials, *[]string) {
	t.Helper()
	m := &member{Peer{PeerID: prefill0, Machine: "boot/1", Addrs: map[string]string{near: near + ":x"}}, "10.0.0.1:9"}
	if change != nil {
		change(m)
	}
	d, said := &dials{}, &[]string{}
	kinds := []Kind{kind(near, true, lacks), Network(&fake{name: "tcp"})}
	return chooser(t, kinds, setting, d, m, func(s string) { *said = append(*said, s) }), d, said
}

var prefill0 = kvconn.PeerID{ID: "prefill-0", Epoch: 7}

func TestPathChoice(t *testing.T) {
	f := func(name, setting string, lacks error, change func(*member), dialled, said string) {
		t.Helper()
		p, d, s := pathsRig(t, "shm", setting, lacks, change)
		for range 2 {
			if _, err := p.Open(t.Context(), "10.0.0.1:9", prefill0); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		if got := d.last(1); got != dialled {
			t.Errorf("%s: dialled %s, want %s", name, got, dialled)
		}
		if got := strings.Join(*s, "|"); got != said {
			t.Errorf("%s: said %q, want %q", name, got, said)
		}
	}
	f("same machine", Auto, nil, nil, "shm:x", "prefill-0 shm")
	f("forced", "shm", nil, nil, "shm:x", "prefill-0 shm")
	f("tcp is set", "tcp", nil, nil, "10.0.0.1:9", "prefill-0 tcp (kv.transport is tcp)")
	f("no memory here", Auto, errors.New("device cuda"), nil, "10.0.0.1:9", "prefill-0 tcp (shm: device cuda)")
	f("it offers none", Auto, nil, func(m *member) { m.Addrs = nil }, "10.0.0.1:9", "prefill-0 tcp (shm: it does not offer it)")
	f("another machine", Auto, nil, func(m *member) { m.Machine = "other/0" }, "10.0.0.1:9", "prefill-0 tcp (shm: on another machine)")
	f("another container", Auto, nil, func(m *member) { m.Machine = "boot/1/net-4-f00" }, "10.0.0.1:9",
		"prefill-0 tcp (shm: its sockets are elsewhere: containers need one folder for both (kv.sockets))")
	f("another user", Auto, nil, func(m *member) { m.Machine = "boot/2" }, "10.0.0.1:9", "prefill-0 tcp (shm: of another user)")
	f("another run", Auto, nil, func(m *member) { m.Epoch = 8 }, "10.0.0.1:9", "")
}

// A local socket that does not answer costs one attempt; it is tried again
// later, beside a request. A peer in trouble is not asked twice.
func TestPathFallback(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, d, said := pathsRig(t, "shm", Auto, nil, nil)
		open := func() error {
			_, err := p.Open(t.Context(), "10.0.0.1:9", prefill0)
			synctest.Wait()
			return err
		}
		d.fail = &kvconn.Error{Phase: kvconn.PhaseDial, Outcome: ticket.Dead, Err: errors.New("connection refused")}
		if err := open(); err != nil || d.last(2) != "shm:x 10.0.0.1:9" {
			t.Errorf("%v, dialled %s", err, d.last(2))
		}
		if err := open(); err != nil || d.last(2) != "10.0.0.1:9 10.0.0.1:9" {
			t.Errorf("%v, dialled %s", err, d.last(2))
		}
		if got := strings.Join(*said, "|"); got != "prefill-0 tcp (shm: connection refused)" {
			t.Errorf("said %q", got)
		}
		if n := testutil.ToFloat64(p.gauge.WithLabelValues("tcp", string(Failed))); n != 1 {
			t.Errorf("gauge %v", n)
		}
		time.Sleep(firstRetry)
		d.fail = nil
		if err := open(); err != nil || d.last(2) != "10.0.0.1:9 shm:x" {
			t.Errorf("%v, dialled %s", err, d.last(2))
		}
		if err := open(); err != nil || d.last(1) != "shm:x" || (*said)[len(*said)-1] != "prefill-0 shm" {
			t.Errorf("%v, dialled %s, said %q", err, d.last(1), *said)
		}
		d.fail = &kvconn.Error{Phase: kvconn.PhaseHandshake, Outcome: ticket.Late, Err: errors.New("silent")}
		before := len(d.addrs)
		if err := open(); kvconn.OutcomeOf(err, "") != ticket.Late || len(d.addrs) != before+1 {
			t.Errorf("%v after %d attempts", err, len(d.addrs)-before)
		}
	})
}

// What this worker lacks for a connection says nothing of the way: none other is
// tried, and it is the first one again the next time.
func TestPathOwnLack(t *testing.T) {
	p, d, said := pathsRig(t, "shm", Auto, nil, nil)
	d.fail = &kvconn.Error{Phase: kvconn.PhaseDial, Outcome: ticket.NoSpace, Err: syscall.EMFILE}
	if _, err := p.Open(t.Context(), "10.0.0.1:9", prefill0); kvconn.OutcomeOf(err, "") != ticket.NoSpace || d.last(2) != "shm:x" || len(*said) > 0 {
		t.Errorf("%v, dialled %s, said %q", err, d.last(2), *said)
	}
	d.fail = nil
	if _, err := p.Open(t.Context(), "10.0.0.1:9", prefill0); err != nil || d.last(2) != "shm:x shm:x" {
		t.Errorf("%v, dialled %s", err, d.last(2))
	}
}

// Forced shared memory that is impossible is one clear error.
func TestPathForced(t *testing.T) {
	p, d, _ := pathsRig(t, "shm", "shm", nil, func(m *member) { m.Machine = "other/0" })
	_, err := p.Open(t.Context(), "10.0.0.1:9", prefill0)
	if kvconn.OutcomeOf(err, "") != ticket.Incompatible || !strings.Contains(err.Error(), "kv.transport is shm here, which does not reach it") || len(d.addrs) > 0 {
		t.Errorf("%v after %v", err, d.addrs)
	}
}

func TestPathSummaryIsBounded(t *testing.T) {
	p := &Chooser{taken: map[string]choice{}}
	for i := range 200 {
		p.taken[strings.Repeat("p", 20)+string(rune('a'+i%26))+strings.Repeat("x", i/26)] = choice{way: "tcp", why: "no\nway"}
	}
	s := p.summary()
	if len(s) > maxSummary+20 || !strings.Contains(s, "no?way") || !strings.HasSuffix(s, " more") {
		t.Errorf("%d bytes: %q", len(s), s)
	}
}

// A worker whose pool lies in a GPU takes the way between GPUs, and says why
// when there is none to a peer.
func TestPathBetweenGPUs(t *testing.T) {
	f := func(name, setting string, change func(*member), fail error, dialled, said string, reason float64) {
		t.Helper()
		p, d, s := pathsRig(t, "cudaipc", setting, nil, change)
		d.fail = fail
		_, err := p.Open(t.Context(), "10.0.0.1:9", prefill0)
		if (err == nil) != (said != "") || strings.Join(d.addrs, " ") != dialled || strings.Join(*s, "|") != said {
			t.Errorf("%s: %v, dialled %v, said %q", name, err, d.addrs, *s)
		}
		if n := testutil.ToFloat64(p.gauge.WithLabelValues("tcp", string(Refused))); n != reason {
			t.Errorf("%s: %v peers that refused, want %v", name, n, reason)
		}
	}
	no := &kvconn.Error{Phase: kvconn.PhaseHandshake, Outcome: ticket.Refused, Err: errors.New("no access between GPU 0 and 1")}
	f("both have one", Auto, nil, nil, "cudaipc:x", "prefill-0 cudaipc", 0)
	f("forced", "cudaipc", nil, nil, "cudaipc:x", "prefill-0 cudaipc", 0)
	f("it has none", Auto, func(m *member) { m.Addrs = nil }, nil, "10.0.0.1:9", "prefill-0 tcp (cudaipc: it does not offer it)", 0)
	f("tcp is set", "tcp", nil, nil, "10.0.0.1:9", "prefill-0 tcp (kv.transport is tcp)", 0)
	f("they do not reach each other", Auto, nil, no, "cudaipc:x 10.0.0.1:9", "prefill-0 tcp (cudaipc: no access between GPU 0 and 1)", 1)
	f("nor when forced", "cudaipc", nil, no, "cudaipc:x", "", 0)
}
