package fleet

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/textproto"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/xpyd/xpyd/internal/trust"
)

// lifelinePath is held open for ever by a native worker.
const lifelinePath = "/xpyd/v1/lifeline"

// LifelineConfig configures a Lifeline; zero fields take their defaults.
type LifelineConfig struct {
	Dial    func(ctx context.Context, network, addr string) (net.Conn, error)
	TLS     *tls.Config   // for https URLs
	Ring    *trust.Ring   // the fleet's secrets; nil: members are shown none
	Timeout time.Duration // to dial and to get the response head; default 2 s
	Backoff time.Duration // first wait before dialling again, doubling; default 250 ms
	Most    time.Duration // longest wait; default 5 s
	Log     *slog.Logger
}

func (c *LifelineConfig) defaults() {
	if c.Timeout == 0 {
		c.Timeout = 2 * time.Second
	}
	if c.Backoff == 0 {
		c.Backoff = 250 * time.Millisecond
	}
	if c.Most == 0 {
		c.Most = 5 * time.Second
	}
	if c.Dial == nil {
		d := &net.Dialer{KeepAliveConfig: net.KeepAliveConfig{
			Enable: true, Idle: time.Second, Interval: time.Second, Count: 3,
		}}
		c.Dial = d.DialContext
	}
}

// Lifeline holds one TCP connection to each live member, so that the end of
// its process is known at once, without asking: the kernel closes what a
// dead process held. A member that has no lifeline is merely not watched.
type Lifeline struct {
	fleet  *Watcher
	cfg    LifelineConfig
	log    *slog.Logger
	tokens *trust.Tokens

	cancel context.CancelFunc
	wg     sync.WaitGroup
}

// WatchLifeline reports the end of members' processes to w. The caller
// closes the Lifeline before w.
func WatchLifeline(w *Watcher, cfg LifelineConfig) *Lifeline {
	cfg.defaults()
	ctx, cancel := context.WithCancel(context.Background())
	l := &Lifeline{fleet: w, cfg: cfg, log: logger(cfg.Log), tokens: trust.NewTokens(cfg.Ring), cancel: cancel}
	l.wg.Go(func() { l.run(ctx) })
	return l
}

// Close drops all lifelines and waits.
func (l *Lifeline) Close() {
	l.cancel()
	l.wg.Wait()
}

// target is what one lifeline goroutine is for.
type target struct {
	id     string
	epoch  uint64
	url    string
	source Source
}

func (l *Lifeline) run(ctx context.Context) {
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
			if m.Dialect != "native" {
				continue // its 200 would mean nothing
			}
			// A dead static member is dialled on: nothing else would notice
			// that it is back.
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
				l.wg.Go(func() { l.watch(tctx, t) })
			}
		}
	}
}

// watch holds a lifeline to t for as long as ctx lasts.
func (l *Lifeline) watch(ctx context.Context, t target) {
	wait := l.cfg.Backoff
	for ctx.Err() == nil {
		conn, err := l.open(ctx, t)
		if err != nil {
			l.log.Debug("no lifeline", "id", t.id, "err", err)
		} else {
			wait = l.cfg.Backoff
			if err = l.hold(ctx, conn, t); ctx.Err() == nil {
				l.fleet.ReportDead(t.id, t.epoch, fmt.Sprintf("lifeline ended: %v", err))
			}
		}
		// Jitter: many watchers lose the same worker at the same time.
		pause := time.NewTimer(wait/2 + rand.N(wait/2+1))
		select {
		case <-ctx.Done():
		case <-pause.C:
		}
		pause.Stop()
		wait = min(2*wait, l.cfg.Most)
	}
}

// open dials and asks; the response head is read when it returns.
func (l *Lifeline) open(ctx context.Context, t target) (net.Conn, error) {
	u, err := url.Parse(t.url)
	if err != nil {
		return nil, err
	}
	port := u.Port()
	if port == "" {
		port = map[string]string{"https": "443"}[u.Scheme]
	}
	if port == "" {
		port = "80"
	}
	dialCtx, cancel := context.WithTimeout(ctx, l.cfg.Timeout)
	defer cancel()
	conn, err := l.cfg.Dial(dialCtx, "tcp", net.JoinHostPort(u.Hostname(), port))
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(dialCtx, func() { conn.Close() })
	defer stop()
	if u.Scheme == "https" {
		conn, err = l.secure(dialCtx, conn, u.Hostname())
		if err != nil {
			return nil, err
		}
	}
	if err := ask(conn, u.Host, l.header(t)); err != nil {
		conn.Close()
		return nil, err
	}
	if !stop() {
		return nil, dialCtx.Err()
	}
	return conn, nil
}

// header is the line by which t knows us; its secrets may change while it lives.
func (l *Lifeline) header(t target) string {
	m := l.fleet.Snapshot().Get(t.id)
	if m == nil {
		return ""
	}
	token := l.tokens.HTTP(t.id, t.epoch, m.Secrets)
	if token == "" {
		return ""
	}
	return trust.Header + ": " + token + "\r\n"
}

func (l *Lifeline) secure(ctx context.Context, conn net.Conn, host string) (net.Conn, error) {
	conf := &tls.Config{MinVersion: tls.VersionTLS12}
	if l.cfg.TLS != nil {
		conf = l.cfg.TLS.Clone()
	}
	if conf.ServerName == "" {
		conf.ServerName = host
	}
	t := tls.Client(conn, conf)
	if err := t.HandshakeContext(ctx); err != nil {
		conn.Close()
		return nil, err
	}
	return t, nil
}

const maxHeadBytes = 8 << 10

// ask sends the request and reads the response head: 200 means that the
// worker holds the line. Bytes of the body that came along are dropped.
func ask(conn net.Conn, host, header string) error {
	if _, err := fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: %s\r\nUser-Agent: xpyd\r\nConnection: close\r\n%s\r\n", lifelinePath, host, header); err != nil {
		return err
	}
	r := textproto.NewReader(bufio.NewReader(io.LimitReader(conn, maxHeadBytes)))
	status, err := r.ReadLine()
	if err != nil {
		return err
	}
	if f := strings.Fields(status); len(f) < 2 || !strings.HasPrefix(f[0], "HTTP/1.") || f[1] != "200" {
		return fmt.Errorf("answer %q", clip(status))
	}
	head, err := r.ReadMIMEHeader()
	if err != nil {
		return err
	}
	if !strings.EqualFold(head.Get("Transfer-Encoding"), "chunked") {
		return errors.New("answer is not chunked")
	}
	return nil
}

// hold reads until the line ends, and says how. That the line was opened is
// a sign of life of those that send no others; it is repeated until it counts,
// because a reported death makes the fleet deaf for a while.
func (l *Lifeline) hold(ctx context.Context, conn net.Conn, t target) error {
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer conn.Close()
	defer stop()
	buf := make([]byte, 64)
	for heard := t.source == NATS; ; {
		var until time.Time
		if heard = heard || l.fleet.ReportAlive(t.id, t.epoch); !heard {
			until = time.Now().Add(l.cfg.Backoff)
		}
		if err := conn.SetReadDeadline(until); err != nil {
			return err
		}
		if _, err := conn.Read(buf); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
	}
}
