package discover_test

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"encoding/pem"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router/discover"
)

// api is a fake Kubernetes API server: lists and watches of one service's
// EndpointSlices, with resource versions.
type api struct {
	t   *testing.T
	srv *httptest.Server

	mu      sync.Mutex
	version int
	slices  map[string]string // by name, their JSON
	oldest  int               // version from which a watch can still begin
	lists   int
	froms   []string      // versions that watches began from
	watch   chan string   // lines for the watch there is
	end     chan struct{} // closed: the watch ends
	token   string
}

func newAPI(t *testing.T) *api {
	a := &api{t: t, version: 10, slices: map[string]string{}, watch: make(chan string), end: make(chan struct{}), token: "one"}
	a.srv = httptest.NewTLSServer(http.HandlerFunc(a.serve))
	t.Cleanup(func() { a.srv.CloseClientConnections(); a.srv.Close() })
	return a
}

// credentials is a folder as pods have it.
func (a *api) credentials() string {
	dir := a.t.TempDir()
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.srv.Certificate().Raw})
	for name, text := range map[string]string{"token": "one\n", "ca.crt": string(ca), "namespace": "serving"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			a.t.Fatal(err)
		}
	}
	return dir
}

func (a *api) serve(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	token := a.token
	a.mu.Unlock()
	q := r.URL.Query()
	if r.Header.Get("Authorization") != "Bearer "+token {
		http.Error(w, "no", http.StatusUnauthorized)
		return
	}
	if r.URL.Path != "/apis/discovery.k8s.io/v1/namespaces/serving/endpointslices" || q.Get("labelSelector") != "kubernetes.io/service-name=engines" {
		http.NotFound(w, r)
		return
	}
	if q.Get("watch") == "" {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.lists++
		items := []string{}
		for _, s := range a.slices {
			items = append(items, s)
		}
		slices.Sort(items)
		if q.Get("continue") == "" && len(items) > 1 { // in two pages
			fmt.Fprintf(w, `{"metadata":{"resourceVersion":"%d","continue":"more"},"items":[%s]}`, a.version, items[0])
			return
		}
		if q.Get("continue") != "" {
			items = items[1:]
		}
		fmt.Fprintf(w, `{"metadata":{"resourceVersion":"%d"},"items":[%s]}`, a.version, strings.Join(items, ","))
		return
	}
	a.mu.Lock()
	var from int
	fmt.Sscan(q.Get("resourceVersion"), &from)
	a.froms = append(a.froms, q.Get("resourceVersion"))
	gone, end := from < a.oldest, a.end
	a.mu.Unlock()
	if gone {
		w.WriteHeader(http.StatusGone)
		fmt.Fprint(w, `{"kind":"Status","code":410,"reason":"Expired"}`)
		return
	}
	w.WriteHeader(200)
	w.(http.Flusher).Flush()
	for {
		select {
		case line := <-a.watch:
			fmt.Fprintln(w, line)
			w.(http.Flusher).Flush()
		case <-end:
			return
		case <-r.Context().Done():
			return
		}
	}
}

// set changes a slice and tells the watch.
func (a *api) set(kind, name, endpoints string, port string) {
	a.mu.Lock()
	a.version++
	s := fmt.Sprintf(`{"metadata":{"name":%q,"resourceVersion":"%d"},"addressType":"IPv4","endpoints":[%s],"ports":[{"name":"metrics","port":1},{"name":"http","port":%s}]}`,
		name, a.version, endpoints, port)
	a.slices[name] = s
	if kind == "DELETED" {
		delete(a.slices, name)
	}
	a.mu.Unlock()
	if kind != "" {
		a.watch <- fmt.Sprintf(`{"type":%q,"object":%s}`, kind, s)
	}
}

func endpoint(pod, uid, conditions string) string {
	return fmt.Sprintf(`{"addresses":["127.0.0.1"],"conditions":{%s},"zone":"zone-a","targetRef":{"kind":"Pod","name":%q,"uid":%q}}`, conditions, pod, uid)
}

const ready, ending, unready = `"ready":true`, `"ready":false,"serving":true,"terminating":true`, `"ready":false`

func TestKube(t *testing.T) {
	a := newAPI(t)
	engine := vllm(t, "m", "1.2")
	u, _ := url.Parse(engine.URL)
	port := u.Port()
	a.set("", "s1", endpoint("engines-0", "u0", ready)+","+endpoint("engines-1", "u1", unready), port)
	a.set("", "s2", endpoint("engines-2", "u2", `"ready":null`), port)
	b := &book{}
	cfg := discover.Kubernetes{API: a.srv.URL, Credentials: a.credentials(), Services: []discover.Service{
		{Name: "engines", Role: fleet.Prefill, Dialect: "vllm-nixl", Port: "http", KVEventsPort: 5557}}}
	k, err := discover.FollowKube(cfg, b, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	b.want(t, "engines-0", "engines-2")
	i := b.get("engines-0")
	if i.Role != fleet.Prefill || i.Dialect != "vllm-nixl" || i.Model != "m" || i.Version != "1.2" || i.Layout.BlockTokens != 32 ||
		i.Topology != "zone-a" || i.KVEvents != "127.0.0.1:5557" || i.URL != engine.URL {
		t.Errorf("%+v", i)
	}

	a.set("MODIFIED", "s1", endpoint("engines-0", "u0", ending)+","+endpoint("engines-1", "u1", ready), port)
	b.want(t, "engines-0 draining", "engines-1", "engines-2")
	a.set("MODIFIED", "s1", endpoint("engines-1", "u1", ready), port)
	b.want(t, "engines-1", "engines-2")
	epoch := b.get("engines-1").Epoch
	a.set("MODIFIED", "s1", endpoint("engines-1", "u1b", ready), port) // a new pod of the old name
	until(t, func() string {
		if e := b.get("engines-1").Epoch; e <= epoch {
			return fmt.Sprintf("epoch %d", e)
		}
		return ""
	})
	a.set("DELETED", "s2", "", port)
	b.want(t, "engines-1")

	// A bookmark moves the version on; after the server's end the watch goes
	// on from there, without a list.
	a.watch <- `{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"99"}}}`
	a.mu.Lock()
	close(a.end)
	a.end = make(chan struct{})
	lists := a.lists
	a.version = 99
	watches := len(a.froms)
	a.mu.Unlock()
	until(t, func() string {
		a.mu.Lock()
		defer a.mu.Unlock()
		if len(a.froms) == watches {
			return "no new watch"
		}
		return ""
	})
	a.set("ADDED", "s3", endpoint("engines-3", "u3", ready), port)
	b.want(t, "engines-1", "engines-3")
	a.mu.Lock()
	if a.lists != lists || a.froms[len(a.froms)-1] != "99" {
		t.Errorf("%d lists, watches from %v", a.lists-lists, a.froms)
	}
	a.mu.Unlock()

	// 410, within a stream and as an answer: listed anew, with what was missed.
	a.set("", "s3", endpoint("engines-4", "u4", ready), port)
	a.watch <- `{"type":"ERROR","object":{"kind":"Status","code":410,"message":"too old resource version"}}`
	b.want(t, "engines-1", "engines-4")
	a.mu.Lock()
	a.oldest = 1000
	a.version = 1000
	close(a.end)
	a.end = make(chan struct{})
	a.mu.Unlock()
	a.set("", "s3", endpoint("engines-5", "u5", ready), port)
	b.want(t, "engines-1", "engines-5")

	// The token is renewed, and the API server restarted.
	a.mu.Lock()
	a.token = "two"
	a.mu.Unlock()
	if err := os.WriteFile(filepath.Join(cfg.Credentials, "token"), []byte("two"), 0o600); err != nil {
		t.Fatal(err)
	}
	a.set("", "s1", endpoint("engines-6", "u6", ready), port)
	a.mu.Lock()
	a.oldest = 2000
	a.version = 2000
	a.mu.Unlock()
	a.srv.CloseClientConnections()
	b.want(t, "engines-5", "engines-6")
}

// TestKubeRefusals: a pod that serves another model is shown, with the reason.
func TestKubeRefusals(t *testing.T) {
	a := newAPI(t)
	engine := vllm(t, "other", "1.2")
	u, _ := url.Parse(engine.URL)
	a.set("", "s1", endpoint("engines-0", "u0", ready), u.Port())
	b := &book{}
	k, err := discover.FollowKube(discover.Kubernetes{API: a.srv.URL, Credentials: a.credentials(), Services: []discover.Service{
		{Name: "engines", Role: fleet.Decode, Dialect: "vllm-nixl", Port: u.Port(), Model: "m"}}}, b, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	until(t, func() string {
		text, _ := json.Marshal(k.Refusals())
		if strings.Contains(string(text), "it serves other, the service is for m") {
			return ""
		}
		return string(text)
	})
	b.want(t)
}
