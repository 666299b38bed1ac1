package kvconn

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/xpyd/xpyd/kvconn/ticket"
)

// bulkWriter owns the sending half of one bulk connection. It takes a batch
// of one ticket's units at a time, tickets in turn, loads them behind each
// other into its one buffer and writes that.
type bulkWriter struct {
	p     *sender
	f     *frameConn
	wake  chan struct{} // one slot
	buf   []byte
	sums  []uint64
	marks []message // guarded by p.mu
}

// schedule gives g its turn, if it has units; needs p.mu.
func (p *sender) schedule(g *Outgoing) {
	if g.ended || g.inRing || g.head == len(g.queue) {
		return
	}
	g.inRing = true
	p.ring = append(p.ring, g)
	p.wakeBulk()
}

func (p *sender) wakeBulk() {
	for _, w := range p.bulk {
		if w == nil {
			continue
		}
		select {
		case w.wake <- struct{}{}:
		default:
		}
	}
}

// mark queues this round's marks once every unit of it is written; needs p.mu.
func (g *Outgoing) mark() {
	if g.ended || g.marked || !g.committed || g.inflight > 0 || g.head < len(g.queue) {
		return
	}
	g.marked = true
	for _, w := range g.p.bulk {
		w.marks = append(w.marks, &sent{ID: g.t.ID, Tag: g.tag, Round: g.round})
	}
	g.p.wakeBulk()
}

// take returns the next work: marks, or a batch of one ticket inside whose
// fence the caller then is.
func (p *sender) take(w *bulkWriter, units []uint32) (marks []message, g *Outgoing, _ []uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(w.marks) > 0 {
		marks, w.marks = w.marks, nil
		return marks, nil, units
	}
	for len(p.ring) > 0 {
		g := p.ring[0]
		p.ring = p.ring[1:]
		g.inRing = false
		if g.ended || !g.fence.enter() {
			continue
		}
		for size := 0; g.head < len(g.queue) && size < p.cfg.BatchBytes; g.head++ {
			u := g.queue[g.head]
			units = append(units, u)
			gr, _ := g.layout.Group(int(u) / len(g.t.Dest))
			size += unitBytes(gr.KVHeads, gr.PackedBytes(g.layout.BlockTokens))
		}
		if g.head == len(g.queue) {
			g.queue, g.head = g.queue[:0], 0
		}
		g.inflight++
		p.schedule(g)
		return nil, g, units
	}
	return nil, nil, units
}

// run writes until the session is over.
func (w *bulkWriter) run() {
	beat := time.NewTicker(w.p.cfg.KeepAlive)
	defer beat.Stop()
	var units []uint32
	for w.p.ctx.Err() == nil {
		var err error
		marks, g, batch := w.p.take(w, units[:0])
		units = batch
		switch {
		case len(marks) > 0:
			err = w.f.send(marks...)
		case g != nil:
			err = w.batch(g, units)
		default:
			select {
			case <-w.p.ctx.Done():
			case <-w.wake:
			case <-beat.C:
				err = w.f.send(bare(typeBeat))
			}
		}
		if err != nil {
			w.p.fail(classify(err), fmt.Errorf("bulk: %w", err))
			return
		}
	}
}

// batch loads and writes units of g, then leaves its fence. The error is the
// connection's; a failed load only ends the ticket.
func (w *bulkWriter) batch(g *Outgoing, units []uint32) error {
	w.buf = w.buf[:0]
	bytes := 0
	for _, u := range units {
		n, err := w.load(g, u)
		if err != nil {
			g.end(OutcomeOf(err, ticket.Corrupt), fmt.Errorf("load: %w", err), true)
			g.fence.leave()
			return nil
		}
		bytes += n
	}
	err := w.f.write(w.buf)
	g.p.mu.Lock()
	g.inflight--
	g.mark()
	g.p.mu.Unlock()
	g.fence.leave()
	if err != nil {
		return err
	}
	w.p.side.units.Add(float64(len(units)))
	w.p.side.bytes.Add(float64(bytes))
	return nil
}

// load appends one unit's frame to the buffer and returns its row bytes.
func (w *bulkWriter) load(g *Outgoing, u uint32) (int, error) {
	blocks, bt := len(g.t.Dest), g.layout.BlockTokens
	layer, index := int(u)/blocks, int(u)%blocks
	gr, _ := g.layout.Group(layer)
	first := index * bt
	rows := min(bt, g.t.Positions-first)
	size := gr.PackedBytes(rows)

	at := len(w.buf)
	w.buf = slices.Grow(w.buf, unitBytes(gr.KVHeads, size))
	w.buf = beginFrame(w.buf, w.f.version, typeUnit)
	d := g.t.Dest[index]
	head := unitHead{Ticket: g.t.ID, Tag: g.tag, Layer: uint32(layer), Index: uint32(index),
		Block: d.Block, Generation: d.Generation, Rows: uint32(rows), Heads: uint32(gr.KVHeads)}
	w.buf = head.append(w.buf)
	sums := len(w.buf)
	payload := sums + 8*gr.KVHeads
	w.buf = w.buf[:payload+size]
	w.sums = slices.Grow(w.sums[:0], gr.KVHeads)[:gr.KVHeads]
	if err := g.src.Load(layer, index, first, rows, w.buf[payload:], w.sums); err != nil {
		return 0, err
	}
	for i, v := range w.sums {
		binary.LittleEndian.PutUint64(w.buf[sums+8*i:], v)
	}
	endFrame(w.buf, at, w.f.out)
	w.f.out++
	return size, nil
}

// watch notices at once when the receiver hangs up. The receiver says nothing
// on a bulk connection, so this read has no deadline: it ends with the session.
func (w *bulkWriter) watch() {
	var one [1]byte
	_, err := w.f.conn.Read(one[:])
	if err == nil || w.f.r.Buffered() > 0 {
		err = &wireError{errors.New("bytes from the receiver on a bulk connection")}
	}
	w.p.fail(classify(err), fmt.Errorf("bulk: %w", err))
}
