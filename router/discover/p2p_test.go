package discover_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/kvevents"
	"github.com/xpyd/xpyd/internal/zmtp"
	"github.com/xpyd/xpyd/router/discover"
)

// book is a fleet that writes down what happens to it.
type book struct {
	mu   sync.Mutex
	in   map[string]fleet.Instance
	gone []string // ids with reasons
}

func (b *book) AddStatic(inst fleet.Instance, _ fleet.Source) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := inst.Validate(); err != nil {
		return err
	}
	if b.in == nil {
		b.in = map[string]fleet.Instance{}
	}
	b.in[inst.ID] = inst
	return nil
}

func (b *book) Remove(id, reason string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.in, id)
	b.gone = append(b.gone, id+": "+reason)
	return true
}

func (b *book) ids() (out []string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for id, i := range b.in {
		if i.Draining {
			id += " draining"
		}
		out = append(out, id)
	}
	slices.Sort(out)
	return out
}

func (b *book) get(id string) fleet.Instance {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.in[id]
}

func (b *book) want(t *testing.T, ids ...string) {
	t.Helper()
	b.wantAfter(t, func() {}, ids...)
}

// wantAfter is want, with something to be done before each look.
func (b *book) wantAfter(t *testing.T, do func(), ids ...string) {
	t.Helper()
	until(t, func() string {
		do()
		if got := b.ids(); !slices.Equal(got, ids) {
			return fmt.Sprintf("the fleet is %v, want %v", got, ids)
		}
		return ""
	})
}

// until waits for wrong to say nothing.
func until(t *testing.T, wrong func() string) {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(2 * time.Millisecond) {
		text := wrong()
		if text == "" {
			return
		}
		if time.Now().After(end) {
			t.Fatal(text)
		}
	}
}

// vllm is an engine's HTTP side.
func vllm(t *testing.T, model, version string) *httptest.Server {
	t.Helper()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/v1/models":
			fmt.Fprintf(w, `{"object":"list","data":[{"id":%q,"max_model_len":4096,"owned_by":"vllm"}]}`, model)
		case "/version":
			fmt.Fprintf(w, `{"version":%q}`, version)
		case "/metrics":
			fmt.Fprint(w, "# HELP x\nvllm:cache_config_info{block_size=\"32\",cache_dtype=\"auto\",num_gpu_blocks=\"777\"} 1.0\n")
		default:
			http.NotFound(w, r)
		}
	}))
	t.Cleanup(srv.Close)
	return srv
}

// dealer is an engine's ZMQ side.
func dealer(t *testing.T, addr net.Addr) func(kvevents.Ping) {
	t.Helper()
	c, err := zmtp.Dial(context.Background(), addr.String(), zmtp.Config{Type: zmtp.Dealer, Identity: []byte("10.0.0.9:1234")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return func(p kvevents.Ping) {
		t.Helper()
		if err := c.WriteMessage(p.Append(nil)); err != nil {
			t.Fatal(err)
		}
	}
}

func TestP2P(t *testing.T) {
	cfg := discover.DefaultConfig()
	cfg.P2PListen, cfg.P2PExpiry = "127.0.0.1:0", 3*time.Second
	b := &book{}
	p, err := discover.ListenP2P(cfg, b, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	ping := dealer(t, p.Addr())
	pre, dec := vllm(t, "m", "0.9.2"), vllm(t, "m", "0.9.2")
	at := func(s *httptest.Server) string { return strings.TrimPrefix(s.URL, "http://") }
	id := func(s *httptest.Server) string { return "p2p-" + strings.ReplaceAll(at(s), ":", "-") }
	both := []string{id(pre), id(dec)}
	slices.Sort(both)
	b.wantAfter(t, func() { // again and again, as engines do: a slow machine may forget them in between
		ping(kvevents.Ping{Type: "P", HTTP: at(pre), ZMQ: "127.0.0.1:21001"})
		ping(kvevents.Ping{Type: "D", HTTP: at(dec), ZMQ: "127.0.0.1:22001"})
	}, both...)
	i := b.get(id(dec))
	if i.Role != fleet.Decode || i.Dialect != "vllm-p2pnccl" || i.Model != "m" || i.Version != "0.9.2" || i.Bootstrap != "127.0.0.1:22001" ||
		i.Layout.BlockTokens != 32 || i.Blocks != 777 || i.MaxModelLen != 4096 {
		t.Errorf("%+v", i)
	}
	// A restart with another port is another engine; silence is the end.
	epoch := b.get(id(pre)).Epoch
	until(t, func() string {
		ping(kvevents.Ping{Type: "P", HTTP: at(pre), ZMQ: "127.0.0.1:21002"})
		if i := b.get(id(pre)); i.Bootstrap != "127.0.0.1:21002" || i.Epoch <= epoch {
			return fmt.Sprintf("%+v", i)
		}
		return ""
	})
	for name, bad := range map[string]kvevents.Ping{
		"neither P nor D":             {Type: "X", HTTP: "127.0.0.1:1", ZMQ: "127.0.0.1:2"},
		"not its own address":         {Type: "P", HTTP: "169.254.169.254:80", ZMQ: "127.0.0.1:2"},
		"engines register with IP":    {Type: "P", HTTP: "metadata.internal:80", ZMQ: "127.0.0.1:2"},
		"is not host:port":            {Type: "P", HTTP: "127.0.0.1:7", ZMQ: "tcp"},
		"connect: connection refused": {Type: "P", HTTP: "127.0.0.1:1", ZMQ: "127.0.0.1:2"},
	} {
		until(t, func() string {
			ping(bad)
			for _, r := range p.Refusals() {
				if r.Name == bad.HTTP && strings.Contains(r.Reason, name) {
					return ""
				}
			}
			return fmt.Sprintf("no refusal %q in %v", name, p.Refusals())
		})
	}
	b.want(t)
	if len(b.gone) < 3 || !strings.Contains(b.gone[len(b.gone)-1], "has not registered for 3s") {
		t.Errorf("%q", b.gone)
	}
}

// TestP2PFlaps: an engine that registers as another one each time is examined once a
// second at most.
func TestP2PFlaps(t *testing.T) {
	cfg := discover.DefaultConfig()
	cfg.P2PListen = "127.0.0.1:0"
	b := &book{}
	p, err := discover.ListenP2P(cfg, b, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	ping := dealer(t, p.Addr())
	engine := vllm(t, "m", "0.9.2")
	at := strings.TrimPrefix(engine.URL, "http://")
	began := time.Now()
	flaps := func() int {
		b.mu.Lock()
		defer b.mu.Unlock()
		return len(b.gone)
	}
	for n := 0; flaps() == 0; n++ { // added, and taken out for being another
		ping(kvevents.Ping{Type: "P", HTTP: at, ZMQ: fmt.Sprintf("127.0.0.1:%d", 1+n%60000)})
		time.Sleep(time.Millisecond)
	}
	for n := range 1000 {
		ping(kvevents.Ping{Type: "D", HTTP: at, ZMQ: fmt.Sprintf("127.0.0.1:%d", 1+n)})
	}
	b.wantAfter(t, func() { ping(kvevents.Ping{Type: "D", HTTP: at, ZMQ: "127.0.0.1:1"}) }, "p2p-"+strings.ReplaceAll(at, ":", "-"))
	if n, most := flaps(), 1+int(time.Since(began)/time.Second); n > most {
		t.Errorf("added and taken out %d times in %v", n, time.Since(began))
	}
}

func FuzzPing(f *testing.F) {
	f.Add(kvevents.Ping{Type: "P", HTTP: "10.0.0.1:8000", ZMQ: "10.0.0.1:14579"}.Append(nil))
	f.Add([]byte("\x84\xa4type\xa1D\xa4rank\x07\xa5other\x92\x01\xc0\xachttp_address\xc0"))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := kvevents.DecodePing(b)
		if err != nil {
			return
		}
		if again, err := kvevents.DecodePing(p.Append(nil)); err != nil || again != p {
			t.Fatalf("%+v, then %+v, %v", p, again, err)
		}
	})
}

func TestExamineSGLang(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/v1/models":
			fmt.Fprint(w, `{"data":[{"id":"q"}]}`)
		case "/get_server_info":
			fmt.Fprint(w, `{"version":"0.5.9","page_size":64,"dp_size":2,"kv_events":{"publisher":"zmq","endpoint_host":"*","endpoint_port_base":5557,"topic":"kv","block_size":64,"dp_size":2}}`)
		default:
			http.NotFound(w, r)
		}
	}))
	defer srv.Close()
	c := discover.NewClient()
	defer c.CloseIdleConnections()
	f, err := discover.Examine(context.Background(), c, srv.URL)
	if err != nil {
		t.Fatal(err)
	}
	var i fleet.Instance
	f.Describe(&i, "10.1.1.1")
	if i.Version != "0.5.9" || i.Layout.BlockTokens != 64 || i.DPRanks != 2 || i.KVEvents != "10.1.1.1:5557" || i.KVTopic != "kv" {
		t.Errorf("%+v", i)
	}
}
