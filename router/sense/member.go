package sense

import (
	"errors"
	"fmt"
	"strings"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/router/h1"
)

// NativeDialect is spoken by our own workers, the only ones that fetch from
// others what they lack.
const NativeDialect = "native"

// ErrRefusesUs is a worker of the fleet's own that answers 401. No client hears of
// that: the secret is not theirs to show.
var ErrRefusesUs = errors.New("it does not accept this router's fleet secret: give both the same one")

// Address is where an instance is reached: a worker of the fleet's own over its
// TLS, if the router has that, and never without it then.
func (ms *Members) Address(inst *fleet.Instance) (string, error) {
	addr, err := h1.Address(inst.URL)
	if err != nil || inst.Dialect != NativeDialect {
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

// Introduce shows a worker of the fleet's own whom it has before it. Others are
// shown nothing.
func (ms *Members) Introduce(h *fasthttp.RequestHeader, inst *fleet.Instance) {
	if inst.Dialect != NativeDialect {
		return
	}
	if token := ms.tokens.HTTP(inst.ID, inst.Epoch, inst.Secrets); token != "" {
		h.Set(trust.Header, token)
	}
}

// Admitted makes an error of a 401 by a worker of the fleet's own, and ends its
// answer.
func (ms *Members) Admitted(inst *fleet.Instance, b *h1.Response) error {
	if inst.Dialect != NativeDialect || b.Header.StatusCode() != fasthttp.StatusUnauthorized {
		return nil
	}
	b.Abort()
	ms.probes.refused(inst)
	return ErrRefusesUs
}
