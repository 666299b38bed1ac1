package kvconn

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/xpyd/xpyd/internal/scarce"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/kvlayout"
)

const bannerName = "xpyd-kv "

// introduce is what two ends exchange before any frame: with a ring, the proof that both
// belong to its fleet; then a banner each way, one line of text, so that any two builds
// can at least tell each other their range.
func (f *frameConn) introduce(cfg *Config, r role) error {
	ours := bannerRange(cfg.ProtocolMin, cfg.ProtocolMax)
	banner, self := []byte(bannerName+ours+"\n"), trust.Member(cfg.Identity.ID, cfg.Identity.Epoch)
	var err error
	switch {
	case cfg.Ring == nil:
		err = f.write(banner)
	case r == roleReceiver:
		f.proven, err = cfg.Ring.Dial(f.r, f.conn, self, banner)
	default:
		f.proven, err = cfg.Ring.Accept(f.r, f.conn, self, banner)
	}
	if err != nil {
		return unproven(err, ours)
	}
	line, err := trust.Line(f.r)
	if err != nil {
		return err
	}
	if string(line) == trust.Greeting { // and we have no secret
		ids, err := trust.Named(f.r)
		if err != nil {
			return unproven(err, ours)
		}
		return &Incompatible{Field: fieldSecret, Ours: noSecret, Theirs: ids}
	}
	min, max, ok := parseBanner(line)
	if !ok {
		return notABanner(ours, line)
	}
	v, ok := agree(cfg.ProtocolMin, cfg.ProtocolMax, min, max)
	if !ok {
		return &Incompatible{Field: "protocol", Ours: ours, Theirs: bannerRange(min, max)}
	}
	f.version = uint8(v)
	return nil
}

const (
	fieldSecret = "fleet_secret"
	noSecret    = "(none)" // no secret: the peer trusts everyone, or its build has none
)

func notABanner(ours string, line []byte) error {
	return &Incompatible{Field: "banner", Ours: ours, Theirs: strconv.QuoteToASCII(string(line))}
}

// unproven turns an error of trust's handshake into ours. Secrets show as their IDs.
func unproven(err error, ours string) error {
	s, ok := errors.AsType[*trust.Stranger](err)
	switch {
	case !ok && errors.Is(err, trust.ErrChallenge):
		return &wireError{err}
	case !ok:
		return err
	}
	d := &Incompatible{Field: fieldSecret, Ours: s.Ours, Theirs: s.Theirs}
	switch _, _, banner := parseBanner(s.Said); {
	case banner:
		d.Theirs = noSecret
	case s.Said != nil:
		return notABanner(ours, s.Said)
	case s.Wrong:
		d.Theirs += ", and a wrong proof"
	}
	return d
}

// parseBanner accepts exactly the banners that introduce writes.
func parseBanner(line []byte) (min, max int, ok bool) {
	if _, err := fmt.Sscanf(string(line), bannerName+"%d-%d\n", &min, &max); err != nil {
		return 0, 0, false
	}
	if string(line) != bannerName+bannerRange(min, max)+"\n" || min < 1 || max < min || max > 255 {
		return 0, 0, false
	}
	return min, max, true
}

func bannerRange(min, max int) string { return fmt.Sprintf("%d-%d", min, max) }

// agree picks the highest version inside both ranges.
func agree(aMin, aMax, bMin, bMax int) (int, bool) {
	v := min(aMax, bMax)
	return v, v >= max(aMin, bMin)
}

// refusal is a handshake that one of the two sides refused.
type refusal struct {
	outcome ticket.Outcome
	err     error
}

func (r *refusal) Error() string { return r.err.Error() }
func (r *refusal) Unwrap() error { return r.err }

// turnAway tells the peer why, and returns the same as our error.
func (f *frameConn) turnAway(o ticket.Outcome, d *Incompatible) error {
	err := f.send(&refuse{Outcome: o, Field: d.Field, Ours: d.Ours, Theirs: d.Theirs})
	if err != nil {
		return fmt.Errorf("%w (telling the peer: %v)", &refusal{o, d}, err)
	}
	return &refusal{o, d}
}

// expect reads the next frame, which must be of type t or a refusal.
func (f *frameConn) expect(t frameType) ([]byte, error) {
	typ, body, err := f.next()
	if err != nil {
		return nil, err
	}
	switch typ {
	case t:
		return body, nil
	case typeRefuse:
		var m refuse
		if err := f.decode(&m, body); err != nil {
			return nil, err
		}
		return nil, &refusal{m.Outcome, &Incompatible{Field: m.Field, Ours: m.Theirs, Theirs: m.Ours}}
	}
	return nil, &wireError{fmt.Errorf("frame type %d, want %d", typ, t)}
}

func (f *frameConn) expectHello(want role, cfg *Config) (*hello, error) {
	body, err := f.expect(typeHello)
	if err != nil {
		return nil, err
	}
	h := &hello{}
	if err := f.decode(h, body); err != nil {
		return nil, err
	}
	if h.Role != want {
		return nil, f.turnAway(ticket.Incompatible, &Incompatible{Field: "role", Ours: "peer must be " + want.String(), Theirs: h.Role.String()})
	}
	// The banner has no checksum: the range is said again under one.
	if v, ok := agree(cfg.ProtocolMin, cfg.ProtocolMax, int(h.ProtocolMin), int(h.ProtocolMax)); !ok || v != int(f.version) {
		return nil, &wireError{errors.New("hello: protocol range is not the banner's")}
	}
	// One that relays another member's proof cannot make it prove the relay's name.
	if id := h.Identity.PeerID; cfg.Ring != nil && !f.proven.Is(trust.Member(id.ID, id.Epoch)) {
		return nil, f.turnAway(ticket.Incompatible, &Incompatible{Field: "identity", Ours: "the peer has proved to be another", Theirs: id.String()})
	}
	return h, nil
}

// hello describes us on this connection.
func (f *frameConn) hello(cfg *Config, r role) *hello {
	return &hello{ProtocolMin: uint8(cfg.ProtocolMin), ProtocolMax: uint8(cfg.ProtocolMax), Role: r, Identity: cfg.Identity,
		Convert: cfg.Convert, Unchecked: cfg.Unchecked}
}

// compare returns the first field that makes the two incompatible; convert means that
// both sides allow rows of another dtype. Both sides get the same answer.
func compare(ours, theirs Identity, convert bool) *Incompatible {
	for _, f := range []struct{ name, a, b string }{
		{"model_fingerprint", ours.ModelFingerprint, theirs.ModelFingerprint},
		{"tokenizer_fingerprint", ours.TokenizerFingerprint, theirs.TokenizerFingerprint},
		{"numerics", ours.Numerics, theirs.Numerics},
	} {
		if f.a != f.b && !(f.name == "numerics" && convert && converts(ours, theirs)) {
			return &Incompatible{Field: f.name, Ours: f.a, Theirs: f.b}
		}
	}
	if field, a, b := kvlayout.Compare(ours.Layout, theirs.Layout, convert); field != "" {
		return &Incompatible{Field: "layout." + field, Ours: a, Theirs: b}
	}
	return nil
}

// converts reports whether rows change their dtype between the two. Only then
// may their numerics differ: another dtype implies others.
func converts(ours, theirs Identity) bool {
	return kvlayout.Differ(ours.Layout, theirs.Layout) && littleEndian(ours.Numerics) && littleEndian(theirs.Numerics)
}

// littleEndian reports whether rows of these numerics can be read element by
// element (kernels/DESIGN.md, section 4).
func littleEndian(numerics string) bool { return !strings.HasSuffix(numerics, "-be") }

// greetSender is the receiver's half of a control connection's handshake.
func greetSender(f *frameConn, cfg *Config, expect PeerID, out *revoked) (*hello, error) {
	ours := f.hello(cfg, roleReceiver)
	ours.Bulk = uint8(cfg.BulkConns)
	if err := f.send(ours); err != nil {
		return nil, err
	}
	h, err := f.expectHello(roleSender, cfg)
	if err != nil {
		return nil, err
	}
	if err := out.refuse(f, h); err != nil {
		return nil, err
	}
	if d := compare(cfg.Identity, h.Identity, cfg.Convert && h.Convert); d != nil {
		return nil, f.turnAway(ticket.Incompatible, d)
	}
	// Not the instance or run that the router meant: that one is gone.
	if expect.ID != "" && expect.ID != h.Identity.ID {
		return nil, f.turnAway(ticket.Dead, &Incompatible{Field: "id", Ours: expect.ID, Theirs: h.Identity.ID})
	}
	if expect.Epoch != 0 && expect.Epoch != h.Identity.Epoch {
		return nil, f.turnAway(ticket.Dead, &Incompatible{Field: "epoch",
			Ours: strconv.FormatUint(expect.Epoch, 10), Theirs: strconv.FormatUint(h.Identity.Epoch, 10)})
	}
	return h, f.send(bare(typeReady))
}

// bindBulk is the receiver's half of a bulk connection's handshake. A banner
// has no checksum, so the version must be the control connection's.
func bindBulk(f, ctl *frameConn, ours *bind) error {
	if f.version != ctl.version {
		return &wireError{fmt.Errorf("%w: %d, the session has %d", errVersion, f.version, ctl.version)}
	}
	if err := f.send(ours); err != nil {
		return err
	}
	body, err := f.expect(typeBound)
	if err != nil {
		return err
	}
	var m bound
	if err := f.decode(&m, body); err != nil {
		return err
	}
	if offered := len(ours.Pool.Layers) > 0; m.Mapped != offered {
		return &wireError{fmt.Errorf("bound: mapped %t, pool offered %t", m.Mapped, offered)}
	}
	return nil
}

// greetReceiver is the sender's half for a control connection whose hello has
// been read; it ends when the receiver is ready.
func greetReceiver(f *frameConn, cfg *Config, h *hello, session [16]byte) error {
	if d := compare(cfg.Identity, h.Identity, cfg.Convert && h.Convert); d != nil {
		return f.turnAway(ticket.Incompatible, d)
	}
	if h.Bulk < 1 || h.Bulk > maxBulkConns {
		return f.turnAway(ticket.Refused, &Incompatible{Field: "bulk_conns", Ours: "1-" + strconv.Itoa(maxBulkConns), Theirs: strconv.Itoa(int(h.Bulk))})
	}
	ours := f.hello(cfg, roleSender)
	ours.Bulk, ours.Session = h.Bulk, session
	if err := f.send(ours); err != nil {
		return err
	}
	body, err := f.expect(typeReady)
	if err == nil && len(body) > 0 {
		err = &wireError{errTrail}
	}
	return err
}

// classify returns the outcome of a connection's failure.
func classify(err error) ticket.Outcome {
	if r, ok := errors.AsType[*refusal](err); ok {
		return r.outcome
	}
	if _, ok := errors.AsType[*Incompatible](err); ok {
		return ticket.Incompatible
	}
	if _, ok := errors.AsType[*wireError](err); ok {
		return ticket.Corrupt
	}
	n, network := errors.AsType[net.Error](err)
	switch {
	case scarce.Ours(err): // the peer may be fine
		return ticket.NoSpace
	case errors.Is(err, errStalled), errors.Is(err, errDeadline):
		return ticket.Late
	case errors.Is(err, errSilent), errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return ticket.Dead
	case network && n.Timeout():
		return ticket.Late
	}
	return ticket.Dead
}

// failureLevel is the log level of a failed handshake. A vanished peer is only info:
// the fleet warns of it, as it knows whether the peer left in good order.
func failureLevel(err error) slog.Level {
	gone := []error{io.EOF, io.ErrUnexpectedEOF, net.ErrClosed, syscall.EPIPE, syscall.ECONNRESET, syscall.ECONNREFUSED}
	if slices.ContainsFunc(gone, func(e error) bool { return errors.Is(err, e) }) {
		return slog.LevelInfo
	}
	return slog.LevelWarn
}

// within sets the deadline of a handshake; a zero duration clears it.
func (f *frameConn) within(d time.Duration) error {
	if d == 0 {
		return f.conn.SetDeadline(time.Time{})
	}
	return f.conn.SetDeadline(time.Now().Add(d))
}
