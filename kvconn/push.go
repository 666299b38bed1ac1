package kvconn

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/xpyd/xpyd/kvconn/ticket"
)

// DeviceWindow is offered memory that a device of the sender's writes to, digests
// included. Its methods may be called from any goroutine.
type DeviceWindow interface {
	Window
	// Push starts copying blocks of one layer of our pool, whole and with their
	// digests, into the peer's blocks, and does not wait. Pushes run one after the
	// other in the order of their numbers, which rise. The peer's Hold tells it what
	// has landed.
	Push(layer int, moves []Move) (number uint64, err error)
	// Await returns when this push and all before it are over: they no longer read or
	// write anything of ours. Only the device's speed bounds it.
	Await(number uint64) error
}

// LayersWindow is a DeviceWindow that pushes several layers at once.
type LayersWindow interface {
	DeviceWindow
	// PushLayers is Push of the same blocks for this many layers, from layer on. Their
	// rows are long complete: no step of this ticket runs beside it.
	PushLayers(layer, layers int, moves []Move) (number uint64, err error)
}

// StagedWindow is a DeviceWindow into memory between the two pools, which holds a few
// pushes: see StagedHold. Push waits for room for at most a fraction of PeerSilence,
// then returns ErrNoRoom. Its numbers rise by one. ErrBroken ends the session, any
// other error the ticket.
type StagedWindow interface {
	DeviceWindow
	// Ready returns nil once our end can push. It is called once, before the session
	// counts as open. After an error the peer is told why and the window is closed.
	Ready(ctx context.Context) error
	// MaxMoves is how many blocks one push may have.
	MaxMoves() int
	// Abandon makes a Push that waits for room, and all later ones, fail: the peer is
	// gone. It also ends what Await waits for.
	Abandon()
}

// Move copies one block into the peer's pool: Rows of it are filled.
type Move struct {
	From, To int32
	Rows     int
}

// BlockSource is a Source whose blocks a device can push from where they lie.
//
// Block names the block of our pool that holds exactly these positions of one layer. It
// must keep its rows until the ticket's fence is quiet. When ok is false, Load is used.
// Calls may be concurrent.
type BlockSource interface {
	Source
	Block(layer, index, firstPos, rows int) (block int32, ok bool)
}

// maxPushes is how many pushes of one session may be under way before its bulk
// writers wait for the device.
const maxPushes = 64

// inFlight is one push that the device has been given. The ticket's fence is entered
// for it.
type inFlight struct {
	g      *Outgoing
	number uint64
}

// push has the device push units, a layer's at once, and sends the notices for them
// without waiting for the device. It returns the rest, which have to be sent. The
// caller is inside the ticket's fence; push leaves it while it writes frames, and
// inside reports whether it re-entered.
func (w *bulkWriter) push(g *Outgoing, units []uint32) (rest []uint32, inside bool, err error) {
	rest = units[:0]
	blocks := len(g.t.Dest)
	if g.refills {
		slices.Sort(units) // neighbours share the blocks that both are cut from
	}
	most, bytes := len(units), maxSegment
	if staged, ok := w.p.pool.device.(StagedWindow); ok { // a push is told of in one frame
		most, bytes = min(staged.MaxMoves(), maxPushed), placeTurns*w.p.cfg.BatchBytes
	}
	window, ok := w.p.pool.device.(LayersWindow)
	deep := ok && g.whole && !g.refills // several layers in one push
	for at := 0; at < len(units); {
		layer, size := int(units[at])/blocks, 0
		w.moves, w.refills, w.held, w.heads = w.moves[:0], w.refills[:0], w.held[:0], w.heads[:0]
		if deep {
			if n, layers := g.alike(units[at:]); w.movesOf(g, units[at:at+n]) {
				push := func() (uint64, error) { return window.PushLayers(layer, layers, w.moves) }
				if inside, err = w.launchAndTell(g, layer, layers, push); err != nil || !inside {
					return nil, inside, err
				}
				at += n * layers
				continue
			}
			w.moves, w.heads = w.moves[:0], w.heads[:0]
		}
		for ; at < len(units) && int(units[at])/blocks == layer && len(w.heads) < most && size < bytes; at++ {
			d := w.describe(g, units[at])
			if m, ok := g.move(&d); ok {
				w.moves, w.heads = append(w.moves, m), append(w.heads, d.unitHead)
				size += d.bytes
			} else if r, ok := w.refill(g, &d); ok {
				w.refills, w.heads = append(w.refills, r), append(w.heads, d.unitHead)
			} else {
				rest = append(rest, units[at])
			}
		}
		if len(w.heads) == 0 {
			continue
		}
		push := func() (uint64, error) {
			if len(w.refills) > 0 { // a layer's blocks look alike at both ends, or none does
				return w.p.pool.device.(RefillWindow).Refill(layer, w.refills, w.held)
			}
			return w.p.pool.device.Push(layer, w.moves)
		}
		if inside, err = w.launchAndTell(g, layer, 1, push); err != nil || !inside {
			return nil, inside, err
		}
	}
	return rest, true, nil
}

// launchAndTell begins a push of layers, from layer on, and sends its notices. An error
// of the device ends the ticket.
func (w *bulkWriter) launchAndTell(g *Outgoing, layer, layers int, push func() (number uint64, err error)) (inside bool, err error) {
	number, inside, err := w.launchWithRoom(g, layer, push)
	if err != nil || !inside {
		return inside, err
	}
	g.fence.leave()
	for l := layer; l < layer+layers && err == nil; l++ {
		err = w.notices(g, number, l)
	}
	return g.fence.enter(), err
}

// movesOf lists units of one layer as moves. It returns false if one cannot be a move.
func (w *bulkWriter) movesOf(g *Outgoing, units []uint32) bool {
	for _, u := range units {
		d := w.describe(g, u)
		m, ok := g.move(&d)
		if !ok {
			return false
		}
		w.moves, w.heads = append(w.moves, m), append(w.heads, d.unitHead)
	}
	return true
}

// alike counts the layers, from that of the first unit on, that have the same shape and
// the same n blocks next in the list.
func (g *Outgoing) alike(units []uint32) (n, layers int) {
	blocks := len(g.t.Dest)
	layer := int(units[0]) / blocks
	for n < len(units) && n < maxPushed && int(units[n])/blocks == layer {
		n++
	}
	for layers = 1; (layers+1)*n <= len(units) && layer+layers < g.layers && g.shapes[layer+layers] == g.shapes[layer]; layers++ {
		for i, u := range units[layers*n : (layers+1)*n] {
			if int(u) != int(units[i])+layers*blocks {
				return n, layers
			}
		}
	}
	return n, layers
}

// wholeLayers cuts n units back to the last beginning of a layer among them, if there
// is one.
func (g *Outgoing) wholeLayers(units []uint32, n int) int {
	if n == len(units) {
		return n
	}
	blocks := uint32(len(g.t.Dest))
	for at := n; at > 0; at-- {
		if units[at]/blocks != units[at-1]/blocks {
			return at
		}
	}
	return n
}

// move finds both ends of a unit that a device can push: a block of the same shape at
// both.
func (g *Outgoing) move(d *departure) (Move, bool) {
	src, ok := g.src.(BlockSource)
	if !ok || !g.shapes[d.Layer].same {
		return Move{}, false
	}
	block, ok := src.Block(int(d.Layer), int(d.Index), int(d.Index)*g.layout.BlockTokens, int(d.Rows))
	return Move{From: block, To: d.Block, Rows: int(d.Rows)}, ok
}

// roomTime bounds the wait for room: a peer that makes none for so long counts as dead.
const roomTime = 10 * time.Second

// launchWithRoom is launch as soon as there is room. It waits outside g's fence and
// sends signs of life to the peer, which waits for the next push. The error is the
// connection's, or a loadError.
func (w *bulkWriter) launchWithRoom(g *Outgoing, layer int, push func() (number uint64, err error)) (number uint64, inside bool, err error) {
	for began := time.Now(); ; {
		number, err = w.launch(g, push)
		switch {
		case errors.Is(err, ErrNoRoom) && time.Since(began) >= roomTime:
			return 0, true, fmt.Errorf("%w: none was made in %v: %w", errStalled, roomTime, err)
		case errors.Is(err, ErrBroken):
			return 0, true, err
		case err != nil && !errors.Is(err, ErrNoRoom):
			return 0, true, &loadError{fmt.Errorf("push layer %d: %w", layer, err)}
		case err == nil:
			return number, true, nil
		}
		g.fence.leave()
		err = w.f.send(&sent{}) // the mark of no ticket: a beat would say that we are idle
		if inside = g.fence.enter(); err != nil || !inside {
			return 0, inside, err
		}
	}
}

// launch starts a push and queues it for awaitPushes; the caller is inside g's fence.
func (w *bulkWriter) launch(g *Outgoing, push func() (number uint64, err error)) (number uint64, err error) {
	p := w.p
	if !g.fence.enter() { // for the push itself
		return 0, errRevoked
	}
	p.mu.Lock()
	g.inflight++
	p.mu.Unlock()
	if number, err = push(); err != nil {
		p.landed(g)
		return 0, err
	}
	p.pushes <- inFlight{g, number}
	return number, nil
}

// landed settles one push that is over.
func (p *sender) landed(g *Outgoing) {
	p.mu.Lock()
	g.inflight--
	g.mark()
	p.mu.Unlock()
	g.fence.leave()
}

// awaitPushes awaits the pushes of a session in turn, until pushes is closed.
func (p *sender) awaitPushes() {
	for f := range p.pushes {
		if err := p.pool.device.Await(f.number); err != nil {
			f.g.end(OutcomeOf(err, ticket.Corrupt), fmt.Errorf("push: %w", err), true)
		}
		p.landed(f.g)
	}
}

// notices tells the receiver of one layer's blocks of a push.
func (w *bulkWriter) notices(g *Outgoing, number uint64, layer int) error {
	bytes := g.shapes[layer].PackedBytes(1)
	for at := 0; at < len(w.heads); {
		m := &landing{Ticket: g.t.ID, Tag: g.tag, Number: number, Layer: uint32(layer)}
		size := 0
		for ; at < len(w.heads) && len(m.Blocks) < maxPushed && size < placeTurns*w.p.cfg.BatchBytes; at++ {
			h := &w.heads[at]
			m.Blocks = append(m.Blocks, pushedBlock{h.Index, h.Block, h.Generation})
			size += bytes * int(h.Rows)
		}
		w.buf = w.f.frame(w.buf[:0], m)
		if err := w.f.write(w.buf); err != nil {
			return err
		}
		w.p.side.units.Add(float64(len(m.Blocks)))
		w.p.side.bytes.Add(float64(size))
	}
	return nil
}

// landing announces blocks of one layer: they and their digests are in the receiver's
// device memory once the push of that number has landed. Its checksum covers the whole
// body.
type landing struct {
	Ticket, Tag uint64
	Number      uint64
	Layer       uint32
	Blocks      []pushedBlock // 1 .. maxPushed
}

type pushedBlock struct {
	Index      uint32
	Block      int32
	Generation uint32
}

// maxPushed keeps the frame inside the bound of its type.
const maxPushed = 4096

func (m *landing) kind() frameType { return typePushed }

func (m *landing) fields(c *codec) {
	u64(c, &m.Ticket)
	u64(c, &m.Tag)
	u64(c, &m.Number)
	u32(c, &m.Layer)
	blocks := list(c, &m.Blocks, 12, maxPushed)
	for i := range blocks {
		u32(c, &blocks[i].Index)
		u32(c, &blocks[i].Block)
		u32(c, &blocks[i].Generation)
	}
	if len(blocks) == 0 {
		c.fail(errEmpty)
	}
}
