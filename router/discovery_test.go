package router_test

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	fake "github.com/xpyd/xpyd/internal/mock"
	"github.com/xpyd/xpyd/router"
	"github.com/xpyd/xpyd/router/sense"
)

// instances is what the admin API lists.
type instances struct {
	Instances []struct {
		ID, State, Source, Reason string
		Probed                    bool
		ProbeError                string `json:"probe_error"`
		Version                   string
	}
	Strangers []struct{ Name, Reason string }
}

func (g *rig) list() (out instances) {
	g.t.Helper()
	g.adminJSON("GET", "/admin/v1/instances", "", &out)
	return out
}

// TestP2PRegistration: engines that register over ZMQ are asked what they are,
// probed and used; one that stops is taken out.
func TestP2PRegistration(t *testing.T) {
	t.Parallel()
	g := newRig(t, 0, 0, func(c *router.Config) {
		c.Discovery.P2PListen, c.Discovery.P2PExpiry = "127.0.0.1:0", 4*time.Second
	})
	registering := func(c *fake.Config) { c.Register = g.r.Members.P2PAddr().String() }
	engines(t, "vllm-p2pnccl", fleet.Prefill, 2, registering)
	ds, _ := engines(t, "vllm-p2pnccl", fleet.Decode, 1, registering)
	g.allProbed(3)
	resp, body := g.post("/v1/completions", askText)
	if text, _ := read(t, body); resp.StatusCode != 200 || text != wantText(`"Once upon"`) {
		t.Fatalf("%d %s", resp.StatusCode, body)
	}
	for _, i := range g.list().Instances {
		if i.Source != "zmq" || i.Version != "1.0" || !strings.HasPrefix(i.ID, "p2p-127.0.0.1-") {
			t.Errorf("%+v", i)
		}
	}
	if err := ds[0].Close(); err != nil {
		t.Fatal(err)
	}
	g.until("the decode engine is gone", func() bool {
		for _, i := range g.list().Instances {
			if strings.HasSuffix(i.ID, strings.ReplaceAll(ds[0].Addr(), ":", "-")) {
				return i.State == "gone" && strings.Contains(i.Reason, "has not registered for 4s")
			}
		}
		return false
	})
}

// TestNoModelsListed: an engine that lists no models is asked all the same what it is. Its version
// is as configured, or as it says.
func TestNoModelsListed(t *testing.T) {
	t.Parallel()
	var probes atomic.Int32
	e := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == "POST" {
			probes.Add(1)
		}
		if r.URL.Path != "/version" {
			w.WriteHeader(404)
			return
		}
		fmt.Fprint(w, `{"version":"9.8.7"}`)
	}))
	t.Cleanup(e.Close)
	g := newRig(t, 0, 0, func(c *router.Config) {
		c.Static = []sense.Static{{ID: "e", URL: e.URL + "/", Dialect: "openai", Model: "m"}}
	})
	g.until("its version", func() bool { return g.watcher.Snapshot().Get("e").Version == "9.8.7" })
	set := []sense.Static{{ID: "f", URL: e.URL, Dialect: "openai", Model: "n", Version: "1.0"}}
	if err := g.r.Members.SetStatic(set); err != nil {
		t.Fatal(err)
	}
	g.until("e to leave", func() bool { return g.watcher.Snapshot().Get("e").State == fleet.Gone })
	was := probes.Load()
	g.until("f to be probed", func() bool { return probes.Load() > was+1 })
	if v := g.watcher.Snapshot().Get("f").Version; v != "1.0" {
		t.Errorf("its version is %s", v)
	}
}

// TestGoneWhileExamined: an engine that is taken out of the configuration while
// it is asked what it is stays out.
func TestGoneWhileExamined(t *testing.T) {
	t.Parallel()
	asked, free := make(chan bool, 8), make(chan bool)
	e := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/v1/models" {
			w.WriteHeader(404)
			return
		}
		asked <- true
		select {
		case <-free:
			fmt.Fprint(w, `{"data":[{"id":"m","max_model_len":100}]}`)
		case <-r.Context().Done():
		}
	}))
	t.Cleanup(e.Close)
	g := newRig(t, 0, 0, func(c *router.Config) {
		c.Static = []sense.Static{{ID: "e", URL: e.URL, Dialect: "openai", Model: "m"}}
	})
	<-asked
	was := g.watcher.Snapshot().Get("e").Instance
	if err := g.r.Members.SetStatic(nil); err != nil {
		t.Fatal(err)
	}
	close(free)
	g.until("it to be examined", func() bool {
		return strings.Contains(g.logs.String(), `examined" id=e`) || strings.Contains(g.logs.String(), `"engine found" id=e`)
	})
	if m := g.watcher.Snapshot().Get("e"); m.State != fleet.Gone || !m.Instance.Equal(&was) {
		t.Errorf("%+v", m)
	}
}

// TestProbeTimeout: the probe of a prefill engine that never answers ends after
// probe_timeout, although the dialect lets the leg linger.
func TestProbeTimeout(t *testing.T) {
	t.Parallel()
	engine := func(id string, role fleet.Role, complete http.HandlerFunc) sense.Static {
		e := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != "/v1/completions" {
				w.WriteHeader(404)
				return
			}
			_, _ = io.Copy(io.Discard, r.Body) // else the leg's end is not seen
			complete(w, r)
		}))
		t.Cleanup(e.Close)
		return sense.Static{ID: id, Role: role, URL: e.URL, Dialect: "sglang", Model: "m"}
	}
	hang := engine("p", fleet.Prefill, func(_ http.ResponseWriter, r *http.Request) {
		<-r.Context().Done()
	})
	list := []sense.Static{hang, engine("d", fleet.Decode, whole)}
	g := newRig(t, 0, 0, func(c *router.Config) { c.Static, c.ProbeTimeout = list, 100*time.Millisecond })
	g.until("it to be blamed", func() bool {
		for _, i := range g.list().Instances {
			if i.ID == "p" {
				return !i.Probed && strings.Contains(i.ProbeError, "prefill worker p")
			}
		}
		return false
	})
	if err := g.r.Members.SetStatic(nil); err != nil {
		t.Fatal(err)
	}
}

// TestRefusesOtherModel: an engine that serves another model than its entry
// says never passes, and the list says why.
func TestRefusesOtherModel(t *testing.T) {
	t.Parallel()
	_, list := engines(t, "vllm-nixl", fleet.Prefill, 1, func(c *fake.Config) { c.Model = "llama" })
	_, more := engines(t, "vllm-nixl", fleet.Decode, 1)
	g := newRig(t, 0, 0, func(c *router.Config) { c.Static = append(list, more...) })
	g.until("it is refused", func() bool {
		for _, i := range g.list().Instances {
			if i.ID == list[0].ID {
				return !i.Probed && strings.Contains(i.ProbeError, `serves "llama", not "m"`)
			}
		}
		return false
	})
	if g.r.Ready() {
		t.Error("ready")
	}
}

// TestDiscoveryTaken: an address that is taken is an error of the start.
func TestDiscoveryTaken(t *testing.T) {
	g := newRig(t, 0, 0)
	cfg := router.DefaultConfig()
	cfg.Listen, cfg.AdminListen, cfg.Discovery.P2PListen = "127.0.0.1:0", "", g.r.Addr().String()
	r, err := router.New(cfg, router.Deps{Fleet: g.watcher})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Start(); err == nil {
		t.Error("it starts", r.Shutdown(t.Context()))
	} else if !strings.HasPrefix(err.Error(), "discovery.p2p_listen: ") {
		t.Error(err)
	}
}
