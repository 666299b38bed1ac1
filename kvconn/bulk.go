package kvconn

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/kvlayout"
)

// bulkWriter owns the sending half of one bulk connection. It takes a batch of one
// ticket's units at a time, tickets in turn, and writes it at once: gathered from the
// blocks themselves where source and connection can, else copied into its buffer.
type bulkWriter struct {
	p     *sender
	f     *frameConn
	wake  chan struct{} // one slot
	marks []message     // guarded by p.mu

	// Scratch for the batch being written, reused.
	all    []departure
	sums   []uint64
	buf    []byte // heads, and rows that cannot be sent from where they lie
	pieces []piece
	vecs   [][]byte
	spots  []spot
	whole  []byte // a block for a peer of several ranks
	moves  []Move
	heads  []unitHead // of the moves, or of the refills

	refills []kvlayout.Refill // out of held
	held    []kvlayout.Held
}

// maxHead bounds the head of a batch, without its last unit. It keeps a batch within
// maxBatch and maxSums, and its head within the receiver's buffer.
const maxHead = 16 << 10

// schedule puts g in the ring of tickets if it has units; needs p.mu.
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
	g.p.queueMarks(g, nil)
}

// queueMarks queues g's marks with every bulk writer but one; needs p.mu. They replace marks
// of g that still wait there: only the last round's count, and a peer that asks for
// rounds without reading must not fill our memory.
func (p *sender) queueMarks(g *Outgoing, but *bulkWriter) {
	g.marked = true
	for _, w := range p.bulk {
		if w != but {
			w.marks = slices.DeleteFunc(w.marks, func(m message) bool { return m.(*sent).ID == g.t.ID })
			w.marks = append(w.marks, g.markOf())
		}
	}
	if but == nil || len(p.bulk) > 1 {
		p.wakeBulk()
	}
}

func (g *Outgoing) markOf() *sent { return &sent{ID: g.t.ID, Tag: g.tag, Round: g.round} }

// markBehind appends this round's mark to what is gathered if that ends the round: the
// mark then costs no write and no wake-up of its own.
func (w *bulkWriter) markBehind(g *Outgoing) {
	w.p.mu.Lock()
	defer w.p.mu.Unlock()
	if g.ended || g.marked || !g.committed || g.inflight > 1 || g.head < len(g.queue) {
		return
	}
	w.p.queueMarks(g, w)
	at := len(w.buf)
	w.buf = w.f.frame(w.buf, g.markOf())
	w.pieces = append(w.pieces, piece{n: len(w.buf) - at})
}

// nextWork returns marks, or a batch of one ticket whose fence the caller is then
// inside.
func (p *sender) nextWork(w *bulkWriter, units []uint32) (marks []message, g *Outgoing, _ []uint32) {
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
		n := p.fit(g, g.queue[g.head:])
		for turns := placeTurns; g.places && turns > 1 && g.head+n < len(g.queue); turns-- {
			n += p.fit(g, g.queue[g.head+n:])
		}
		if g.whole {
			n = g.wholeLayers(g.queue[g.head:], n)
		}
		units = append(units, g.queue[g.head:g.head+n]...)
		g.head += n
		if g.head == len(g.queue) {
			g.queue, g.head = g.queue[:0], 0
		}
		g.inflight++
		p.schedule(g)
		return nil, g, units
	}
	return nil, nil, units
}

// fit counts how many of these units make one batch.
func (p *sender) fit(g *Outgoing, units []uint32) (n int) {
	for size, head := 0, 0; n < len(units) && size < p.cfg.BatchBytes && head < maxHead; n++ {
		sh := &g.shapes[int(units[n])/len(g.t.Dest)]
		size += sh.BlockBytes()
		head += batchEntrySize + sh.DigestBytes()
	}
	return n
}

// writeBulk writes until the session is over.
func (w *bulkWriter) writeBulk() {
	beat := time.NewTicker(w.p.cfg.KeepAlive)
	defer beat.Stop()
	var units []uint32
	for w.p.ctx.Err() == nil {
		var err error
		marks, g, batch := w.p.nextWork(w, units[:0])
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

// loadError is a failure of the source: it ends the ticket, not the connection.
type loadError struct{ err error }

func (e *loadError) Error() string { return "load: " + e.err.Error() }
func (e *loadError) Unwrap() error { return e.err }

// batch places or writes units of g, then leaves its fence. The error is the
// connection's; a failed load only ends the ticket.
func (w *bulkWriter) batch(g *Outgoing, units []uint32) (err error) {
	inside := true
	switch {
	case g.places && w.p.pool.device != nil:
		units, inside, err = w.push(g, units)
	case g.places:
		units, inside, err = w.place(g, units)
	}
	for err == nil && inside && len(units) > 0 {
		n := w.p.fit(g, units)
		err = w.send(g, units[:n], n == len(units))
		units = units[n:]
	}
	if load, ok := errors.AsType[*loadError](err); ok {
		g.end(OutcomeOf(load.err, ticket.Corrupt), load, true)
		err = nil
	}
	g.p.mu.Lock()
	g.inflight--
	g.mark()
	g.p.mu.Unlock()
	if inside {
		g.fence.leave()
	}
	return err
}

// send writes units with their rows; last means that they end the batch.
func (w *bulkWriter) send(g *Outgoing, units []uint32, last bool) error {
	bytes, err := w.gather(g, units)
	if err != nil {
		return &loadError{err}
	}
	if last {
		w.markBehind(g)
	}
	if w.f.vec == nil {
		err = w.f.write(w.buf)
	} else {
		err = w.f.writeRows(w.vectors())
	}
	clear(w.pieces) // the blocks are not ours to keep alive
	if err == nil {
		w.p.side.units.Add(float64(len(units)))
		w.p.side.bytes.Add(float64(bytes))
	}
	return err
}

// piece is a stretch of the bytes to write: rows in place, or the next n bytes of the
// writer's buffer.
type piece struct {
	view []byte
	n    int
}

// gather makes the frame of units, a batch if there are several, and returns the size
// of their rows.
func (w *bulkWriter) gather(g *Outgoing, units []uint32) (bytes int, err error) {
	w.buf, w.pieces, w.all = w.buf[:0], w.pieces[:0], w.all[:0]
	for _, u := range units {
		d := w.describe(g, u)
		bytes += d.bytes
		w.all = append(w.all, d)
	}
	if len(w.all) > 1 {
		return bytes, w.frame(g, typeBatch, w.all)
	}
	return bytes, w.frame(g, typeUnit, w.all)
}

// describe makes the head of one unit; it does not read the rows.
func (w *bulkWriter) describe(g *Outgoing, u uint32) departure {
	blocks := len(g.t.Dest)
	layer, index := int(u)/blocks, int(u)%blocks
	sh := &g.shapes[layer]
	rows := min(g.layout.BlockTokens, g.t.Positions-index*g.layout.BlockTokens)
	to := g.t.Dest[index]
	return departure{
		unitHead: unitHead{Ticket: g.t.ID, Tag: g.tag, Layer: uint32(layer), Index: uint32(index),
			Block: to.Block, Generation: to.Generation, Rows: uint32(rows), Heads: uint32(sh.Heads)},
		bytes: sh.PackedBytes(rows),
		same:  sh.same && rows == g.layout.BlockTokens,
	}
}

// departure is one unit that is being sent.
type departure struct {
	unitHead
	bytes int  // of its rows
	same  bool // the receiver keeps these rows as we do
}

// frame appends one frame of typ with all units to the pieces.
func (w *bulkWriter) frame(g *Outgoing, typ frameType, units []departure) error {
	at, rows, heads := len(w.buf), 0, 0
	for n := range units {
		rows, heads = rows+units[n].bytes, heads+int(units[n].Heads)
	}
	c := codec{b: beginFrame(w.buf, w.f.version, typ)}
	if typ == typeBatch {
		h := batchHead{g.t.ID, g.tag, uint32(len(units)), uint32(heads)}
		h.fields(&c)
		for n := range units {
			units[n].entry(&c, &units[n].bytes)
		}
	} else {
		units[0].fields(&c)
	}
	sums := len(c.b)
	w.buf = slices.Grow(c.b, 8*heads)[:sums+8*heads]
	w.pieces = append(w.pieces, piece{n: len(w.buf) - at})
	for n := range units {
		if err := w.rows(g, &units[n]); err != nil {
			return err
		}
		for _, v := range w.sums {
			binary.LittleEndian.PutUint64(w.buf[sums:], v)
			sums += 8
		}
	}
	// Only the head is sealed: the rows follow the sums, in the buffer or elsewhere.
	endRows(w.buf[:sums], at, w.f.out, rows)
	w.f.out++
	return nil
}

// rows appends one unit's rows to the pieces and leaves its digests in sums.
func (w *bulkWriter) rows(g *Outgoing, d *departure) error {
	w.sums = slices.Grow(w.sums[:0], int(d.Heads))[:d.Heads]
	layer, index, n := int(d.Layer), int(d.Index), int(d.Rows)
	first := index * g.layout.BlockTokens
	if src, ok := g.src.(ViewSource); ok && w.f.vec != nil && d.same {
		if view, ok := src.View(layer, index, first, n, w.sums); ok && len(view) == d.bytes {
			w.pieces = append(w.pieces, piece{view: view})
			return nil
		}
	}
	at := len(w.buf)
	w.buf = slices.Grow(w.buf, d.bytes)[:at+d.bytes]
	w.pieces = append(w.pieces, piece{n: d.bytes})
	return g.src.Load(layer, index, first, n, w.buf[at:], w.sums)
}

// vectors lists the bytes to write, in order.
func (w *bulkWriter) vectors() [][]byte {
	w.vecs = w.vecs[:0]
	left := w.buf
	for n, run := 0, 0; n < len(w.pieces); n++ {
		if w.pieces[n].view == nil { // neighbours in the buffer go as one
			run += w.pieces[n].n
		}
		if run > 0 && (w.pieces[n].view != nil || n == len(w.pieces)-1) {
			w.vecs = append(w.vecs, left[:run])
			left, run = left[run:], 0
		}
		if w.pieces[n].view != nil {
			w.vecs = append(w.vecs, w.pieces[n].view)
		}
	}
	return w.vecs
}

// awaitHangUp notices at once when the receiver hangs up. The receiver says nothing
// on a bulk connection, so this read has no deadline: it ends with the session.
func (w *bulkWriter) awaitHangUp() {
	var one [1]byte
	_, err := w.f.conn.Read(one[:])
	if err == nil || w.f.r.Buffered() > 0 {
		err = &wireError{errors.New("bytes from the receiver on a bulk connection")}
	}
	w.p.fail(classify(err), fmt.Errorf("bulk: %w", err))
}
