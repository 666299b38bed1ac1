package fleet

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"net/url"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// Subjects. The word after announce, heartbeat and bye is the worker's id,
// which may hold dots; echo and reply end in a token of the watcher.
const (
	subjectAnnounce  = "xpyd.fleet.announce."
	subjectHeartbeat = "xpyd.fleet.heartbeat."
	subjectBye       = "xpyd.fleet.bye."
	subjectEcho      = "xpyd.fleet.echo."
	subjectReply     = "xpyd.fleet.reply."
	subjectQuery     = "xpyd.fleet.query"
	subjectRevoked   = "xpyd.fleet.revoked"
)

// Bounds of what peers may send.
const (
	maxMessageBytes = 16 << 10
	maxIDBytes      = 64
	maxFieldBytes   = 512
	maxCount        = 1 << 40 // any count in an announcement
)

// beat is a worker's sign of life; a bye is a beat whose load nobody reads.
type beat struct {
	ID       string `json:"id"`
	Epoch    uint64 `json:"epoch"`
	Role     Role   `json:"role"`
	Draining bool   `json:"draining,omitempty"`
	Load     Load   `json:"load"`
}

// query asks one worker, or with no id all of them, to announce itself.
type query struct {
	ID string `json:"id,omitempty"`
}

type kind uint8

const (
	kindAnnounce kind = iota + 1
	kindBeat
	kindBye
	kindEcho
	kindRevoked
)

// message is one decoded message to a watcher: exactly the field of its kind
// is set.
type message struct {
	kind kind
	inst Instance
	beat beat
	echo time.Duration // send time of an echo, on the watcher's clock

	revoked []Revocation
}

// decode checks and decodes one message from the bus. Nothing is returned on
// error.
func decode(subject string, payload []byte) (message, error) {
	if len(payload) > maxMessageBytes {
		return message{}, fmt.Errorf("%d bytes, at most %d allowed", len(payload), maxMessageBytes)
	}
	var m message
	var err error
	switch {
	case strings.HasPrefix(subject, subjectHeartbeat):
		m.kind = kindBeat
		m.beat, err = decodeBeat(payload, subject[len(subjectHeartbeat):])
	case strings.HasPrefix(subject, subjectEcho):
		m.kind = kindEcho
		m.echo, err = decodeEcho(payload)
	case strings.HasPrefix(subject, subjectAnnounce):
		m.kind = kindAnnounce
		m.inst, err = decodeInstance(payload)
		if err == nil && m.inst.ID != subject[len(subjectAnnounce):] {
			err = errForeignID
		}
	case strings.HasPrefix(subject, subjectReply):
		m.kind = kindAnnounce
		m.inst, err = decodeInstance(payload)
	case strings.HasPrefix(subject, subjectBye):
		m.kind = kindBye
		m.beat, err = decodeBeat(payload, subject[len(subjectBye):])
	case subject == subjectRevoked:
		m.kind = kindRevoked
		m.revoked, err = decodeRevoked(payload)
	default:
		err = errors.New("unknown subject")
	}
	if err != nil {
		return message{}, err
	}
	return m, nil
}

var errForeignID = errors.New("id and subject differ")

func decodeInstance(payload []byte) (Instance, error) {
	var i Instance
	if err := json.Unmarshal(payload, &i); err != nil {
		return Instance{}, err
	}
	if i.Epoch == 0 {
		return Instance{}, errors.New("epoch is zero")
	}
	return i, i.Validate()
}

func decodeBeat(payload []byte, id string) (beat, error) {
	var b beat
	if err := json.Unmarshal(payload, &b); err != nil {
		return beat{}, err
	}
	if b.ID != id {
		return beat{}, errForeignID
	}
	if b.Epoch == 0 {
		return beat{}, errors.New("epoch is zero")
	}
	return b, errors.Join(ValidID(b.ID), validRole(b.Role), b.Load.validate())
}

func encodeEcho(d time.Duration) []byte { return strconv.AppendInt(nil, int64(d), 10) }

func decodeEcho(payload []byte) (time.Duration, error) {
	if len(payload) > 20 {
		return 0, errors.New("echo too long")
	}
	n, err := strconv.ParseInt(string(payload), 10, 64)
	if err != nil || n < 0 {
		return 0, errors.New("echo is no time")
	}
	return time.Duration(n), nil
}

// ValidID checks the id of an instance: 1 to 64 characters of
// [A-Za-z0-9._-], with no dot at either end and no two in a row, because an
// id is part of a NATS subject.
func ValidID(id string) error {
	if id == "" || len(id) > maxIDBytes {
		return fmt.Errorf("id: length %d, want 1 to %d", len(id), maxIDBytes)
	}
	for _, c := range []byte(id) {
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '.', c == '_', c == '-':
		default:
			return fmt.Errorf("id %q: want characters of [A-Za-z0-9._-]", id)
		}
	}
	if id[0] == '.' || id[len(id)-1] == '.' || strings.Contains(id, "..") {
		return fmt.Errorf("id %q: misplaced dot", id)
	}
	return nil
}

// Validate checks an instance that a peer, a file or an administrator
// describes. A static instance may have no KV address, no fingerprints and
// epoch zero.
func (i *Instance) Validate() error {
	if err := errors.Join(ValidID(i.ID), validRole(i.Role)); err != nil {
		return err
	}
	u, err := url.Parse(i.URL)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" || u.User != nil {
		return fmt.Errorf("url %q: want http://host:port", clip(i.URL))
	}
	if i.KVAddr != "" {
		if err := validHostPort(i.KVAddr); err != nil {
			return fmt.Errorf("kv_addr %q: %w", clip(i.KVAddr), err)
		}
	}
	for _, f := range []struct{ name, addr string }{{"bootstrap", i.Bootstrap}, {"kv_events", i.KVEvents}, {"kv_replay", i.KVReplay}} {
		if f.addr == "" {
			continue
		}
		if err := validHostPort(f.addr); err != nil {
			return fmt.Errorf("%s %q: %w", f.name, clip(f.addr), err)
		}
	}
	if i.Alone() && i.Role != Decode {
		return fmt.Errorf("role: an engine of dialect %q has no other half; its role is decode", i.Dialect)
	}
	for _, f := range []struct{ name, value string }{
		{"version", i.Version}, {"engine_id", i.EngineID}, {"url", i.URL}, {"kv_addr", i.KVAddr}, {"dialect", i.Dialect}, {"model", i.Model}, {"build", i.Build},
		{"model_fingerprint", i.ModelFingerprint}, {"tokenizer_fingerprint", i.TokenizerFingerprint},
		{"numerics", i.Numerics}, {"kv_local", i.KVLocal}, {"kv_device", i.KVDevice}, {"machine", i.Machine}, {"kv_paths", i.KVPaths}, {"kv_topic", i.KVTopic}, {"topology", i.Topology}, {"secrets", i.Secrets},
	} {
		if !validText(f.value) {
			return fmt.Errorf("%s: want at most %d printable bytes", f.name, maxFieldBytes)
		}
	}
	for _, f := range []struct {
		name  string
		value int
	}{
		{"layout.block_tokens", i.Layout.BlockTokens}, {"max_model_len", i.MaxModelLen}, {"blocks", i.Blocks},
		{"tp", i.TP}, {"pp", i.PP}, {"dp_ranks", i.DPRanks},
		{"max_batch", i.MaxBatch}, {"pid", i.PID}, {"protocol_min", i.ProtocolMin}, {"protocol_max", i.ProtocolMax},
	} {
		if f.value < 0 || f.value > maxCount {
			return fmt.Errorf("%s: %d is out of range", f.name, f.value)
		}
	}
	if i.Layout.Groups != "" { // else it is a foreign engine's
		if _, err := i.Layout.Layout(); err != nil {
			return err
		}
	}
	if i.ProtocolMin > i.ProtocolMax {
		return fmt.Errorf("protocol: range %d-%d is empty", i.ProtocolMin, i.ProtocolMax)
	}
	return i.Load.validate()
}

func (l *Load) validate() error {
	for _, n := range []int{l.Running, l.Waiting, l.QueuedTokens} {
		if n < 0 || n > maxCount {
			return fmt.Errorf("load: %d is out of range", n)
		}
	}
	if math.IsNaN(l.KVUsed) || l.KVUsed < 0 || l.KVUsed > 1 {
		return fmt.Errorf("load: kv_used %g is not in 0..1", l.KVUsed)
	}
	return nil
}

func validRole(r Role) error {
	if r != Prefill && r != Decode {
		return fmt.Errorf("role %q: want prefill or decode", clip(string(r)))
	}
	return nil
}

func validHostPort(addr string) error {
	host, port, err := net.SplitHostPort(addr)
	if err != nil || host == "" {
		return errors.New("want host:port")
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return errors.New("port is not in 1..65535")
	}
	return nil
}

func validText(s string) bool {
	return len(s) <= maxFieldBytes && utf8.ValidString(s) && !strings.ContainsFunc(s, unicode.IsControl)
}

func clip(s string) string {
	if len(s) > maxIDBytes {
		return strings.ToValidUTF8(s[:maxIDBytes], "") + "..."
	}
	return s
}
