package fleet

import (
	"cmp"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/xpyd/xpyd/internal/trust"
)

// How members show the embedded server that they have the fleet's secret: the
// user is the secret's ID, and the signature an HMAC of the server's nonce. What
// a stranger hears who listens in the server's place opens nothing.
func proof(s trust.Secret, nonce []byte) []byte {
	mac := hmac.New(sha256.New, s.Key(trust.NATS, "", sha256.Size))
	mac.Write(nonce)
	return mac.Sum(nil)
}

// gate is the embedded server's door. A ring that changes counts at once.
type gate struct {
	ring *trust.Ring
	// User and password of routes, where they are configured.
	user, password string
	refused        *refusals
	revoked        atomic.Pointer[[]string] // clients of these names are refused; nil: none
}

// Check implements server.Authentication. Routes know no nonces: servers show
// each other a token.
func (g *gate) Check(c server.ClientAuthentication) bool {
	o := c.GetOpts()
	if ids := g.revoked.Load(); ids != nil && c.Kind() == server.CLIENT && slices.Contains(*ids, o.Name) {
		return false // that it would come was to be expected
	}
	ok := c.Kind() == server.ROUTER && g.route(o) || c.Kind() == server.CLIENT && g.client(o, c.GetNonce())
	if !ok {
		g.refused.add(c.RemoteAddress(), time.Now())
	}
	return ok
}

func (g *gate) client(o *server.ClientOpts, nonce []byte) bool {
	sig, err := base64.RawURLEncoding.DecodeString(o.Sig)
	if err != nil || len(nonce) == 0 {
		return false
	}
	for _, s := range g.ring.Secrets() {
		if s.ID() == o.Username {
			return hmac.Equal(sig, proof(s, nonce))
		}
	}
	return false
}

func (g *gate) route(o *server.ClientOpts) bool {
	if g.user != "" || g.password != "" {
		return hmac.Equal([]byte(o.Username+"\x00"+o.Password), []byte(g.user+"\x00"+g.password))
	}
	return g.ring.Accepts(trust.Cluster, "", []byte(o.Password))
}

// refusals counts who was turned away, and says so once a minute.
type refusals struct {
	log *slog.Logger

	mu    sync.Mutex
	last  time.Time // of a line
	total int
	from  map[string]int // at most maxFrom
}

const (
	refusalLines = time.Minute // between two
	maxFrom      = 64
	shownFrom    = 4
)

func (r *refusals) add(addr net.Addr, now time.Time) {
	host, _, err := net.SplitHostPort(fmt.Sprint(addr))
	if err != nil {
		host = "somewhere"
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.total++
	if _, known := r.from[host]; known || len(r.from) < maxFrom {
		r.from[host]++
	}
	if now.Sub(r.last) < refusalLines {
		return
	}
	hosts := slices.SortedFunc(maps.Keys(r.from), func(a, b string) int {
		return cmp.Or(cmp.Compare(r.from[b], r.from[a]), cmp.Compare(a, b))
	})
	more := ""
	if n := len(hosts) - shownFrom; n > 0 {
		hosts, more = hosts[:shownFrom], fmt.Sprintf(" and %d more hosts", n)
	}
	noun := "connections"
	if r.total == 1 {
		noun = "connection"
	}
	r.log.Warn(fmt.Sprintf("%d %s with a wrong fleet secret from %s%s in the last minute; a worker there has another fleet's join-url, or an old one: copy this router's there again",
		r.total, noun, strings.Join(hosts, ", "), more))
	r.last, r.total = now, 0
	clear(r.from)
}
