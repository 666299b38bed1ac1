package sense

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/scarce"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/router/h1"
)

// ErrRefusesUs is a 401 from a worker of the fleet's own. Clients do not see it: the secret
// is not theirs to show.
var ErrRefusesUs = errors.New("it does not accept this router's fleet secret: give both the same one")

// Address is where an instance is reached: a worker of the fleet's own over its TLS if the
// router has that, and then never without.
func (ms *Members) Address(inst *fleet.Instance) (string, error) {
	addr, err := h1.Address(inst.URL)
	if err != nil || inst.Dialect != fleet.Native {
		return addr, err
	}
	rest, https := strings.CutPrefix(addr, h1.Secure)
	switch with := ms.MemberTLS; {
	case https && with:
		return h1.Member + rest, nil
	case https:
		return "", fmt.Errorf("its URL is %s, and this router has no fleet.tls_cert", inst.URL)
	case with:
		return "", fmt.Errorf("its URL is %s, and this router's fleet.tls_cert asks for https: set fleet.tls_cert there too", inst.URL)
	}
	return addr, nil
}

// Introduce shows a worker of the fleet's own the token made for it. Others are shown
// nothing.
func (ms *Members) Introduce(h *fasthttp.RequestHeader, inst *fleet.Instance) {
	if inst.Dialect != fleet.Native {
		return
	}
	if token := ms.tokens.HTTP(inst.ID, inst.Epoch, inst.Secrets); token != "" {
		h.Set(trust.Header, token)
	}
}

// Admitted turns a 401 from a worker of the fleet's own into an error, and ends its answer.
func (ms *Members) Admitted(inst *fleet.Instance, b *h1.Response) error {
	if inst.Dialect != fleet.Native || b.Header.StatusCode() != fasthttp.StatusUnauthorized {
		return nil
	}
	b.Abort()
	ms.refused(inst)
	return ErrRefusesUs
}

// Suspect checks a worker whose connection broke: it is reported dead if it takes no new
// one.
func (ms *Members) Suspect(inst *fleet.Instance, err error) {
	if scarce.Ours(err) || errors.Is(err, ErrRefusesUs) {
		return
	}
	if errors.Is(err, syscall.ECONNREFUSED) {
		ms.Fleet.ReportDead(inst.ID, inst.Epoch, err.Error())
		return
	}
	ms.knock(inst, func(derr error) {
		if derr != nil {
			ms.Fleet.ReportDead(inst.ID, inst.Epoch, fmt.Sprintf("%v, then %v", err, derr))
		}
	})
}

// Ask asks a worker whether it is there, until l ends. Any answer counts, and if it refuses the
// connection it is reported dead.
func (ms *Members) Ask(l *h1.Life, inst *fleet.Instance) error {
	addr, err := ms.Address(inst)
	if err != nil {
		return err
	}
	h := ms.Client.Header()
	defer ms.Client.Recycle(h)
	h.SetMethod(fasthttp.MethodGet)
	h.SetRequestURI("/health")
	ms.Introduce(h, inst)
	b, err := ms.Client.Do(l, addr, h, nil, nil)
	if err != nil {
		if errors.Is(err, syscall.ECONNREFUSED) {
			ms.Suspect(inst, err)
		}
		return err
	}
	_, _ = b.All(maxHealth) // for the connection's next use
	b.Finish()
	return nil
}

const maxHealth = 64 << 10

// knock connects to a worker and passes on the result; other knocks are dropped meanwhile.
// A slow answer counts as none. If the router itself cannot connect, nothing is passed on.
func (ms *Members) knock(inst *fleet.Instance, then func(error)) {
	addr, err := h1.Address(inst.URL)
	if err != nil {
		return
	}
	key := probeKey{id: inst.ID, epoch: inst.Epoch}
	ms.mu.Lock()
	busy := ms.knocks[key]
	ms.knocks[key] = true
	ms.mu.Unlock()
	if busy {
		return
	}
	done := func() {
		ms.mu.Lock()
		defer ms.mu.Unlock()
		delete(ms.knocks, key)
	}
	if !ms.Spawn(func() {
		defer done()
		ctx, cancel := context.WithTimeout(ms.Ctx, 500*time.Millisecond)
		defer cancel()
		conn, err := ms.Client.Dial(ctx, "tcp", h1.Bare(addr))
		if err == nil {
			conn.Close()
		}
		if ms.Ctx.Err() == nil && !scarce.Ours(err) {
			then(err)
		}
	}) {
		done()
	}
}

// Knocking reports whether a connection is being tried; for tests.
func (ms *Members) Knocking() bool {
	ms.mu.Lock()
	defer ms.mu.Unlock()
	return len(ms.knocks) > 0
}

// ReviveEvery is how often dead members that do not announce themselves are tried.
const ReviveEvery = 2 * time.Second

// Revive tries dead members that do not announce themselves, each on its own goroutine and
// one at a time.
func (ms *Members) Revive() {
	s := ms.Fleet.Snapshot()
	for i := range s.Members {
		if m := &s.Members[i]; m.State == fleet.Dead && m.Source != fleet.NATS {
			ms.knock(&m.Instance, func(err error) {
				if err == nil {
					ms.Fleet.ReportAlive(m.ID, m.Epoch)
				}
			})
		}
	}
}
