package kvconn

import (
	"fmt"

	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/kvlayout"
)

// A message is one control frame's body. append is the encoder; each type has
// a decode function that accepts exactly what append writes.
type message interface {
	kind() frameType
	append(b []byte) []byte
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

func (m *hello) append(b []byte) []byte {
	b = append(b, m.ProtocolMin, m.ProtocolMax, byte(m.Role), m.Bulk)
	b = append(b, m.Session[:]...)
	id := &m.Identity
	b = putU64(b, id.Epoch)
	for _, s := range []string{id.ID, id.ModelFingerprint, id.TokenizerFingerprint, id.Numerics, id.Build} {
		b = putStr(b, s)
	}
	b = putBlob(b, id.Layout.Encode())
	flags := uint32(0)
	if m.Convert {
		flags |= flagConvert
	}
	if m.Unchecked {
		flags |= flagUnchecked
	}
	return putU32(b, flags)
}

func decodeHello(b []byte) (*hello, error) {
	c := &cursor{b: b}
	m := &hello{ProtocolMin: c.u8(), ProtocolMax: c.u8(), Role: role(c.u8()), Bulk: c.u8(), Session: c.key()}
	id := &m.Identity
	id.Epoch = c.u64()
	for _, s := range []*string{&id.ID, &id.ModelFingerprint, &id.TokenizerFingerprint, &id.Numerics, &id.Build} {
		*s = c.str()
	}
	layout := c.blob(kvlayout.MaxEncoded)
	flags := c.u32()
	if c.err == nil && flags&^(flagConvert|flagUnchecked) != 0 {
		return nil, fmt.Errorf("hello: flags %#x", flags)
	}
	m.Convert, m.Unchecked = flags&flagConvert != 0, flags&flagUnchecked != 0
	if err := c.end(); err != nil {
		return nil, fmt.Errorf("hello: %w", err)
	}
	if m.Role != roleReceiver && m.Role != roleSender {
		return nil, fmt.Errorf("hello: %v", m.Role)
	}
	var err error
	if id.Layout, err = kvlayout.Decode(layout); err != nil {
		return nil, fmt.Errorf("hello: %w", err)
	}
	return m, nil
}

// refuse ends a handshake; Ours is the value of the side that sends it.
type refuse struct {
	Outcome             ticket.Outcome
	Field, Ours, Theirs string
}

func (m *refuse) kind() frameType { return typeRefuse }

func (m *refuse) append(b []byte) []byte {
	b = putStr(b, string(m.Outcome))
	b = putStr(b, m.Field)
	return putStr(putStr(b, clip(m.Ours)), clip(m.Theirs))
}

func decodeRefuse(b []byte) (*refuse, error) {
	c := &cursor{b: b}
	m := &refuse{Outcome: outcome(c), Field: c.str(), Ours: c.str(), Theirs: c.str()}
	if err := c.end(); err != nil {
		return nil, fmt.Errorf("refuse: %w", err)
	}
	return m, nil
}

// bare is a frame without a body: ready, ping, pong, goaway, beat.
type bare frameType

func (m bare) kind() frameType        { return frameType(m) }
func (m bare) append(b []byte) []byte { return b }

// note is a frame that only names a ticket: revoke, received, accepted,
// revoke acknowledgement.
type note struct {
	typ frameType
	ID  uint64
}

func (m note) kind() frameType        { return m.typ }
func (m note) append(b []byte) []byte { return putU64(b, m.ID) }

func decodeNote(t frameType, b []byte) (note, error) {
	c := &cursor{b: b}
	m := note{typ: t, ID: c.u64()}
	if err := c.end(); err != nil {
		return note{}, fmt.Errorf("note %d: %w", t, err)
	}
	return m, nil
}

// resend asks for units again. A unit is numbered layer*blocks + index.
type resend struct {
	ID    uint64
	Round uint32
	Runs  []run
}

// run is Count units from First on.
type run struct{ First, Count uint32 }

func (m *resend) kind() frameType { return typeResend }

func (m *resend) append(b []byte) []byte {
	b = putU32(putU64(b, m.ID), m.Round)
	b = putU32(b, uint32(len(m.Runs)))
	for _, r := range m.Runs {
		b = putU32(putU32(b, r.First), r.Count)
	}
	return b
}

func decodeResend(b []byte) (*resend, error) {
	c := &cursor{b: b}
	m := &resend{ID: c.u64(), Round: c.u32()}
	if n := c.count(8, maxUnits); n > 0 {
		m.Runs = make([]run, n)
	}
	next := uint64(0) // runs ascend and never overlap
	for i := range m.Runs {
		r := run{First: c.u32(), Count: c.u32()}
		if c.err == nil && (uint64(r.First) < next || r.Count == 0 || uint64(r.First)+uint64(r.Count) > maxUnits) {
			return nil, fmt.Errorf("resend: run %d is out of order or range", i)
		}
		next = uint64(r.First) + uint64(r.Count)
		m.Runs[i] = r
	}
	if err := c.end(); err != nil {
		return nil, fmt.Errorf("resend: %w", err)
	}
	return m, nil
}

// commit is the sender's statement that everything is computed.
type commit struct {
	ID      uint64
	Units   uint32
	Payload []byte
}

func (m *commit) kind() frameType { return typeCommit }

func (m *commit) append(b []byte) []byte {
	return putBlob(putU32(putU64(b, m.ID), m.Units), m.Payload)
}

func decodeCommit(b []byte) (*commit, error) {
	c := &cursor{b: b}
	m := &commit{ID: c.u64(), Units: c.u32(), Payload: c.blob(maxPayload)}
	if err := c.end(); err != nil {
		return nil, fmt.Errorf("commit: %w", err)
	}
	return m, nil
}

// failed ends a ticket from the sender's side.
type failed struct {
	ID      uint64
	Outcome ticket.Outcome
	Message string
}

func (m *failed) kind() frameType { return typeFailed }

func (m *failed) append(b []byte) []byte {
	return putStr(putStr(putU64(b, m.ID), string(m.Outcome)), clip(m.Message))
}

func decodeFailed(b []byte) (*failed, error) {
	c := &cursor{b: b}
	m := &failed{ID: c.u64(), Outcome: outcome(c), Message: c.str()}
	if err := c.end(); err != nil {
		return nil, fmt.Errorf("failed: %w", err)
	}
	return m, nil
}

// outcome reads one of the failing outcomes.
func outcome(c *cursor) ticket.Outcome {
	o := ticket.Outcome(c.str())
	switch o {
	case ticket.NoSpace, ticket.Late, ticket.Dead, ticket.Incompatible, ticket.Corrupt, ticket.Cancelled, ticket.Refused, ticket.Invalid:
	default:
		if c.err == nil {
			c.err = fmt.Errorf("unknown outcome %q", o)
		}
	}
	return o
}

// clip bounds free text to what a string field holds.
func clip(s string) string {
	if len(s) > maxString {
		return s[:maxString]
	}
	return s
}
