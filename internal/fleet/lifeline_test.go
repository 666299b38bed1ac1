package fleet_test

import (
	"crypto/tls"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/internal/trust/trusttest"
)

// TestLifelineToken: over the fleet's TLS, too, a lifeline shows the member's token for its run, of a secret
// that it has, and follows a change of secrets; foreign engines are not asked.
func TestLifelineToken(t *testing.T) {
	noLeak(t)
	old, next := trust.NewSecret(), trust.NewSecret()
	ring, err := trust.NewRing(old)
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	accepts := old
	shown := make(chan string, 64)
	worker := httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		mu.Lock()
		want := accepts.Token(trust.HTTP, trust.Member("d", 7))
		mu.Unlock()
		got := r.Header.Get(trust.Header)
		shown <- got
		if got != want {
			rw.WriteHeader(http.StatusUnauthorized)
			return
		}
		rw.(http.Flusher).Flush()
		<-r.Context().Done()
	}))
	ca := trusttest.New(t)
	cert, key, _ := ca.Member(t, "anywhere")
	creds, err := trust.NewTLS(cert, key, ca.CA(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	worker.TLS = &tls.Config{GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return creds.Server(), nil }}
	worker.StartTLS()
	t.Cleanup(worker.Close)
	w := watch(t, fleet.WatcherConfig{})
	l := fleet.WatchLifeline(w, fleet.LifelineConfig{TLS: creds.Client(), Ring: ring, Backoff: time.Millisecond, Most: 5 * time.Millisecond})
	t.Cleanup(l.Close)
	foreign := instance("engine", fleet.Decode)
	foreign.URL, foreign.Dialect = worker.URL+"/foreign", "openai"
	i := instance("d", fleet.Decode)
	i.URL, i.Epoch, i.Secrets = worker.URL, 7, ring.IDs()
	for _, m := range []fleet.Instance{foreign, i} {
		if err := w.AddStatic(m, fleet.Static); err != nil {
			t.Fatal(err)
		}
	}
	if got, want := <-shown, old.Token(trust.HTTP, trust.Member("d", 7)); got != want {
		t.Errorf("shown %q, want %q", got, want)
	}
	// The secret is replaced: what was accepted goes on, and the next one is by
	// the new secret.
	if err := ring.Set(next); err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	accepts = next
	mu.Unlock()
	if !is("d", fleet.Live)(w.Snapshot()) {
		t.Error("dead of a new secret")
	}
	changed := i
	changed.Secrets = next.ID()
	if ok, err := w.Learn(i, changed); !ok || err != nil {
		t.Fatal(ok, err)
	}
	worker.CloseClientConnections()
	want := next.Token(trust.HTTP, trust.Member("d", 7))
	within(t, "no lifeline by the new secret", func() bool {
		select {
		case got := <-shown:
			return got == want
		default:
			return false
		}
	})
}
