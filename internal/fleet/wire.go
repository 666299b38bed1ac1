package fleet

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"net/url"
	"reflect"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/xpyd/xpyd/kvlayout"
)

// NATS subjects. announce, heartbeat and bye end in the worker's id, which may hold
// dots; echo and reply end in a token of the watcher.
const (
	subjectAnnounce  = "xpyd.fleet.announce."
	subjectHeartbeat = "xpyd.fleet.heartbeat."
	subjectBye       = "xpyd.fleet.bye."
	subjectEcho      = "xpyd.fleet.echo."
	subjectReply     = "xpyd.fleet.reply."
	subjectQuery     = "xpyd.fleet.query"
	subjectRevoked   = "xpyd.fleet.revoked"
)

// Limits on messages from peers.
const (
	maxMessageBytes = 16 << 10
	maxIDBytes      = 64
	maxFieldBytes   = 512
	maxWays         = 16
	maxDevices      = 16      // GPUs of one process
	maxCount        = 1 << 40 // largest count in an announcement
)

// beat is a heartbeat. A bye has the same form; its load is ignored.
type beat struct {
	ID       string `json:"id"`
	Epoch    uint64 `json:"epoch"`
	Role     Role   `json:"role"`
	Draining bool   `json:"draining,omitempty"`
	WaitOnly bool   `json:"wait_only,omitempty"`
	Load     Load   `json:"load"`
}

// query asks a worker to announce itself; without an id it asks all of them.
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

// message is a decoded message to a watcher. Only the field of its kind is set.
type message struct {
	kind kind
	inst Instance
	beat beat
	echo time.Duration // send time of an echo, on the watcher's clock

	revoked []Revocation
}

// decode checks and decodes a message from the bus.
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
	if len(i.KVWays) == 0 {
		i.KVWays = nil
	}
	if len(i.Devices) == 0 {
		i.Devices = nil
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
		return 0, errors.New("echo is not a time")
	}
	return time.Duration(n), nil
}

// ValidID checks an instance's id, part of a NATS subject: 1 to 64 characters of [A-Za-z0-9._-],
// with no dot at either end and no two in a row.
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

// Validate checks an instance from a peer, a file or an administrator. A static instance may
// lack a KV address, fingerprints and an epoch.
func (i *Instance) Validate() error {
	if err := errors.Join(ValidID(i.ID), validRole(i.Role)); err != nil {
		return err
	}
	u, err := url.Parse(i.URL)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" || u.User != nil {
		return fmt.Errorf("url %q: want http://host:port", clip(i.URL))
	}
	for _, f := range []struct{ name, addr string }{{"kv_addr", i.KVAddr}, {"bootstrap", i.Bootstrap}, {"kv_events", i.KVEvents}, {"kv_replay", i.KVReplay}} {
		if f.addr == "" {
			continue
		}
		if err := validHostPort(f.addr); err != nil {
			return fmt.Errorf("%s %q: %w", f.name, clip(f.addr), err)
		}
	}
	if len(i.KVWays) > maxWays {
		return fmt.Errorf("kv_ways: %d, at most %d allowed", len(i.KVWays), maxWays)
	}
	for name, addr := range i.KVWays {
		if ValidID(name) != nil || addr == "" || !validText(addr) {
			return fmt.Errorf("kv_ways: %q: want an id, and at most %d printable bytes", clip(name), maxFieldBytes)
		}
	}
	if len(i.Devices) > maxDevices {
		return fmt.Errorf("devices: %d, at most %d allowed", len(i.Devices), maxDevices)
	}
	for _, d := range i.Devices {
		if err := bounded("devices.", reflect.ValueOf(d)); err != nil {
			return err
		}
	}
	if i.Alone() && i.Role != Decode {
		return fmt.Errorf("role: an engine of dialect %q has no other half; its role is decode", i.Dialect)
	}
	if err := bounded("", reflect.ValueOf(i).Elem()); err != nil {
		return err
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

// bounded checks every string and int field of a struct. Errors use JSON names.
func bounded(section string, v reflect.Value) error {
	for i, t := 0, v.Type(); i < t.NumField(); i++ {
		name, _, _ := strings.Cut(t.Field(i).Tag.Get("json"), ",")
		name = section + name
		switch f := v.Field(i); f.Kind() {
		case reflect.String:
			if !validText(f.String()) {
				return fmt.Errorf("%s: want at most %d printable bytes", name, maxFieldBytes)
			}
		case reflect.Int:
			if n := f.Int(); n < 0 || n > maxCount {
				return fmt.Errorf("%s: %d is out of range", name, n)
			}
		case reflect.Struct:
			if l, ok := f.Interface().(kvlayout.Form); ok { // its groups have bounds of their own
				f = reflect.ValueOf(struct {
					BlockTokens int `json:"block_tokens"`
				}{l.BlockTokens})
			}
			if err := bounded(name+".", f); err != nil {
				return err
			}
		}
	}
	return nil
}

func (l *Load) validate() error {
	if err := bounded("load.", reflect.ValueOf(l).Elem()); err != nil {
		return err
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
