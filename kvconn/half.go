package kvconn

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/xpyd/xpyd/kvconn/ticket"
)

// half is what both ends of a session have: a control connection, with a reader and a
// writer that the owner's goroutines run.
type half struct {
	cfg  *Config
	log  *slog.Logger
	m    *Metrics
	side perSide
	peer Identity
	key  [16]byte // the session's, part of every unit tag
	ctl  *frameConn
	out  chan message // to the control writer

	ctx    context.Context
	cancel context.CancelFunc
	over   chan struct{}               // fail has run to its end
	quit   func(ticket.Outcome, error) // fail
}

// controlQueue is how many control messages may wait for the writer. A longer queue
// means that the peer has stopped reading, which PeerSilence ends anyway.
const controlQueue = 4096

func newHalf(cfg *Config, log *slog.Logger, m *Metrics, side Side, peer Identity, key [16]byte, ctl *frameConn) half {
	h := half{cfg: cfg, log: log.With(logPeer, peer.PeerID.String()), m: m, side: m.of(side), peer: peer, key: key, ctl: ctl,
		out: make(chan message, controlQueue), over: make(chan struct{})}
	h.ctx, h.cancel = context.WithCancel(context.Background())
	return h
}

// post queues a control message; it never blocks.
func (h *half) post(m message) {
	select {
	case h.out <- m:
	default:
		h.quit(ticket.Dead, errStalled)
	}
}

// readControl hands the peer's control messages to handle until the connection ends.
func (h *half) readControl(handle func(frameType, []byte) error) {
	for {
		typ, body, err := h.ctl.next()
		if err == nil {
			err = handle(typ, body)
		}
		if err != nil {
			h.quit(classify(err), fmt.Errorf("control: %w", err))
			return
		}
	}
}

// maxTogether is how many control messages one write sends: it wakes the peer once.
const maxTogether = 16

// writeControl sends what is queued, and what tick, called every KeepAlive, returns,
// until the session is over.
func (h *half) writeControl(tick func(now time.Time) message) {
	every := time.NewTicker(h.cfg.KeepAlive)
	defer every.Stop()
	var together []message
	for {
		var m message
		select {
		case <-h.ctx.Done():
			return
		case m = <-h.out:
		case now := <-every.C:
			m = tick(now)
		}
		if m == nil {
			continue
		}
		together = append(together[:0], m)
		for range min(len(h.out), maxTogether-1) { // nobody else takes from it
			together = append(together, <-h.out)
		}
		err := h.ctl.send(together...)
		clear(together) // not ours to keep alive
		if err != nil {
			h.quit(classify(err), fmt.Errorf("control: %w", err))
			return
		}
	}
}
