package ssd

import (
	"slices"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier/level"
)

// A new unit of a tenant that has its share of the SSD replaces the tenant's own oldest unit.
// The record is overwritten in place, so the log does not move on and nobody else loses units.
// Header and digests expose a torn write, as everywhere.
//
// A tenant is known by the first bytes of its root's hash, which records carry, so that shares
// hold after a restart. Two tenants with the same first bytes have one share together.

// holding is what a tenant has on the SSD.
type holding struct {
	units   int
	writing int    // units being written
	queue   []aged // its units, oldest first, and some that are gone
}

type aged struct {
	key kvcache.Hash
	at  place
}

// settle puts a unit into the index.
func (d *Disk) settle(key kvcache.Hash, p place) {
	d.leave(key)
	d.index[key] = p
	if d.limit == 0 {
		return
	}
	h := d.holding(p.seg.tags[p.slot])
	h.units++
	if len(h.queue) > 2*h.units+64 {
		h.queue = slices.DeleteFunc(h.queue, func(e aged) bool { return d.index[e.key] != e.at })
	}
	h.queue = append(h.queue, aged{key, p})
}

// leave takes a unit out of the index, if it is there.
func (d *Disk) leave(key kvcache.Hash) (was bool) {
	p, was := d.index[key]
	delete(d.index, key)
	if was && d.limit > 0 {
		tag := p.seg.tags[p.slot]
		d.tenants[tag].units--
		d.forgo(tag)
	}
	return was
}

func (d *Disk) holding(tag uint32) *holding {
	h := d.tenants[tag]
	if h == nil {
		h = &holding{}
		d.tenants[tag] = h
	}
	return h
}

// forgo deletes a tenant that has nothing.
func (d *Disk) forgo(tag uint32) {
	if h := d.tenants[tag]; h != nil && h.units == 0 && h.writing == 0 {
		delete(d.tenants, tag)
	}
}

// full reports whether a tenant has its share.
func (d *Disk) full(tag uint32) bool {
	h := d.tenants[tag]
	return d.limit > 0 && h != nil && h.units+h.writing >= d.limit
}

// oldest returns the tenant's oldest unit that may be replaced: not one that is pinned, being
// read or being moved. One that was read since it was written gets another round.
func (d *Disk) oldest(tag uint32) (p place, ok bool) {
	h := d.tenants[tag]
	for range 2 * len(h.queue) {
		e := h.queue[0]
		h.queue[0] = aged{}
		h.queue = h.queue[1:]
		if d.index[e.key] != e.at {
			continue
		}
		hit := &e.at.seg.hits[e.at.slot]
		if *hit || e.at.seg.retired || d.reading[e.at] > 0 || d.env.IsPinned(e.key) {
			*hit = *hit && d.reading[e.at] > 0
			h.queue = append(h.queue, e)
			continue
		}
		return e.at, true
	}
	return p, false
}

// replace hands out the place of the tenant's oldest unit; no segment if the new unit is to be
// left out.
func (d *Disk) replace(u *level.Unit) (s *segment, slot int) {
	d.over++
	p, ok := d.oldest(u.Tenant())
	if !ok {
		return nil, 0
	}
	d.lost++
	d.forget(p.seg.keys[p.slot])
	p.seg.set(int(p.slot), u)
	return p.seg, int(p.slot)
}
