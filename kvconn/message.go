package kvconn

import (
	"fmt"

	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/kvlayout"
)

// A message is the body of a frame. What is read into one is exactly what it writes.
type message interface {
	kind() frameType
	fields(c *codec) // writes them all, in order, or reads and checks them
}

// role is which end of a session a peer is.
type role uint8

const (
	roleReceiver role = 1
	roleSender   role = 2
)

func (r role) String() string {
	switch r {
	case roleReceiver:
		return "receiver"
	case roleSender:
		return "sender"
	}
	return fmt.Sprintf("role(%d)", uint8(r))
}

// hello opens a control connection.
type hello struct {
	ProtocolMin, ProtocolMax uint8
	Role                     role
	Bulk                     uint8    // receiver: how many bulk connections will come
	Session                  [16]byte // sender: the key that bulk connections present
	Identity                 Identity
	Convert                  bool // rows of another dtype may be converted
	Unchecked                bool // digests need not be checked, if the peer says so too
}

// Bits of a hello's flags.
const (
	flagConvert   = 1 << 0
	flagUnchecked = 1 << 1
)

func (m *hello) kind() frameType { return typeHello }

func (m *hello) fields(c *codec) {
	id := &m.Identity
	var layout []byte
	var flags uint32
	if !c.reading {
		layout = id.Layout.Encode()
		if m.Convert {
			flags |= flagConvert
		}
		if m.Unchecked {
			flags |= flagUnchecked
		}
	}
	c.u8(&m.ProtocolMin)
	c.u8(&m.ProtocolMax)
	c.u8((*uint8)(&m.Role))
	c.u8(&m.Bulk)
	c.key(&m.Session)
	u64(c, &id.Epoch)
	for _, s := range []*string{&id.ID, &id.ModelFingerprint, &id.TokenizerFingerprint, &id.Numerics, &id.Build} {
		c.str(s)
	}
	c.blob(&layout, kvlayout.MaxEncoded)
	u32(c, &flags)
	if !c.reading || c.err != nil {
		return
	}
	m.Convert, m.Unchecked = flags&flagConvert != 0, flags&flagUnchecked != 0
	if flags&^(flagConvert|flagUnchecked) != 0 || m.Role != roleReceiver && m.Role != roleSender {
		c.fail(fmt.Errorf("flags %#x of a %v", flags, m.Role))
	}
	var err error
	if id.Layout, err = kvlayout.Decode(layout); err != nil {
		c.fail(err)
	}
}

// refuse ends a handshake; Ours is the value of the side that sends it.
type refuse struct {
	Outcome             ticket.Outcome
	Field, Ours, Theirs string
}

func (m *refuse) kind() frameType { return typeRefuse }

func (m *refuse) fields(c *codec) {
	outcome(c, &m.Outcome)
	c.str(&m.Field)
	c.str(&m.Ours)
	c.str(&m.Theirs)
}

// bare is a frame without a body: ready, ping, pong, goaway, beat.
type bare frameType

func (m bare) kind() frameType { return frameType(m) }
func (m bare) fields(*codec)   {}

// note is a frame that only names a ticket: revoke, received, accepted,
// revoke acknowledgement.
type note struct {
	typ frameType
	ID  uint64
}

func (m *note) kind() frameType { return m.typ }
func (m *note) fields(c *codec) { u64(c, &m.ID) }

// resend asks for units again. A unit is numbered layer*blocks + index.
type resend struct {
	ID    uint64
	Round uint32
	Runs  []run // ascending, never overlapping
}

// run is Count units from First on.
type run struct{ First, Count uint32 }

func (m *resend) kind() frameType { return typeResend }

func (m *resend) fields(c *codec) {
	u64(c, &m.ID)
	u32(c, &m.Round)
	runs, next := list(c, &m.Runs, 8, maxUnits), uint64(0)
	for i := range runs {
		r := &runs[i]
		u32(c, &r.First)
		u32(c, &r.Count)
		end := uint64(r.First) + uint64(r.Count)
		if uint64(r.First) < next || r.Count == 0 || end > maxUnits {
			c.fail(fmt.Errorf("run %d is out of order or range", i))
		}
		next = end
	}
}

// commit is the sender's statement that everything is computed.
type commit struct {
	ID      uint64
	Units   uint32
	Payload []byte
}

func (m *commit) kind() frameType { return typeCommit }

func (m *commit) fields(c *codec) {
	u64(c, &m.ID)
	u32(c, &m.Units)
	c.blob(&m.Payload, maxPayload)
}

// failed ends a ticket from the sender's side.
type failed struct {
	ID      uint64
	Outcome ticket.Outcome
	Message string
}

func (m *failed) kind() frameType { return typeFailed }

func (m *failed) fields(c *codec) {
	u64(c, &m.ID)
	outcome(c, &m.Outcome)
	c.str(&m.Message)
}

// outcome is for one of the failing outcomes.
func outcome(c *codec, o *ticket.Outcome) {
	c.str((*string)(o))
	switch *o {
	case ticket.NoSpace, ticket.Late, ticket.Dead, ticket.Incompatible, ticket.Corrupt, ticket.Cancelled, ticket.Refused, ticket.Invalid, ticket.Shed:
	default:
		c.fail(fmt.Errorf("unknown outcome %q", *o))
	}
}

// sent, on each bulk connection, follows every unit of this round of the ticket. A unit
// still missing when all marks of the current round are there was lost.
type sent struct {
	ID, Tag uint64
	Round   uint32
}

func (m *sent) kind() frameType { return typeSent }

func (m *sent) fields(c *codec) {
	u64(c, &m.ID)
	u64(c, &m.Tag)
	u32(c, &m.Round)
}
