package tier

import (
	"fmt"

	"github.com/xpyd/xpyd/internal/kvcache"
)

// saveOwner holds blocks while they are copied out.
const saveOwner = "tier/save"

// KVEvent implements kvcache.Listener: what the index learns is saved, unless
// too much waits already.
func (t *Tiers) KVEvent(ev kvcache.Event) {
	if ev.Kind != kvcache.Stored {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return
	}
	t.unsaved.Add(1)
	select {
	case t.saves <- save{ev.Hash, ev.Parent, ev.Pos}:
	default:
		t.unsaved.Add(-1)
		t.metrics.dropped.WithLabelValues(tierHost).Inc()
	}
}

// saver copies units from the pool to host memory until saves is closed.
func (t *Tiers) saver() {
	defer close(t.writes)
	if t.shared != nil {
		defer close(t.shared.queue)
	}
	for s := range t.saves {
		if t.ctx.Err() == nil {
			t.save(s)
		}
		t.unsaved.Add(-1)
	}
}

func (t *Tiers) save(s save) {
	l := t.host.take(s.key, s.parent)
	if l == nil {
		return // it is there: it came from there, mostly
	}
	defer l.release()
	ids := t.cache.Hold(s.key, saveOwner)
	if ids == nil {
		return // evicted since
	}
	t.shape.gather(t.backend, ids, l.record())
	t.cache.Release(ids, saveOwner)
	l.publish()
	t.metrics.saved.WithLabelValues(tierHost).Inc()
	t.share(share{key: s.key, pos: s.pos})
	if t.disk == nil || t.disk.has(s.key) {
		return
	}
	t.unsaved.Add(1)
	select {
	case t.writes <- write{s.key, s.pos}:
	default:
		t.unsaved.Add(-1)
		t.metrics.dropped.WithLabelValues(tierSSD).Inc()
	}
}

// writer writes units from host memory to the SSD until writes is closed.
func (t *Tiers) writer() {
	for w := range t.writes {
		if t.ctx.Err() == nil {
			t.write(w)
		}
		t.unsaved.Add(-1)
	}
}

func (t *Tiers) write(w write) {
	l := t.host.get(w.key)
	if l == nil {
		return // evicted since
	}
	defer l.release()
	written, err := t.disk.write(w.key, w.pos, l.record())
	if err != nil {
		t.metrics.errors.WithLabelValues("write").Inc()
		t.complain(fmt.Errorf("write to %s: %w", t.cfg.Dir, err))
	}
	if written {
		t.metrics.saved.WithLabelValues(tierSSD).Inc()
	}
}
