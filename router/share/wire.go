package share

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router/pick"
)

// A message is version, kind, the sender's id (8 bytes, big endian), and its
// number among the sender's messages (uvarint). Then, by kind:
//
//	hello, bye   nothing
//	ask          nothing: one of the others answers with hints of what it had lately
//	changes      workers
//	snapshot     part and number of parts (uvarint), workers
//	hints        hints
//
// A worker is its name and legs, tokens, seqs, kv (uvarint); a name is the id's
// length (a byte), the id, and the epoch (uvarint), 0 where routers have epochs
// of their own. A hint is two names, the number of hashes (uvarint), and the
// hashes (8 bytes each, big endian).
const (
	version = 1

	kindHello    = 1
	kindBye      = 2
	kindChanges  = 3
	kindSnapshot = 4
	kindHints    = 5
	kindAsk      = 6

	maxMessage = 32 << 10 // bytes; NATS servers take 64 KiB and more
	maxParts   = 1 << 12
	maxCount   = 1 << 40 // any count of a load
	maxWorker  = 1 + 64 + 5*binary.MaxVarintLen64
	maxHashes  = 1 << 10 // of one hint
)

var errVersion = errors.New("another version of the protocol")

type message struct {
	kind        byte
	from        uint64
	seq         uint64
	part, parts int
	workers     []pick.WorkerLoad
	hints       []pick.Hint
}

func appendHead(b []byte, kind byte, from, seq uint64) []byte {
	b = append(b, version, kind)
	b = binary.BigEndian.AppendUint64(b, from)
	return binary.AppendUvarint(b, seq)
}

func appendName(b []byte, id string, epoch uint64) []byte {
	b = append(b, byte(len(id)))
	b = append(b, id...)
	return binary.AppendUvarint(b, epoch)
}

func appendWorker(b []byte, w *pick.WorkerLoad) []byte {
	b = appendName(b, w.ID, w.Epoch)
	for _, n := range [...]int{w.Legs, w.Tokens, w.Seqs, w.KV} {
		b = binary.AppendUvarint(b, uint64(max(n, 0)))
	}
	return b
}

func appendHint(b []byte, h *pick.Hint) []byte {
	b = appendName(b, h.Prefill, h.PrefillEpoch)
	b = appendName(b, h.Decode, h.DecodeEpoch)
	b = binary.AppendUvarint(b, uint64(len(h.Hashes)))
	for _, x := range h.Hashes {
		b = binary.BigEndian.AppendUint64(b, x)
	}
	return b
}

// reader reads a message's fields; the first error sticks.
type reader struct {
	b   []byte
	err error
}

func (r *reader) fail(what string) {
	if r.err == nil {
		r.err = fmt.Errorf("%s is cut or out of range", what)
	}
	r.b = nil
}

func (r *reader) number(what string, most uint64) uint64 {
	n, size := binary.Uvarint(r.b)
	if size <= 0 || n > most {
		r.fail(what)
		return 0
	}
	r.b = r.b[size:]
	return n
}

func (r *reader) fixed(what string) uint64 {
	if len(r.b) < 8 {
		r.fail(what)
		return 0
	}
	n := binary.BigEndian.Uint64(r.b)
	r.b = r.b[8:]
	return n
}

func (r *reader) name() (id string, epoch uint64) {
	if len(r.b) == 0 || len(r.b)-1 < int(r.b[0]) {
		r.fail("a name")
		return "", 0
	}
	n := int(r.b[0])
	id = string(r.b[1 : 1+n])
	if err := fleet.ValidID(id); err != nil {
		r.fail("a worker's id")
		return "", 0
	}
	r.b = r.b[1+n:]
	return id, r.number("an epoch", 1<<63)
}

func decode(b []byte) (message, error) {
	if len(b) > maxMessage {
		return message{}, fmt.Errorf("%d bytes, at most %d allowed", len(b), maxMessage)
	}
	if len(b) < 2 {
		return message{}, errors.New("the message is empty")
	}
	if b[0] != version {
		return message{}, errVersion
	}
	m := message{kind: b[1]}
	r := reader{b: b[2:]}
	m.from = r.fixed("the sender")
	m.seq = r.number("the message's number", 1<<63)
	switch m.kind {
	case kindHello, kindBye, kindAsk:
		if len(r.b) > 0 {
			r.fail("the message's end")
		}
	case kindSnapshot:
		m.part, m.parts = int(r.number("the part", maxParts)), int(r.number("the parts", maxParts))
		if m.part >= m.parts {
			r.fail("the part")
		}
		r.workers(&m)
	case kindChanges:
		r.workers(&m)
	case kindHints:
		for len(r.b) > 0 {
			r.hint(&m)
		}
	default:
		r.fail("the message's kind")
	}
	if r.err != nil {
		return message{}, r.err
	}
	return m, nil
}

func (r *reader) workers(m *message) {
	for len(r.b) > 0 {
		var w pick.WorkerLoad
		w.ID, w.Epoch = r.name()
		for _, to := range [...]*int{&w.Legs, &w.Tokens, &w.Seqs, &w.KV} {
			*to = int(r.number("a load", maxCount))
		}
		m.workers = append(m.workers, w)
	}
}

func (r *reader) hint(m *message) {
	var h pick.Hint
	h.Prefill, h.PrefillEpoch = r.name()
	h.Decode, h.DecodeEpoch = r.name()
	n := r.number("the number of hashes", maxHashes)
	if uint64(len(r.b)) < 8*n || n == 0 {
		r.fail("the hashes")
		return
	}
	h.Hashes = make([]uint64, n)
	for i := range h.Hashes {
		h.Hashes[i] = r.fixed("a hash")
	}
	m.hints = append(m.hints, h)
}

func appendNumbers(b []byte, part, parts int) []byte {
	return binary.AppendUvarint(binary.AppendUvarint(b, uint64(part)), uint64(parts))
}
