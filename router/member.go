package router

import (
	"errors"
	"fmt"
	"strings"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/trust"
)

// nativeDialect is spoken by our own workers, the only ones that fetch from
// others what they lack.
const nativeDialect = "native"

// errRefusesUs is a worker of the fleet's own that answers 401. No client hears of
// that: the secret is not theirs to show.
var errRefusesUs = errors.New("it does not accept this router's fleet secret: give both the same one")

// address is where an instance is reached: a worker of the fleet's own over its
// TLS, if the router has that, and never without it then.
func (ms *Members) address(inst *fleet.Instance) (string, error) {
	addr, err := hostPort(inst.URL)
	if err != nil || inst.Dialect != nativeDialect {
		return addr, err
	}
	rest, https := strings.CutPrefix(addr, secure)
	switch with := ms.MemberTLS; {
	case https && with:
		return member + rest, nil
	case https:
		return "", fmt.Errorf("its URL is %s, and this router has no fleet.tls_cert", inst.URL)
	case with:
		return "", fmt.Errorf("its URL is %s, and this router's fleet.tls_cert asks for https: set fleet.tls_cert there too", inst.URL)
	}
	return addr, nil
}

// introduce shows a worker of the fleet's own whom it has before it. Others are
// shown nothing.
func (ms *Members) introduce(h *fasthttp.RequestHeader, inst *fleet.Instance) {
	if inst.Dialect != nativeDialect {
		return
	}
	if token := ms.tokens.HTTP(inst.ID, inst.Epoch, inst.Secrets); token != "" {
		h.Set(trust.Header, token)
	}
}

// admitted makes an error of a 401 by a worker of the fleet's own, and ends its
// answer.
func (ms *Members) admitted(inst *fleet.Instance, b *upBody) error {
	if inst.Dialect != nativeDialect || b.header.StatusCode() != fasthttp.StatusUnauthorized {
		return nil
	}
	b.abort()
	ms.probes.refused(inst)
	return errRefusesUs
}
