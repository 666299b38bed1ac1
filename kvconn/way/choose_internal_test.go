package worker

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/xpyd/xpyd/internal/fleet"
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

// rig makes paths over a fleet of one prefill worker.
func pathsRig(t *testing.T, mode, private string, change func(*fleet.Member)) (*paths, *dials, *[]string) {
	t.Helper()
	m := fleet.Member{Instance: fleet.Instance{ID: "prefill-0", Epoch: 7, KVAddr: "10.0.0.1:9", KVLocal: "shm:x", Machine: "boot/1"}}
	if change != nil {
		change(&m)
	}
	d, said := &dials{}, &[]string{}
	p, err := newPaths(d, mode, transportSHM, private, func() []fleet.Member { return []fleet.Member{m} },
		func(s string) { *said = append(*said, s) }, slog.New(slog.DiscardHandler), prometheus.NewPedanticRegistry())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	p.machine = "boot/1"
	return p, d, said
}

var prefill0 = kvconn.PeerID{ID: "prefill-0", Epoch: 7}

func TestPathChoice(t *testing.T) {
	f := func(name, mode, private string, change func(*fleet.Member), dialled, said string) {
		t.Helper()
		p, d, s := pathsRig(t, mode, private, change)
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
	f("same machine", transportAuto, "", nil, "shm:x", "prefill-0 shm")
	f("forced", transportSHM, "", nil, "shm:x", "prefill-0 shm")
	f("tcp is set", transportTCP, "", nil, "10.0.0.1:9", "prefill-0 tcp (kv.transport is tcp)")
	f("no memory here", transportAuto, "device cuda", nil, "10.0.0.1:9", "prefill-0 tcp (device cuda)")
	f("it offers none", transportAuto, "", func(m *fleet.Member) { m.KVLocal = "" }, "10.0.0.1:9", "prefill-0 tcp (it does not offer shm)")
	f("another machine", transportAuto, "", func(m *fleet.Member) { m.Machine = "other/0" }, "10.0.0.1:9", "prefill-0 tcp (on another machine)")
	f("another user", transportAuto, "", func(m *fleet.Member) { m.Machine = "boot/2" }, "10.0.0.1:9", "prefill-0 tcp (of another user)")
	f("another run", transportAuto, "", func(m *fleet.Member) { m.Epoch = 8 }, "10.0.0.1:9", "")
}

// A local socket that does not answer costs one attempt; it is tried again
// later, beside a request. A peer in trouble is not asked twice.
func TestPathFallback(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, d, said := pathsRig(t, transportAuto, "", nil)
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
		if n := testutil.ToFloat64(p.gauge.WithLabelValues(transportTCP, reasonFailed)); n != 1 {
			t.Errorf("gauge %v", n)
		}
		time.Sleep(pathRetry)
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
	p, d, said := pathsRig(t, transportAuto, "", nil)
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
	p, d, _ := pathsRig(t, transportSHM, "", func(m *fleet.Member) { m.Machine = "other/0" })
	_, err := p.Open(t.Context(), "10.0.0.1:9", prefill0)
	if kvconn.OutcomeOf(err, "") != ticket.Incompatible || !strings.Contains(err.Error(), "kv.transport is shm here, which does not reach it") || len(d.addrs) > 0 {
		t.Errorf("%v after %v", err, d.addrs)
	}
}

func TestPathSummaryIsBounded(t *testing.T) {
	p := &paths{peers: map[string]path{}}
	for i := range 200 {
		p.peers[strings.Repeat("p", 20)+string(rune('a'+i%26))+strings.Repeat("x", i/26)] = path{transport: transportTCP, why: "no\nway"}
	}
	s := p.summary()
	if len(s) > maxSummary+20 || !strings.Contains(s, "no?way") || !strings.HasSuffix(s, " more") {
		t.Errorf("%d bytes: %q", len(s), s)
	}
}

// A worker whose pool lies in a GPU takes the way between GPUs, and says why
// when there is none to a peer.
func TestPathBetweenGPUs(t *testing.T) {
	gpu := func(change func(m *fleet.Member)) func(*fleet.Member) {
		return func(m *fleet.Member) {
			m.KVLocal, m.KVDevice = "", "cudaipc:x"
			if change != nil {
				change(m)
			}
		}
	}
	f := func(name, mode string, change func(*fleet.Member), fail error, dialled, said string, reason float64) {
		t.Helper()
		p, d, s := pathsRig(t, mode, "", gpu(change))
		p.near, d.fail = transportIPC, fail
		_, err := p.Open(t.Context(), "10.0.0.1:9", prefill0)
		if (err == nil) != (said != "") || strings.Join(d.addrs, " ") != dialled || strings.Join(*s, "|") != said {
			t.Errorf("%s: %v, dialled %v, said %q", name, err, d.addrs, *s)
		}
		if n := testutil.ToFloat64(p.gauge.WithLabelValues(transportTCP, reasonRefused)); n != reason {
			t.Errorf("%s: %v peers that refused, want %v", name, n, reason)
		}
	}
	no := &kvconn.Error{Phase: kvconn.PhaseHandshake, Outcome: ticket.Refused, Err: errors.New("no access between GPU 0 and 1")}
	f("both have one", transportAuto, nil, nil, "cudaipc:x", "prefill-0 cudaipc", 0)
	f("forced", transportIPC, nil, nil, "cudaipc:x", "prefill-0 cudaipc", 0)
	f("it has none", transportAuto, func(m *fleet.Member) { m.KVDevice = "" }, nil, "10.0.0.1:9", "prefill-0 tcp (it does not offer cudaipc)", 0)
	f("tcp is set", transportTCP, nil, nil, "10.0.0.1:9", "prefill-0 tcp (kv.transport is tcp)", 0)
	f("they do not reach each other", transportAuto, nil, no, "cudaipc:x 10.0.0.1:9", "prefill-0 tcp (cudaipc: no access between GPU 0 and 1)", 1)
	f("nor when forced", transportIPC, nil, no, "cudaipc:x", "", 0)
}
