package kvevents

import (
	"encoding/binary"
	"errors"
	"log/slog"
	"net"
	"sync"

	"github.com/xpyd/xpyd/internal/scarce"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/internal/zmtp"
)

// PublisherConfig says where to publish.
type PublisherConfig struct {
	Listen string // host:port; port 0 takes a free one
	Replay string // the same, of the replay socket; "" leaves it out
	Topic  string
	Arrays bool // events as lists, as SGLang and older vLLMs have them

	// Ring holds the fleet's secrets, one of which a subscriber must know; nil admits everybody.
	Ring *trust.Ring

	Log    *slog.Logger   // failed accepts and refused subscribers; nil for none
	Failed scarce.Counter // counts failed accepts; nil for none
}

// Bounds of what can be replayed.
const (
	keptBatches = 10_000
	keptBytes   = 32 << 20
)

// Publisher publishes batches as vLLM does, with the same replay socket.
type Publisher struct {
	cfg    PublisherConfig
	said   seldom // log lines about refused subscribers
	pub    *zmtp.Publisher
	router *zmtp.Router

	mu    sync.Mutex
	next  uint64
	kept  [][]byte // the newest batches, up to next
	first int      // how many at the front of kept are dropped
	bytes int
}

// Publish listens. The caller closes the publisher.
func Publish(cfg PublisherConfig) (*Publisher, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	p := &Publisher{cfg: cfg}
	end := zmtp.Config{Log: cfg.Log, Failed: cfg.Failed, Refused: p.refused}
	if cfg.Ring != nil {
		end.Doors = (&doors{ring: cfg.Ring}).now
	}
	var err error
	if p.pub, err = zmtp.ListenPublisher(cfg.Listen, end); err != nil {
		return nil, err
	}
	if cfg.Replay != "" {
		end.MaxMessage = 1 << 10
		if p.router, err = zmtp.ListenRouter(cfg.Replay, end, p.replay); err != nil {
			return nil, errors.Join(err, p.pub.Close())
		}
	}
	return p, nil
}

// refused logs subscribers whose handshake failed for lack of the secret.
func (p *Publisher) refused(err error) {
	if p.cfg.Ring == nil || !errors.Is(err, zmtp.ErrKey) && !errors.Is(err, zmtp.ErrMechanism) {
		return
	}
	if n, ok := p.said.due(); ok {
		p.cfg.Log.Warn("KV events: a subscriber without the fleet's secret is refused; is it of an older secret, or a picker that needs kv_events.open?",
			"err", err.Error(), "left_out", n)
	}
}

// Addr returns the address where batches are published.
func (p *Publisher) Addr() net.Addr { return p.pub.Addr() }

// ReplayAddr returns the replay socket's address, nil without one.
func (p *Publisher) ReplayAddr() net.Addr {
	if p.router == nil {
		return nil
	}
	return p.router.Addr()
}

// Subscribers returns the number of subscribers.
func (p *Publisher) Subscribers() int { return p.pub.Subscribers() }

// Renew applies a changed Ring: it disconnects those who came in with a secret not in force now.
func (p *Publisher) Renew() {
	p.pub.Judge()
	if p.router != nil {
		p.router.Judge()
	}
}

// Send publishes a batch.
func (p *Publisher) Send(b *Batch) {
	encode := Append
	if p.cfg.Arrays {
		encode = AppendArrays
	}
	payload := encode(nil, b)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.pub.Publish([]byte(p.cfg.Topic), binary.BigEndian.AppendUint64(nil, p.next), payload)
	p.next++
	if p.router != nil {
		p.kept = append(p.kept, payload)
		p.bytes += len(payload)
		p.trim(keptBatches, keptBytes)
	}
}

// Lose records that events were lost before they could be sent: the sequence gets a gap that no
// replay mends, so that readers start over.
func (p *Publisher) Lose() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.next++
	p.trim(0, 0)
}

// trim drops the oldest batches; p.mu is held.
func (p *Publisher) trim(batches, bytes int) {
	for len(p.kept)-p.first > batches || p.bytes > bytes {
		p.bytes -= len(p.kept[p.first])
		p.kept[p.first] = nil
		p.first++
	}
	if p.first > len(p.kept)/2 {
		p.kept = append(p.kept[:0], p.kept[p.first:]...)
		p.first = 0
	}
}

// replay serves one request: the batches from a number on that are kept now, then the end.
// It skips batches dropped meanwhile, so that a slow reader keeps none of them alive.
func (p *Publisher) replay(_ zmtp.Peer, frames [][]byte, reply func(...[]byte) error) error {
	if n := len(frames); n < 1 || n > 2 || len(frames[n-1]) != 8 {
		return ErrMalformed
	}
	seq := binary.BigEndian.Uint64(frames[len(frames)-1])
	p.mu.Lock()
	end := p.next
	p.mu.Unlock()
	for {
		var payload []byte
		if payload, seq = p.keptFrom(seq); payload == nil || seq >= end {
			return reply(nil, nil, binary.BigEndian.AppendUint64(nil, endSeq), nil)
		}
		if err := reply(nil, []byte(p.cfg.Topic), binary.BigEndian.AppendUint64(nil, seq), payload); err != nil {
			return err
		}
		seq++
	}
}

// keptFrom returns the first batch from a number on, or nil, and its number.
func (p *Publisher) keptFrom(seq uint64) ([]byte, uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	list := p.kept[p.first:]
	seq = max(seq, p.next-uint64(len(list)))
	if seq >= p.next {
		return nil, seq
	}
	return list[uint64(len(list))-(p.next-seq)], seq
}

// Close ends both sockets, and waits.
func (p *Publisher) Close() error {
	err := p.pub.Close()
	if p.router != nil {
		err = errors.Join(err, p.router.Close())
	}
	return err
}
