package zmtp

import (
	"bytes"
	"sync"
	"sync/atomic"
)

// Bounds of a Publisher's subscribers.
const (
	maxSubscribers = 1024              // connections
	maxTopics      = 64                // subscriptions of one
	maxQueue       = 4096              // messages waiting for one
	maxQueueBytes  = 64 << 20          // their bytes; one more message may wait
	maxQueuedBytes = 4 * maxQueueBytes // for all, in equal parts
)

// Publisher is a listening PUB socket. A subscriber that does not keep up loses messages, as with
// any PUB: the published data must make that noticeable.
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
	queue  chan [][]byte // messages, shared with other subscribers
	bytes  atomic.Int64
}

// ListenPublisher publishes on host:port; port 0 takes a free one.
func ListenPublisher(addr string, cfg Config) (*Publisher, error) {
	p := &Publisher{all: map[*subscriber]struct{}{}}
	return p, p.listen(addr, Pub, cfg, maxSubscribers, p.serveSubscriber)
}

// Subscribers returns how many connections have subscribed to something.
func (p *Publisher) Subscribers() int { return int(p.count.Load()) }

// Publish sends a message to each subscriber to a prefix of the first frame. It does not block.
func (p *Publisher) Publish(frames ...[]byte) {
	if p.count.Load() == 0 || len(frames) == 0 {
		return
	}
	size := int64(0)
	for _, f := range frames {
		size += int64(len(f))
	}
	var message [][]byte
	p.subs.Lock()
	defer p.subs.Unlock()
	for s := range p.all {
		if !s.wants(frames[0]) {
			continue
		}
		if message == nil { // one copy, shared and read only
			message = clone(frames, size)
		}
		if !s.offer(message, size, maxQueuedBytes/int64(len(p.all))) {
			p.dropped.Add(1)
		}
	}
}

// clone copies a message of size bytes.
func clone(frames [][]byte, size int64) [][]byte {
	all, out := make([]byte, 0, size), make([][]byte, len(frames))
	for i, f := range frames {
		at := len(all)
		all = append(all, f...)
		out[i] = all[at:]
	}
	return out
}

// offer queues a message unless the subscriber is too far behind. An empty queue takes any.
func (s *subscriber) offer(message [][]byte, size, room int64) bool {
	if queued := s.bytes.Load(); queued > 0 && queued+size > min(room, maxQueueBytes) {
		return false
	}
	s.bytes.Add(size)
	select {
	case s.queue <- message:
		return true
	default:
		s.bytes.Add(-size)
		return false
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

// serveSubscriber reads subscriptions while another goroutine writes messages.
func (p *Publisher) serveSubscriber(c *Conn) {
	s := &subscriber{conn: c, topics: map[string]int{}, queue: make(chan [][]byte, maxQueue)}
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case message := <-s.queue:
				err := c.WriteMessage(message...)
				for _, f := range message {
					s.bytes.Add(-int64(len(f)))
				}
				if err != nil {
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

// subscribe adds or ends a subscription; false if the peer misbehaves.
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
