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
		return &wireError{err}
	}
	i, stale := r.s.find(r.list[0].Ticket), "unknown"
	if i != nil && i.tag != r.list[0].Tag {
		i, stale = nil, "tag"
	}
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
	r.s.m.stale.WithLabelValues(stale).Inc()
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
	unit, ok := i.address(&u.unitHead, u.bytes)
	switch {
	case !ok:
		r.drop(u, "address")
		return
	case !i.claim(unit):
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
	i.stored(u.unit, err)
	if err == nil {
		i.s.side.units.Inc()
		i.s.side.bytes.Add(float64(u.bytes))
	}
}

// placed verifies a unit that the peer has written into its block.
func (r *intake) placed(body []byte) (err error) {
	var u unitHead
	if u, r.sums, err = decodePlaced(body, r.sums[:0]); err == nil && r.s.lent == nil {
		err = errors.New("placed: this session shares no memory")
	}
	if err != nil {
		return &wireError{err}
	}
	r.s.onPlaced(&u, r.sums)
	return nil
}

// pushed waits for the rows that the peer's device writes, then verifies them. It waits
// outside the fence, so that a slow device cannot hold up a revoke.
func (r *intake) pushed(body []byte) error {
	m, err := decodeLanding(body)
	if err != nil {
		return &wireError{err}
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
	if _, staged := s.staged(); staged {
		return 5 * s.cfg.PeerSilence
	}
	return s.cfg.PeerSilence
}

// land receives one push.
func (r *intake) land(m *landing) (err error) {
	ctx, cancel := context.WithTimeout(r.s.ctx, r.s.landing())
	defer cancel()
	if hold, ok := r.s.device(); ok {
		err = hold.Landed(ctx, m.Number)
	} else if hold, ok := r.s.staged(); ok {
		if err = hold.Receive(ctx, m.Number, len(m.Blocks)); err == nil {
			defer hold.Free(m.Number)
		}
	} else {
		return &wireError{errors.New("pushed: this session shares no device memory")}
	}
	switch {
	case errors.Is(err, ErrForgotten):
		r.s.m.stale.WithLabelValues("duplicate").Inc()
		return nil
	case err != nil && ctx.Err() != nil:
		return fmt.Errorf("push %d, of %d blocks of layer %d, has not landed in %v: %w: %w", m.Number, len(m.Blocks), m.Layer, r.s.landing(), errDeadline, err)
	case err != nil: // the way between the devices has failed
		return fmt.Errorf("push %d: %w", m.Number, err)
	}
	r.s.onPushed(m)
	return nil
}

// device is the hold of a peer that pushes.
func (s *Session) device() (DeviceHold, bool) {
	if s.lent == nil {
		return nil, false
	}
	h, ok := s.lent.hold.(DeviceHold)
	return h, ok
}

// readBulk stores units until the connection ends.
func (s *Session) readBulk(n int, f *frameConn) {
	r := &intake{s: s, f: f}
	if hold, ok := s.staged(); ok {
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
				err = r.placed(body)
			case typePushed:
				err = r.pushed(body)
			case typeSent:
				var m *sent
				if m, err = decodeSent(body); err == nil {
					s.onSent(m, n)
				} else {
					err = &wireError{err}
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
