package zmtp

import (
	"bytes"
	"net"
	"sync"
	"sync/atomic"
)

// Bounds of a Publisher's subscribers.
const (
	maxSubscribers = 1024     // connections
	maxTopics      = 1024     // subscriptions of one
	maxQueue       = 4096     // messages waiting for one
	maxQueueBytes  = 64 << 20 // and their bytes
)

// Publisher is a PUB socket that listens. A subscriber that does not keep up
// loses messages, as with any PUB: what is published must let it notice.
type Publisher struct {
	server

	subs    sync.Mutex
	all     map[*subscriber]struct{}
	count   atomic.Int32
	dropped atomic.Uint64
}

// subscriber is one connection; Publisher.subs guards its topics.
type subscriber struct {
	conn   *Conn
	topics map[string]int
	queue  chan []byte // encoded messages
	bytes  atomic.Int64
}

// ListenPublisher publishes on host:port; port 0 takes a free one.
func ListenPublisher(addr string, cfg Config) (*Publisher, error) {
	cfg.Type = Pub
	cfg = cfg.withDefaults()
	p := &Publisher{all: map[*subscriber]struct{}{}}
	p.server = server{cfg: cfg, most: maxSubscribers, run: p.serve}
	if err := p.listen(addr); err != nil {
		return nil, err
	}
	return p, nil
}

// Addr is where it listens.
func (p *Publisher) Addr() net.Addr { return p.ln.Addr() }

// Close ends all subscribers, and waits.
func (p *Publisher) Close() error { return p.close() }

// Subscribers is how many connections have subscribed to something.
func (p *Publisher) Subscribers() int { return int(p.count.Load()) }

// Dropped is how many messages were lost on slow subscribers.
func (p *Publisher) Dropped() uint64 { return p.dropped.Load() }

// Publish sends a message to whom it concerns: the first frame begins with one
// of their prefixes. It does not block.
func (p *Publisher) Publish(frames ...[]byte) {
	if p.count.Load() == 0 || len(frames) == 0 {
		return
	}
	var wire []byte
	p.subs.Lock()
	defer p.subs.Unlock()
	for s := range p.all {
		if !s.wants(frames[0]) {
			continue
		}
		if wire == nil { // one copy, shared and read only
			wire = appendMessage(nil, frames)
		}
		if s.bytes.Add(int64(len(wire))) > maxQueueBytes {
			s.bytes.Add(-int64(len(wire)))
			p.dropped.Add(1)
			continue
		}
		select {
		case s.queue <- wire:
		default:
			s.bytes.Add(-int64(len(wire)))
			p.dropped.Add(1)
		}
	}
}

func (s *subscriber) wants(topic []byte) bool {
	for prefix := range s.topics {
		if bytes.HasPrefix(topic, []byte(prefix)) {
			return true
		}
	}
	return false
}

// serve reads subscriptions while another goroutine writes messages.
func (p *Publisher) serve(c *Conn) {
	s := &subscriber{conn: c, topics: map[string]int{}, queue: make(chan []byte, maxQueue)}
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case wire := <-s.queue:
				s.bytes.Add(-int64(len(wire)))
				if c.write(wire) != nil {
					c.Close() // ends the reader
					return
				}
			case <-done:
				return
			}
		}
	})
	p.subs.Lock()
	p.all[s] = struct{}{}
	p.subs.Unlock()
	var frames [][]byte
	for {
		var err error
		if frames, err = c.ReadMessage(frames); err != nil || !p.subscribe(s, frames) {
			break
		}
	}
	p.subs.Lock()
	delete(p.all, s)
	if len(s.topics) > 0 {
		p.count.Add(-1)
	}
	p.subs.Unlock()
	close(done)
	c.Close()
	wg.Wait()
}

// subscribe takes a subscription or its end; false is a peer that misbehaves.
func (p *Publisher) subscribe(s *subscriber, frames [][]byte) bool {
	if len(frames) != 1 || len(frames[0]) == 0 || len(frames[0]) > 256 || frames[0][0] > 1 {
		return false
	}
	topic := string(frames[0][1:])
	p.subs.Lock()
	defer p.subs.Unlock()
	before := len(s.topics)
	if frames[0][0] == 1 {
		if before >= maxTopics && s.topics[topic] == 0 {
			return false
		}
		s.topics[topic]++
	} else if s.topics[topic]--; s.topics[topic] <= 0 {
		delete(s.topics, topic)
	}
	switch {
	case before == 0 && len(s.topics) > 0:
		p.count.Add(1)
	case before > 0 && len(s.topics) == 0:
		p.count.Add(-1)
	}
	return true
}
