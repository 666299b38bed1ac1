package fleet

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
)

// HeaderInstance is ID@EPOCH in a worker's answers to GET /health. It tells it from another
// process at its address.
const HeaderInstance = "x-xpyd-instance"

// Is is the value of HeaderInstance.
func (i *Instance) Is() string { return i.ID + "@" + strconv.FormatUint(i.Epoch, 10) }

// ProbeHealth returns a WatcherConfig.Probe that asks members' GET /health, each time on a new
// connection. conf is for https URLs; it and dial may be nil.
func ProbeHealth(conf *tls.Config, dial Dial) func(context.Context, *Instance) error {
	client := askOnce(conf, dial)
	return func(ctx context.Context, m *Instance) error {
		if m.Dialect != Native {
			return errors.New("a foreign engine does not say who it is")
		}
		req, err := http.NewRequestWithContext(ctx, "GET", strings.TrimSuffix(m.URL, "/")+"/health", nil)
		if err != nil {
			return err
		}
		resp, err := client.Do(req)
		if err != nil {
			return err
		}
		resp.Body.Close()
		if is := resp.Header.Get(HeaderInstance); is != m.Is() {
			return fmt.Errorf("%q answers in its place", clip(is))
		}
		return nil
	}
}

// Dial opens a connection, as net.Dialer.DialContext does.
type Dial func(ctx context.Context, network, addr string) (net.Conn, error)

const maxHeadBytes = 8 << 10

// askOnce returns a client whose connections serve one request each. dial may be nil.
func askOnce(conf *tls.Config, dial Dial) *http.Client {
	return &http.Client{
		Transport:     &http.Transport{DisableKeepAlives: true, DisableCompression: true, DialContext: dial, TLSClientConfig: conf, MaxResponseHeaderBytes: maxHeadBytes},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}
