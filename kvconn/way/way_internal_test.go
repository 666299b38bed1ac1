package way

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
)

// device is a backend of which only the name is asked.
type device struct {
	kernels.Backend
	name string
}

func (d device) Info() kernels.Info { return kernels.Info{Name: d.name} }

// five are kinds as a command lists them: two for a GPU's pool, two for a CPU's, one of
// each over the network, and the network.
func five() []Kind {
	on := func(k Kind, name string) Kind {
		k.Suits = func(b kernels.Backend) bool { return b.Info().Name == name }
		return k
	}
	far := kind("far", false, nil)
	far.OverNetwork = true
	mapped := kind("mapped", true, nil)
	mapped.MapsPool = true
	return []Kind{on(kind("direct", true, nil), "gpu"), on(mapped, "cpu"), on(far, "gpu"), on(kind("slow", true, errors.New("no slow here")), "gpu"), Network(&fake{name: "net"})}
}

func names(s *Set) string {
	var list []string
	for _, w := range s.ways {
		list = append(list, w.Name)
	}
	return strings.Join(list, " ")
}

// TestOpen: the setting and the pool decide which ways there are, in the order of the list;
// one that the setting names and that cannot be is an error, others are left out or lacking.
func TestOpen(t *testing.T) {
	for _, c := range []struct{ device, setting, want, fails string }{
		{"gpu", Auto, "direct far slow net", ""},
		{"cpu", Auto, "mapped net", ""},
		{"npu", Auto, "net", ""},
		{"gpu", "direct", "direct", ""},
		{"gpu", "far", "far barred", ""},
		{"gpu", "net", "net barred", ""},
		{"cpu", "mapped", "mapped", ""},
		{"cpu", "net", "net barred", ""},
		{"npu", "net", "net", ""},
		{"cpu", "direct", "", "direct is not possible here: the pool of device cpu is not in direct's memory"},
		{"gpu", "mapped", "", "mapped is not possible here: the pool of device gpu is not in mapped's memory"},
		{"gpu", "slow", "", "slow is not possible here: no slow here"},
		{"gpu", "other", "", `"other" is none of auto, direct, mapped, far, slow, net`},
	} {
		s, err := Open(five(), c.setting, Pool{Backend: device{name: c.device}}, slog.New(slog.DiscardHandler))
		if c.fails != "" {
			if err == nil || err.Error() != c.fails {
				t.Errorf("%s on %s: %v, want %s", c.setting, c.device, err, c.fails)
			}
			continue
		}
		if err != nil {
			t.Fatalf("%s on %s: %v", c.setting, c.device, err)
		}
		got := names(s)
		if s.barred {
			got += " barred"
		}
		if got != c.want || s.Name() != "net" {
			t.Errorf("%s on %s: %s over %s, want %s", c.setting, c.device, got, s.Name(), c.want)
		}
		if near := got != "net" && got != "net barred"; (s.Shared() != nil) != near {
			t.Errorf("%s on %s: the pool is shared: %t", c.setting, c.device, !near)
		}
	}
	if _, err := Open(nil, Auto, Pool{}, nil); err == nil {
		t.Error("no network, and no error")
	}
}

// TestMapPool: a pool is one that others can map where the setting allows a way that does.
func TestMapPool(t *testing.T) {
	for setting, want := range map[string]bool{Auto: true, "mapped": true, "net": false, "far": false} {
		if MapPool(five(), setting) != want {
			t.Errorf("%s: %t", setting, !want)
		}
	}
	if MapPool(five()[2:], Auto) {
		t.Error("nobody maps it")
	}
}

// TestOffer: each way is listened by and announced but for the network's and those that
// this process lacks; the one over the network is where the network is, and listens there.
func TestOffer(t *testing.T) {
	open := func(kinds []Kind, setting string) *Set {
		s, err := Open(kinds, setting, Pool{Backend: device{name: "gpu"}}, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	f := func(setting, offered, listens string) {
		t.Helper()
		s := open(five(), setting)
		lns, addrs, err := s.Offer("h:1")
		var got []string
		for _, name := range slices.Sorted(maps.Keys(addrs)) {
			got = append(got, addrs[name])
		}
		own, _ := s.Listen("h:1")
		if err != nil || strings.Join(got, " ") != offered || own.Addr().String() != listens || len(lns) != strings.Count(offered, "free") {
			t.Errorf("%s: %v, %v, %d listeners, listens at %s; want %s, %s", setting, err, got, len(lns), own.Addr(), offered, listens)
		}
	}
	f(Auto, "direct:free far:h:1", "far:h:1")
	f("direct", "direct:free", "net:h:1")
	f("far", "far:h:1", "far:h:1")
	f("net", "", "net:h:1")

	deaf := five()
	deaf[0].Open = func(Pool) (kvconn.Transport, *kvconn.Shared, error) {
		return &fake{"direct", errors.New("no sockets")}, nil, nil
	}
	if _, addrs, err := open(deaf, Auto).Offer("h:1"); err != nil || addrs["direct"] != "" || addrs["far"] == "" {
		t.Errorf("%v, %v", addrs, err)
	}
	if _, _, err := open(deaf, "direct").Offer("h:1"); err == nil || err.Error() != "direct: no sockets" {
		t.Errorf("the only way cannot be listened by: %v", err)
	}
}

// TestDial: an address says by which way it is dialled; of ways that this process has not,
// none is.
func TestDial(t *testing.T) {
	s, err := Open(five(), Auto, Pool{Backend: device{name: "gpu"}}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	for addr, want := range map[string]string{"direct:x": "direct", "far:h:1": "far", "h:1": "net", "slow:x": "net", "mapped:x": "net", "direct": "net"} {
		_, err := s.Dial(t.Context(), addr)
		if d, ok := err.(dialled); !ok || d.way != want || d.addr != addr {
			t.Errorf("%s: %v, want %s", addr, err, want)
		}
	}
}

// crowd is a fleet of peers that come and go.
type crowd map[string]*member

func (c crowd) find(addr string, id kvconn.PeerID) Peer {
	if m := c[id.ID]; m != nil {
		return m.find(addr, id)
	}
	return Peer{}
}

// TestManyPeers: peers of one way are chosen for apart from each other, also all at once;
// who has left the fleet, or has started anew, is forgotten, and that is published.
func TestManyPeers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fleet := crowd{}
		for i := range 20 {
			id := fmt.Sprintf("p%02d", i)
			fleet[id] = &member{Peer{PeerID: kvconn.PeerID{ID: id, Epoch: 1}, Machine: "boot/1", Addrs: map[string]string{"near": "near:" + id}}, id + ":9"}
		}
		log := slog.New(slog.DiscardHandler)
		set, err := Open([]Kind{kind("near", true, nil), Network(&fake{name: "net"})}, Auto, Pool{}, log)
		if err != nil {
			t.Fatal(err)
		}
		said := ""
		recv := opens(func(ctx context.Context, addr string) error {
			time.Sleep(time.Millisecond)
			if strings.HasPrefix(addr, "near:p0") { // p00 to p09
				return mute
			}
			return nil
		})
		c, err := NewChooser(Config{Ways: set, Recv: recv, Machine: "boot/1", Find: fleet.find, Publish: func(s string) { said = s }, Log: log, Register: prometheus.NewPedanticRegistry()})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		var wg sync.WaitGroup
		for _, m := range fleet {
			for range 3 {
				wg.Go(func() {
					if _, err := c.Open(t.Context(), m.addr, m.PeerID); err != nil {
						t.Error(err)
					}
				})
			}
		}
		wg.Wait()
		for id := range fleet {
			want := "near"
			if id < "p10" {
				want = "net"
			}
			if got := c.taken[id]; got.way != want {
				t.Errorf("%s: %+v, want %s", id, got, want)
			}
		}
		for id := range fleet {
			if id != "p00" && id != "p11" {
				delete(fleet, id)
			}
		}
		fleet["p12"] = &member{Peer: Peer{PeerID: kvconn.PeerID{ID: "p12", Epoch: 2}}}
		said = ""
		for _, want := range []string{"p00 net (near: connection refused), p11 near", ""} { // the second time nothing changes
			c.Keep(func(id kvconn.PeerID) bool { return fleet.find("", id).ID != "" })
			if said != want || testutil.ToFloat64(c.gauge.WithLabelValues("near", "")) != 1 {
				t.Errorf("of those who are left it said %q, want %q", said, want)
			}
			said = ""
		}
		fleet["p11"].Addrs = nil
		if _, err := c.Open(t.Context(), "p11:9", fleet["p11"].PeerID); err != nil {
			t.Error(err)
		}
		if want := "p00 net (near: connection refused), p11 net (near: it does not offer it)"; said != want {
			t.Errorf("said %q, want %q", said, want)
		}
		if _, err := c.Open(t.Context(), "p05:9", kvconn.PeerID{ID: "p05", Epoch: 1}); err != nil || len(c.taken) != 2 {
			t.Errorf("who has left: %v, %d are remembered", err, len(c.taken))
		}
	})
}

// TestCloseWaits: Close ends the try of a faster way, waits for it, and what it came to does
// not count; none begins after it.
func TestCloseWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGPUs(t, Auto)
		g.fail["cudaipc"] = refused
		if err := g.fetch(t); err != nil {
			t.Fatal(err)
		}
		said := g.said
		time.Sleep(firstRetry)
		g.hangs["cudaipc"] = make(chan struct{})
		if err := g.fetch(t); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if !g.trying["p"] {
			t.Fatal("no faster way is being tried")
		}
		g.Close()
		if g.trying["p"] {
			t.Error("Close did not wait")
		}
		time.Sleep(lastRetry)
		if err := g.fetch(t); err != nil || strings.Join(g.dialed, " ") != "nccl" || g.said != said {
			t.Errorf("after Close: %v, dialed %v, said %q", err, g.dialed, g.said)
		}
	})
}

var _ net.Listener = fakeListener{}
