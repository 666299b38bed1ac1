package fleet

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/xpyd/xpyd/internal/trust"
)

// lifelinePath is a route that a native worker answers without end.
const lifelinePath = "/xpyd/v1/lifeline"

// LifelineConfig configures a Lifeline; zero fields take their defaults.
type LifelineConfig struct {
	TLS     *tls.Config   // for https URLs
	Ring    *trust.Ring   // the fleet's secrets; nil: none
	Dial    Dial          // nil: a net.Dialer whose connections notice within seconds that a host is gone
	Timeout time.Duration // to dial and to get the response head; default 2 s
	Backoff time.Duration // first wait before dialling again, doubling; default 250 ms
	Most    time.Duration // longest wait; default 5 s
	Log     *slog.Logger
}

// Lifeline holds a TCP connection to each live member, which its kernel closes when the process
// dies. A member to which none can be opened is merely not watched this way.
type Lifeline struct {
	fleet  *Watcher
	cfg    LifelineConfig
	log    *slog.Logger
	tokens *trust.Tokens
	client *http.Client

	cancel context.CancelFunc
	wg     sync.WaitGroup
}

// WatchLifeline reports the end of members' processes to w. The caller closes the Lifeline
// before w.
func WatchLifeline(w *Watcher, cfg LifelineConfig) *Lifeline {
	orDefault(&cfg.Timeout, 2*time.Second)
	orDefault(&cfg.Backoff, 250*time.Millisecond)
	orDefault(&cfg.Most, 5*time.Second)
	if cfg.Dial == nil {
		cfg.Dial = (&net.Dialer{KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: time.Second, Interval: time.Second, Count: 3}}).DialContext
	}
	ctx, cancel := context.WithCancel(context.Background())
	l := &Lifeline{fleet: w, cfg: cfg, log: logger(cfg.Log), tokens: trust.NewTokens(cfg.Ring), client: askOnce(cfg.TLS, cfg.Dial), cancel: cancel}
	l.wg.Go(func() { l.follow(ctx) })
	return l
}

// Close drops all lifelines and waits.
func (l *Lifeline) Close() {
	l.cancel()
	l.wg.Wait()
}

// target is the member that one goroutine holds a lifeline to.
type target struct {
	id     string
	epoch  uint64
	url    string
	source Source
}

// follow holds a lifeline to every member that has one.
func (l *Lifeline) follow(ctx context.Context) {
	held := map[target]context.CancelFunc{}
	defer func() {
		for _, cancel := range held {
			cancel()
		}
	}()
	for version := uint64(0); ; {
		s, err := l.fleet.Wait(ctx, version)
		if err != nil {
			return
		}
		version = s.Version
		want := map[target]bool{}
		for i := range s.Members {
			m := &s.Members[i]
			if m.Dialect != Native {
				continue // it does not know the route
			}
			// Nothing else would notice that a dead static member is back.
			if !over(m.State) || m.State == Dead && m.Source != NATS {
				want[target{m.ID, m.Epoch, m.URL, m.Source}] = true
			}
		}
		for t, cancel := range held {
			if !want[t] {
				cancel()
				delete(held, t)
			}
		}
		for t := range want {
			if held[t] == nil {
				tctx, cancel := context.WithCancel(ctx)
				held[t] = cancel
				l.wg.Go(func() { l.keep(tctx, t) })
			}
		}
	}
}

// keep opens a lifeline to t again and again for as long as ctx lasts.
func (l *Lifeline) keep(ctx context.Context, t target) {
	wait := l.cfg.Backoff
	for ctx.Err() == nil {
		opened, err := l.hold(ctx, t)
		switch {
		case !opened:
			l.log.Debug("no lifeline", "id", t.id, "err", err)
		case ctx.Err() == nil:
			wait = l.cfg.Backoff
			l.fleet.ReportDead(t.id, t.epoch, fmt.Sprintf("lifeline ended: %v", err))
		}
		// Jitter: many watchers lose the same worker at the same time.
		pause(ctx, wait/2+rand.N(wait/2+1))
		wait = min(2*wait, l.cfg.Most)
	}
}

func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}

// hold opens a lifeline and reads it until it ends; err says how. An open lifeline is the sign
// of life of members that send none, repeated until it counts: after a reported death the fleet
// is deaf for a while.
func (l *Lifeline) hold(ctx context.Context, t target) (opened bool, err error) {
	var signs sync.WaitGroup
	defer signs.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	late := time.AfterFunc(l.cfg.Timeout, cancel)
	defer late.Stop()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimSuffix(t.url, "/")+lifelinePath, nil)
	if err != nil {
		return false, err
	}
	req.Header.Set("User-Agent", "xpyd")
	if m := l.fleet.Snapshot().Get(t.id); m != nil { // its secrets may change while it lives
		if token := l.tokens.HTTP(t.id, t.epoch, m.Secrets); token != "" {
			req.Header.Set(trust.Header, token)
		}
	}
	resp, err := l.client.Do(req)
	if err != nil {
		return false, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK || !slices.Contains(resp.TransferEncoding, "chunked") || !late.Stop() {
		return false, fmt.Errorf("answer %q", clip(resp.Status))
	}
	if t.source != NATS {
		signs.Go(func() {
			for ctx.Err() == nil && !l.fleet.ReportAlive(t.id, t.epoch) {
				pause(ctx, l.cfg.Backoff)
			}
		})
	}
	if _, err = io.Copy(io.Discard, resp.Body); err == nil {
		err = io.EOF
	}
	return true, err
}
