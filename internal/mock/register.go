package mock

import (
	"time"

	"github.com/xpyd/xpyd/internal/kvevents"
	"github.com/xpyd/xpyd/internal/zmtp"
)

// registerEvery is how often vLLM's P2pNccl connector registers.
const registerEvery = 3 * time.Second

// register tells a router's ZMQ listener about the mock until it is closed, like engines with
// the P2pNccl connector.
func (e *Engine) register() {
	kind := "P"
	if e.cfg.Role == legDecode {
		kind = "D"
	}
	ping := kvevents.Ping{Type: kind, HTTP: e.Addr(), ZMQ: e.Addr()}.Append(nil)
	tick := time.NewTicker(registerEvery)
	defer tick.Stop()
	var conn *zmtp.Conn
	defer func() {
		if conn != nil {
			conn.Close()
		}
	}()
	for {
		if conn == nil {
			c, err := zmtp.Dial(e.ctx, e.cfg.Register, zmtp.Config{Type: zmtp.Dealer, Identity: []byte(e.Addr())})
			if err != nil {
				e.cfg.Log.Warn("register", "at", e.cfg.Register, "err", err)
			} else {
				conn = c
			}
		}
		if conn != nil && conn.WriteMessage(ping) != nil {
			conn.Close()
			conn = nil
			continue
		}
		select {
		case <-tick.C:
		case <-e.ctx.Done():
			return
		}
	}
}
