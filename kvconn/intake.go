package kvconn

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// intake is the reading half of one bulk connection: it moves rows from the socket to
// the sinks. Where possible the kernel copies them straight into the destination
// blocks; else they pass through the connection's buffer.
type intake struct {
	s       *Session
	f       *frameConn
	list    []arrival
	sums    []uint64
	bufs    [][]byte
	scratch []byte // one unit to be stored from a copy, or unwanted rows
	placed  placed // of onPlaced, reused

	landing sync.WaitGroup // pushes that are being received
	ahead   chan struct{}  // one token each; capacity below 2: one at a time
}

// arrivalAt is the state of an arriving unit.
type arrivalAt uint8

const (
	arriving  arrivalAt = iota // not looked at yet
	unwanted                   // its rows are thrown away
	wantsCopy                  // claimed; Store gets a copy
	wantsView                  // claimed; its rows go into the block itself
)

// stepBytes is how much is read and verified inside the fence at a time: a revoke waits
// for it, and the bytes are still in the core's cache.
const stepBytes = 256 << 10

// units stores the units of the frame whose head is given.
func (r *intake) units(t frameType, head []byte) (err error) {
	if r.list, r.sums, err = decodeArrivals(t, head, r.f.rest, r.list[:0], r.sums[:0]); err != nil {
		return &wireError{fmt.Errorf("frame type %d: %w", t, err)}
	}
	i, stale := r.s.holder(r.list[0].Ticket, r.list[0].Tag)
	for n := range r.list {
		if r.list[n].bytes < 1 || r.list[n].bytes > r.f.maxUnit {
			return &wireError{fmt.Errorf("unit of %d bytes", r.list[n].bytes)}
		}
		if i == nil {
			r.drop(&r.list[n], stale)
		}
	}
	if r.f.vec == nil {
		return r.copied(i)
	}
	return r.scattered(i)
}

func (r *intake) drop(u *arrival, stale string) {
	u.at = unwanted
	r.s.stale(stale)
}

// holder finds the ticket of a frame with this tag; stale is why there is none.
func (s *Session) holder(id, tag uint64) (i *Incoming, stale string) {
	if i = s.find(id); i == nil {
		return nil, "unknown"
	}
	if i.tag != tag {
		return nil, "tag"
	}
	return i, ""
}

// stale counts what was dropped, if there is a reason.
func (s *Session) stale(reason string) {
	if reason != "" {
		s.m.stale.WithLabelValues(reason).Inc()
	}
}

// copied takes the units one by one; each is complete in the buffer before the fence is
// entered.
func (r *intake) copied(i *Incoming) error {
	for n := range r.list {
		u := &r.list[n]
		rows, err := r.f.takeRows(u.bytes)
		if err != nil {
			return err
		}
		if u.at == unwanted {
			continue
		}
		if !i.fence.enter() {
			r.drop(u, "ended")
			continue
		}
		r.admit(i, u, false)
		if u.at == wantsCopy {
			u.run = rows
			i.settle(u)
		}
		i.fence.leave()
	}
	return nil
}

// admit checks a unit against its ticket, claims it and decides where its rows go;
// inside the fence.
func (r *intake) admit(i *Incoming, u *arrival, views bool) {
	unit, rows, ok := i.addressed(u.Layer, pushedBlock{u.Index, u.Block, u.Generation})
	if l := u.Layer; !ok || int(u.Rows) != rows || int(u.Heads) != i.layers[l].Heads || u.bytes != i.layers[l].PackedBytes(rows) {
		r.drop(u, "address")
		return
	}
	i.mu.Lock()
	ok = i.claim(unit, false)
	i.mu.Unlock()
	if !ok {
		r.drop(u, "duplicate")
		return
	}
	u.unit, u.at = unit, wantsCopy
	if v, ok := i.spec.Sink.(ViewSink); ok && views {
		if u.run, ok = v.View(int(u.Layer), u.Block, 0, int(u.Rows)); ok && len(u.run) == u.bytes {
			u.at = wantsView
		}
	}
}

// scattered reads the rows of all units, as many at a time as have arrived. Each step
// runs inside the fence without waiting; between steps it waits for bytes outside, so
// that a stalled peer cannot hold up a revoke.
func (r *intake) scattered(i *Incoming) error {
	for n, off := 0, 0; n < len(r.list); {
		inside := i != nil && i.fence.enter()
		r.plan(i, inside, n, off)
		got, err := r.f.readRows(r.bufs)
		for off += got; n < len(r.list) && off >= r.list[n].bytes; n++ {
			u := &r.list[n]
			off -= u.bytes
			if inside && u.at != unwanted {
				i.settle(u)
			}
		}
		if inside {
			i.fence.leave()
		}
		if err == errAgain {
			err = r.f.waitRows()
		}
		if err != nil {
			return cut(err)
		}
	}
	return nil
}

// plan lists the memory for the next rows: of unit n from off on, and of the units
// behind it. A copy ends the list, because there is only one scratch buffer.
func (r *intake) plan(i *Incoming, inside bool, n, off int) {
	r.bufs = r.bufs[:0]
	for size := 0; n < len(r.list) && size < stepBytes && len(r.bufs) < maxBatch/2; n++ {
		u := &r.list[n]
		if !inside && u.at != unwanted { // the ticket has ended; what it claimed stays unsettled
			r.drop(u, "ended")
		}
		if u.at == arriving {
			r.admit(i, u, true)
		}
		run := u.run
		if u.at != wantsView {
			if len(r.scratch) < u.bytes {
				r.scratch = make([]byte, u.bytes)
			}
			run = r.scratch[:u.bytes]
		}
		if u.at == wantsCopy {
			u.run = run
		}
		r.bufs = append(r.bufs, run[off:])
		size += u.bytes - off
		off = 0
		if u.at == wantsCopy {
			return
		}
	}
}

// settle verifies or stores a unit whose rows have all arrived; inside the fence.
func (i *Incoming) settle(u *arrival) {
	layer, first := int(u.Layer), int(u.Index)*i.tokens
	var err error
	if u.at == wantsView {
		err = i.spec.Sink.(ViewSink).Verify(layer, u.Block, 0, int(u.Rows), first, u.digests)
	} else {
		err = i.spec.Sink.Store(layer, u.Block, 0, int(u.Rows), first, u.run, u.digests)
	}
	i.stored(err, u.unit)
	if err == nil {
		i.s.side.units.Inc()
		i.s.came(u.bytes)
	}
}

// onPlaced verifies a unit that the peer has written into its block.
func (r *intake) onPlaced(body []byte) error {
	u := &r.placed
	u.Digests = u.Digests[:0]
	if err := r.f.decode(u, body); err != nil {
		return err
	}
	if r.s.lent == nil {
		return &wireError{errors.New("placed: this session shares no memory")}
	}
	i, stale := r.s.holder(u.Ticket, u.Tag)
	if i != nil {
		stale = i.placed(&u.unitHead, u.Digests)
	}
	r.s.stale(stale)
	return nil
}

// onPushed waits for the rows that the peer's device writes, then verifies them. It
// waits outside the fence, so that a slow device cannot hold up a revoke.
func (r *intake) onPushed(body []byte) error {
	m := &landing{}
	if err := r.f.decode(m, body); err != nil {
		return err
	}
	if cap(r.ahead) < 2 {
		return r.land(m)
	}
	r.ahead <- struct{}{} // those before it have deadlines
	r.landing.Go(func() {
		if err := r.land(m); err != nil {
			r.s.fail(classify(err), fmt.Errorf("bulk: %w", err))
		}
		<-r.ahead
	})
	return nil
}

// landing is how long a push of a peer that is not silent may take. A device that
// writes directly is done in moments. Through memory between the pools a push waits
// behind the peer's whole queue, and other work may hold up either device.
func (s *Session) landing() time.Duration {
	if _, staged := holdAs[StagedHold](s.lent); staged {
		return 5 * s.cfg.PeerSilence
	}
	return s.cfg.PeerSilence
}

// land receives one push.
func (r *intake) land(m *landing) (err error) {
	ctx, cancel := context.WithTimeout(r.s.ctx, r.s.landing())
	defer cancel()
	if hold, ok := holdAs[DeviceHold](r.s.lent); ok {
		err = hold.Landed(ctx, m.Number)
	} else if hold, ok := holdAs[StagedHold](r.s.lent); ok {
		if err = hold.Receive(ctx, m.Number, len(m.Blocks)); err == nil {
			defer hold.Free(m.Number)
		}
	} else {
		return &wireError{errors.New("pushed: this session shares no device memory")}
	}
	switch {
	case errors.Is(err, ErrForgotten):
		r.s.stale("duplicate")
		return nil
	case err != nil && ctx.Err() != nil:
		return fmt.Errorf("push %d, of %d blocks of layer %d, has not landed in %v: %w: %w", m.Number, len(m.Blocks), m.Layer, r.s.landing(), errDeadline, err)
	case err != nil: // the way between the devices has failed
		return fmt.Errorf("push %d: %w", m.Number, err)
	}
	i, stale := r.s.holder(m.Ticket, m.Tag)
	if i != nil {
		stale = i.pushed(m)
	}
	r.s.stale(stale)
	return nil
}

// readBulk stores units until the connection ends.
func (s *Session) readBulk(n int, f *frameConn) {
	r := &intake{s: s, f: f}
	if hold, ok := holdAs[StagedHold](s.lent); ok {
		r.ahead = make(chan struct{}, hold.Ahead())
	}
	defer r.landing.Wait()
	for {
		typ, body, err := f.next()
		if err == nil {
			if typ != typePushed {
				r.landing.Wait() // this frame was sent behind the pushes
			}
			switch typ {
			case typeUnit, typeBatch:
				err = r.units(typ, body)
			case typePlaced:
				err = r.onPlaced(body)
			case typePushed:
				err = r.onPushed(body)
			case typeSent:
				m := &sent{}
				if err = f.decode(m, body); err == nil {
					s.onSent(m, n)
				}
			case typeBeat:
				s.beats[n].Store(time.Now().UnixNano())
			default:
				err = &wireError{fmt.Errorf("frame type %d on a bulk connection", typ)}
			}
		}
		if err != nil {
			s.fail(classify(err), fmt.Errorf("bulk: %w", err))
			return
		}
	}
}
