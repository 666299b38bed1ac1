package tcp_test

import (
	"net"
	"strconv"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvconn/tcp"
)

func plain(t testing.TB) kvconn.Transport {
	t.Helper()
	return tcp.New(nil)
}

// A range gives the first free port, and an error once all are taken.
func TestPortRange(t *testing.T) {
	tr := plain(t)
	// Three ports in a row that nobody has; another process may take one of
	// them before we do, so several are tried.
	for base := 21000; base < 30000; base += 997 {
		addr := "127.0.0.1:" + strconv.Itoa(base) + "-" + strconv.Itoa(base+2)
		var got []net.Listener
		for range 3 {
			ln, err := tr.Listen(addr)
			if err != nil {
				break
			}
			defer ln.Close()
			if p := ln.Addr().(*net.TCPAddr).Port; len(got) == 0 && p != base {
				break
			}
			got = append(got, ln)
		}
		if len(got) < 3 {
			continue
		}
		for i, ln := range got {
			if p := ln.Addr().(*net.TCPAddr).Port; p != base+i {
				t.Errorf("listener %d has port %d, want %d", i, p, base+i)
			}
		}
		if ln, err := tr.Listen(addr); err == nil {
			ln.Close()
			t.Error("a fourth listener on three ports")
		}
		got[1].Close()
		ln, err := tr.Listen(addr)
		if err != nil {
			t.Fatal(err)
		}
		defer ln.Close()
		if p := ln.Addr().(*net.TCPAddr).Port; p != base+1 {
			t.Errorf("the port that was freed is %d, have %d", base+1, p)
		}
		return
	}
	t.Fatal("no three free ports in a row")
}

func TestAddresses(t *testing.T) {
	f := func(addr, host string, first, last int) {
		t.Helper()
		h, a, b, err := kvconn.SplitPorts(addr)
		if (err == nil) != (last >= 0) || err == nil && (h != host || a != first || b != last) {
			t.Errorf("%s: %q %d-%d, %v", addr, h, a, b, err)
		}
	}
	f("h:0", "h", 0, 0)
	f("h:9000", "h", 9000, 9000)
	f("[::1]:9000-9100", "::1", 9000, 9100)
	f(":65535-65535", "", 65535, 65535)
	for _, bad := range []string{"", "h", "h:", "h:x", "h:-1", "h:1-", "h:2-1", "h:0-5", "h:1-65536", "h:1-2-3", "::1:5"} {
		f(bad, "", 0, -1)
	}
}

// Everything works over IPv6 as well, where the machine has it.
func TestIPv6(t *testing.T) {
	probe, err := net.Listen("tcp6", "[::1]:0")
	if err != nil {
		t.Logf("no IPv6 here, only addresses are checked: %v", err)
		return
	}
	probe.Close()
	w := kvconntest.NewWorld(t, plain(t), "[::1]:0", 1, func(r, s *kvconn.Config) {
		for _, c := range []*kvconn.Config{r, s} {
			c.DialTimeout, c.HandshakeTimeout, c.PeerSilence, c.TicketTimeout = time.Minute, time.Minute, time.Minute, time.Minute
		}
	})
	defer w.Close()
	if err := w.Fetch(t.Context(), w.Spec("six", 1, 40, 0)); err != nil {
		t.Error(err)
	}
}
