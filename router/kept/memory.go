package kept

import (
	"sync"
	"time"
)

// memory keeps entries in this process, in the order of their last use, which is that of their end.
type memory struct {
	cfg Config

	mu            sync.Mutex // guards the following
	by            map[string]*held
	first, last   *held // used last, and longest ago
	bytes         int64
	full, expired uint64
}

type held struct {
	id         string
	entry      *Entry
	until      time.Time
	prev, next *held
}

func (m *memory) put(id string, e *Entry) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.expire()
	if old := m.by[id]; old != nil {
		m.remove(old)
	}
	for len(m.by) > 0 && (len(m.by) >= m.cfg.Entries || m.bytes+e.size() > m.cfg.Bytes) {
		m.full++
		m.remove(m.last)
	}
	h := &held{id: id, entry: e}
	m.by[id] = h
	m.bytes += e.size()
	m.front(h)
}

func (m *memory) get(id string) *Entry {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.expire()
	h := m.by[id]
	if h == nil {
		return nil
	}
	m.unlink(h)
	m.front(h)
	return h.entry
}

func (m *memory) drop(id string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if h := m.by[id]; h != nil {
		m.remove(h)
	}
}

func (m *memory) stats() Stats {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.expire()
	return Stats{Entries: len(m.by), Bytes: m.bytes, Full: m.full, Expired: m.expired}
}

// expire removes what is too old. m.mu is held, as in all that follows.
func (m *memory) expire() {
	for now := time.Now(); m.last != nil && !now.Before(m.last.until); {
		m.expired++
		m.remove(m.last)
	}
}

func (m *memory) remove(h *held) {
	m.unlink(h)
	delete(m.by, h.id)
	m.bytes -= h.entry.size()
}

func (m *memory) front(h *held) {
	h.until = time.Now().Add(m.cfg.TTL)
	h.next = m.first
	if m.first != nil {
		m.first.prev = h
	} else {
		m.last = h
	}
	m.first = h
}

func (m *memory) unlink(h *held) {
	if h.prev != nil {
		h.prev.next = h.next
	} else {
		m.first = h.next
	}
	if h.next != nil {
		h.next.prev = h.prev
	} else {
		m.last = h.prev
	}
	h.prev, h.next = nil, nil
}
