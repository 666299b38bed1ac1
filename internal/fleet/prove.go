package fleet

import (
	"cmp"
	"crypto/hmac"
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

// gate authenticates connections for the embedded server. A change of the ring counts at once.
type gate struct {
	routes         *trust.Gate
	user, password string                   // of routes, if configured
	revoked        atomic.Pointer[[]string] // names of refused clients; nil: none
}

// Check implements server.Authentication. Clients have proved at the door that they have the
// secret; routes show a token.
func (g *gate) Check(c server.ClientAuthentication) bool {
	o := c.GetOpts()
	if c.Kind() == server.ROUTER {
		return g.route(o)
	}
	ids := g.revoked.Load()
	return c.Kind() == server.CLIENT && (ids == nil || !slices.Contains(*ids, o.Name))
}

func (g *gate) route(o *server.ClientOpts) bool {
	if g.user != "" || g.password != "" {
		return hmac.Equal([]byte(o.Username+"\x00"+o.Password), []byte(g.user+"\x00"+g.password))
	}
	return g.routes.Accepts([]byte(o.Password))
}

// refusals counts refused connections, and logs them once a minute.
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
