package discover_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router/discover"
)

// TestKVEventsAddress: a publisher that listens on all addresses is reached at its
// engine's host, in IPv6 too.
func TestKVEventsAddress(t *testing.T) {
	f := func(says, host, want string) {
		t.Helper()
		e := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			switch r.URL.Path {
			case "/v1/models":
				fmt.Fprint(w, `{"data":[{"id":"m"}]}`)
			case "/server_info":
				fmt.Fprintf(w, `{"version":"1","kv_events":{"endpoint_host":%q,"endpoint_port_base":5557}}`, says)
			default:
				w.WriteHeader(404)
			}
		}))
		defer e.Close()
		facts, err := discover.Examine(context.Background(), http.DefaultClient, e.URL)
		if err != nil {
			t.Fatal(err)
		}
		i := fleet.Instance{ID: "e", Role: fleet.Decode, URL: "http://10.0.0.1:8000", Dialect: "sglang"}
		facts.Describe(&i, host)
		if err := i.Validate(); err != nil || i.KVEvents != want {
			t.Errorf("%q at %s: %q, %v", says, host, i.KVEvents, err)
		}
	}
	f("10.0.0.2", "10.0.0.1", "10.0.0.2:5557")
	f("fd00::2", "10.0.0.1", "[fd00::2]:5557")
	f("[fd00::2]", "10.0.0.1", "[fd00::2]:5557")
	for _, here := range []string{"", "*", "0.0.0.0", "127.0.0.1", "localhost", "::", "[::]", "::1"} {
		f(here, "10.0.0.1", "10.0.0.1:5557")
		f(here, "fd00::1", "[fd00::1]:5557")
	}
}
