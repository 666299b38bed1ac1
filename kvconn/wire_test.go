package kvconn

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"math"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/kvlayout"
)

// messages has one of every message with a body, as seeds and as a round trip.
func messages() []message {
	layout := kvlayout.Plain(2, 2, 4, 16, "f32")
	h := &hello{Convert: true, Unchecked: true, ProtocolMin: 1, ProtocolMax: 2, Role: roleSender, Bulk: 3, Session: [16]byte{1, 2}, Identity: Identity{PeerID: PeerID{"p", 7},
		ModelFingerprint: "m", TokenizerFingerprint: "t", Numerics: "n", Layout: layout, Build: "b"}}
	pool := Shared{Bytes: 1 << 20, Blocks: 4, Layers: []Span{{0, 1 << 10}, {1 << 19, 1 << 17}}}
	r := &request{ID: 1, Secret: [16]byte{1}, Link: ticket.Link{2}, DeadlineMS: 3, DestBlockTokens: 16, Positions: 17, RequestID: "r", LeaseID: "l",
		First: []byte("{}"), Tokens: []int32{-1, 2}, Dest: []Dest{{1, 2}, {3, 4}}, Have: []byte{5}}
	return []message{h, r,
		&bind{Session: [16]byte{9}}, &bind{Session: [16]byte{9}, Index: 2, Pool: pool, Grant: []byte("how")},
		&bind{Session: [16]byte{9}, Pool: Shared{Bytes: 64, Blocks: 1, Ranks: 2, Layers: []Span{{0, 32}, {32, 32}}}},
		&bound{}, &bound{Mapped: true},
		&refuse{ticket.Incompatible, "numerics", "a", "b"},
		&note{typeRevoke, 12}, &note{typeReceived, 1 << 60}, &note{typeAccepted, 0}, &note{typeRevokeAck, 3},
		&resend{ID: 1, Round: 2, Runs: []run{{0, 1}, {5, 3}}},
		&commit{ID: 1, Units: 2, Payload: []byte("x")},
		&failed{ID: 1, Outcome: ticket.Late, Message: "m"},
		&sent{ID: 1, Tag: 2, Round: 3},
		&placed{unitHead{Ticket: 1, Tag: 2, Layer: 3, Index: 4, Block: 5, Generation: 6, Rows: 7, Heads: 2}, []uint64{8, 9}},
		&landing{Ticket: 1, Tag: 2, Number: 3, Layer: 4, Blocks: []pushedBlock{{5, 6, 7}, {8, 9, 10}}},
	}
}

// decodeAny decodes a body as its type's receiver would.
func decodeAny(t frameType, b []byte) (message, error) {
	var m message
	switch t {
	case typeHello:
		m = &hello{}
	case typeRefuse:
		m = &refuse{}
	case typeBind:
		m = &bind{}
	case typeBound:
		m = &bound{}
	case typeRevoke, typeReceived, typeAccepted, typeRevokeAck:
		m = &note{typ: t}
	case typeTicket:
		m = &request{}
	case typeResend:
		m = &resend{}
	case typeCommit:
		m = &commit{}
	case typeFailed:
		m = &failed{}
	case typeSent:
		m = &sent{}
	case typePushed:
		m = &landing{}
	case typePlaced:
		m = &placed{}
	default:
		return nil, errors.New("no body")
	}
	return m, (&frameConn{}).decode(m, b)
}

// encode appends what is written of m.
func encode(b []byte, m interface{ fields(c *codec) }) []byte {
	c := codec{b: b}
	m.fields(&c)
	return c.b
}

func TestMessageRoundTrip(t *testing.T) {
	for _, m := range messages() {
		b := encode(nil, m)
		got, err := decodeAny(m.kind(), b)
		if err != nil {
			t.Errorf("%T: %v", m, err)
			continue
		}
		if again := encode(nil, got); !bytes.Equal(again, b) {
			t.Errorf("%T: %x became %x", m, b, again)
		}
		for n := range b { // every shorter body is refused
			if _, err := decodeAny(m.kind(), b[:n]); err == nil {
				t.Errorf("%T: accepted %d of %d bytes", m, n, len(b))
			}
		}
		if _, err := decodeAny(m.kind(), append(b, 0)); err == nil {
			t.Errorf("%T: accepted a trailing byte", m)
		}
	}
}

func TestSegmentBounds(t *testing.T) {
	f := func(ok bool, s Shared) {
		t.Helper()
		if err := s.inside(); (err == nil) != ok {
			t.Errorf("%+v: %v", s, err)
		}
	}
	f(true, Shared{})
	f(true, Shared{Bytes: 64, Blocks: 2, Layers: []Span{{0, 16}, {32, 16}}})
	f(false, Shared{Bytes: 64})
	f(false, Shared{Blocks: 1})
	f(false, Shared{Bytes: 64, Layers: []Span{{0, 16}}})
	f(false, Shared{Bytes: 63, Blocks: 2, Layers: []Span{{0, 16}, {32, 16}}})
	f(false, Shared{Bytes: 64, Blocks: 1, Layers: []Span{{0, 0}}})
	f(false, Shared{Bytes: 64, Blocks: 1 << 31, Layers: []Span{{0, 1}}})
	f(false, Shared{Bytes: 64, Blocks: 2, Layers: []Span{{-16, 16}}})
	f(false, Shared{Bytes: 64, Blocks: 2, Layers: []Span{{0, math.MinInt64}}})
	f(false, Shared{Bytes: 1 << 48, Blocks: 2, Layers: []Span{{0, 1 << 40}}})
}

// A segment has a layer for each rank of the layout, whose blocks hold the rank's heads.
func TestSegmentRanks(t *testing.T) {
	layout := kvlayout.Plain(2, 4, 1, 2, kvlayout.F32)
	all := int64(layout.Resolve()[0].BlockBytes())
	f := func(part string, ranks int, strides ...int64) {
		t.Helper()
		s := Shared{Bytes: 1 << 20, Blocks: 2, Ranks: ranks}
		for i, stride := range strides {
			s.Layers = append(s.Layers, Span{Offset: int64(i) << 10, Stride: stride})
		}
		regions, err := s.regions(layout)
		if (err == nil) != (part == "") || err != nil && !strings.Contains(err.Error(), part) {
			t.Errorf("%d ranks, strides %v: %v, want %q", ranks, strides, err, part)
		}
		for layer, of := range regions {
			for rank, r := range of {
				if int64(r.BlockBytes()) > r.Stride || r.Offset != int64(rank*len(regions)+layer)<<10 {
					t.Errorf("%d ranks: rank %d has layer %d at %+v", ranks, rank, layer, r)
				}
			}
		}
	}
	f("", 0, all, all)
	f("", 1, all, all)
	f("", 2, all/2, all/2, all/2, all)
	f("", 8, slices.Repeat([]int64{all / 4}, 16)...)
	f("2 layers, the layout has 2 for each of 2 ranks", 2, all, all)
	f("4 layers", 1, all, all, all, all)
	f("layer 1 of rank 0", 1, all, all-1)
	f("layer 0 of rank 1", 2, all, all, all/2-1, all)
	f("KV heads", 3, slices.Repeat([]int64{all}, 6)...)
	f("128 ranks", 128, slices.Repeat([]int64{all}, 256)...)

	two := Shared{Bytes: 1 << 20, Blocks: 2, Ranks: 2, Epoch: 3, BlockBytes: all, Layers: []Span{{0, all / 2}, {1 << 10, all / 2}}}
	matches := func(want string, err error) {
		t.Helper()
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	matches("", two.Matches(3, 1, 2, all))
	matches("of epoch 4", two.Matches(4, 1, 2, all))
	matches("2 layers", two.Matches(3, 2, 2, all))
	matches("0 layers", two.Matches(3, 0, 2, all))
	matches("3 blocks", two.Matches(3, 1, 3, all))
	matches("bytes", two.Matches(3, 1, 2, all/2))
	matches("", two.MatchesRanks(3, 1, 2, []int64{all / 2, all / 2}))
	matches("of 1 ranks", two.MatchesRanks(3, 1, 2, []int64{all}))
	matches("layer 0 of rank 1", two.MatchesRanks(3, 1, 2, []int64{all / 2, all}))
	matches("2 layers", two.MatchesRanks(3, 2, 2, []int64{all / 2, all / 2}))
	matches("0 layers", two.MatchesRanks(3, 0, 2, []int64{all / 2, all / 2}))
}

// FuzzMessage: what decodes encodes to the same bytes.
func FuzzMessage(f *testing.F) {
	for _, m := range messages() {
		f.Add(uint8(m.kind()), encode(nil, m))
	}
	f.Fuzz(func(t *testing.T, typ uint8, b []byte) {
		m, err := decodeAny(frameType(typ), b)
		if err != nil {
			return
		}
		if again := encode(nil, m); !bytes.Equal(again, b) {
			t.Errorf("type %d: %x became %x", typ, b, again)
		}
	})
}

// FuzzFrames: any byte stream is read without panic, and what is accepted
// encodes to the same bytes.
func FuzzFrames(f *testing.F) {
	w := &frameConn{version: ProtocolMax}
	var all []byte
	for _, m := range messages() {
		all = w.frame(all, m)
	}
	head, rows := aBatch()
	at := len(all)
	all = append(beginFrame(all, ProtocolMax, typeBatch), head...)
	endRows(all, at, w.out, rows)
	all = append(all, make([]byte, rows)...)
	f.Add(uint8(ProtocolMax), all)
	f.Add(uint8(ProtocolMax), all[:len(all)-3])
	f.Fuzz(func(t *testing.T, v uint8, b []byte) {
		r := newFrameConn(&stubConn{r: bytes.NewReader(b)}, 64)
		r.version, r.maxUnit = v, 1<<16
		w := &frameConn{version: v}
		var again []byte
		for {
			typ, body, err := r.next()
			if err != nil {
				break
			}
			at := len(again)
			again = append(beginFrame(again, v, typ), body...)
			rest := r.rest
			endRows(again, at, w.out, rest)
			rows, err := r.takeRows(rest)
			if err != nil {
				again = again[:at]
				break
			}
			again = append(again, rows...)
			w.out++
		}
		if !bytes.HasPrefix(b, again) {
			t.Errorf("%x became %x", b, again)
		}
	})
}

// stubConn is a connection that only reads.
type stubConn struct {
	net.Conn
	r io.Reader
}

func (c *stubConn) Read(b []byte) (int, error) { return c.r.Read(b) }

func (c *stubConn) SetReadDeadline(t time.Time) error { return nil }

func TestFrameRefused(t *testing.T) {
	f := func(name string, change func(b []byte) []byte, want error) {
		t.Helper()
		w := &frameConn{version: 1}
		b := change(w.frame(nil, &note{typeRevoke, 1}))
		r := newFrameConn(&stubConn{r: bytes.NewReader(b)}, 64)
		r.version = 1
		_, _, err := r.next()
		var we *wireError
		if err == nil || (want != nil && !errors.Is(err, want)) || (want == nil && !errors.As(err, &we)) {
			t.Errorf("%s: %v", name, err)
		}
	}
	seal := func(b []byte) []byte { // makes the header check right again
		binary.LittleEndian.PutUint16(b[2:], headCheck(b))
		return b
	}
	f("version", func(b []byte) []byte { b[0] = 2; return seal(b) }, errVersion)
	f("length bit", func(b []byte) []byte { b[5] ^= 4; return b }, errCheck)
	f("type bit", func(b []byte) []byte { b[1] ^= 4; return b }, errCheck)
	f("length over the bound", func(b []byte) []byte { b[7] = 255; return seal(b) }, nil)
	f("sequence", func(b []byte) []byte { endFrame(b, 0, 1); return b }, nil)
	f("checksum", func(b []byte) []byte { b[12]++; return b }, errSum)
	f("body bit", func(b []byte) []byte { b[20] ^= 1; return b }, errSum)
	f("cut head", func(b []byte) []byte { return b[:9] }, io.ErrUnexpectedEOF)
	f("cut body", func(b []byte) []byte { return b[:20] }, io.ErrUnexpectedEOF)
	f("nothing", func(b []byte) []byte { return nil }, io.EOF)
}

// A claim of many bytes allocates only for those that come.
func TestNoOverAllocation(t *testing.T) {
	b := beginFrame(nil, 1, typeTicket)
	b = append(b, make([]byte, 100)...)
	endFrame(b, 0, 0)
	b[7] = 4 // a length of 64 MiB and more
	binary.LittleEndian.PutUint16(b[2:], headCheck(b))
	r := newFrameConn(&stubConn{r: bytes.NewReader(b)}, 64)
	r.version = 1
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if _, _, err := r.next(); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Error(err)
	}
	runtime.ReadMemStats(&after)
	if n := after.TotalAlloc - before.TotalAlloc; n > 1<<20 {
		t.Errorf("%d bytes allocated", n)
	}
	c := &codec{b: []byte{255, 255, 255, 127}, reading: true}
	if c.count(0, 4, maxPositions); c.err == nil {
		t.Error("a count beyond the frame was accepted")
	}
}

func FuzzBanner(f *testing.F) {
	f.Add([]byte("xpyd-kv 1-1\n"))
	f.Add([]byte("xpyd-kv 12-255\n"))
	f.Add([]byte("HTTP/1.1 400\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if lo, hi, ok := parseBanner(b); ok && string(b) != bannerName+bannerRange(lo, hi)+"\n" {
			t.Errorf("%q read as %d-%d", b, lo, hi)
		}
	})
}

func TestAgree(t *testing.T) {
	f := func(aMin, aMax, bMin, bMax, want int) {
		t.Helper()
		got, ok := agree(aMin, aMax, bMin, bMax)
		if ok != (want > 0) || (ok && got != want) {
			t.Errorf("%d-%d with %d-%d: %d, %v", aMin, aMax, bMin, bMax, got, ok)
		}
	}
	f(1, 1, 1, 1, 1)
	f(1, 2, 1, 1, 1)
	f(1, 2, 2, 3, 2)
	f(2, 5, 1, 4, 4)
	f(1, 1, 2, 3, 0)
	f(4, 5, 1, 3, 0)
}

// A peer that takes no bytes, and one that sends none, are told apart.
func TestSilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := net.Pipe()
		defer a.Close()
		defer b.Close()
		f := newFrameConn(a, 64)
		f.silence = time.Second
		start := time.Now()
		if err := f.send(bare(typePing)); !errors.Is(err, errStalled) {
			t.Errorf("write: %v", err)
		}
		if _, _, err := f.next(); !errors.Is(err, errSilent) {
			t.Errorf("read: %v", err)
		}
		if took := time.Since(start); took != 2*time.Second {
			t.Errorf("took %v", took)
		}
	})
}

// TestGonePeerIsNoWarning: a peer that leaves while a session is opened is the
// fleet's to judge; one that does not answer, or answers wrongly, is a warning.
func TestGonePeerIsNoWarning(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	conn, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ln.Close() // resets what it has not accepted
	_, reset := conn.Read(make([]byte, 1))
	_, refused := net.Dial("tcp", "127.0.0.1:1")
	conn.Close()
	_, closed := conn.Read(make([]byte, 1))
	for _, err := range []error{reset, refused, closed, io.EOF, io.ErrUnexpectedEOF} {
		if l := failureLevel(&Error{"open", PeerID{"p", 1}, PhaseDial, classify(err), err}); l != slog.LevelInfo {
			t.Errorf("%v: %v", err, l)
		}
	}
	for _, err := range []error{errStalled, &refusal{outcome: ticket.NoSpace}, &Incompatible{}, &wireError{}, os.ErrDeadlineExceeded} {
		if l := failureLevel(&Error{"open", PeerID{"p", 1}, PhaseDial, classify(err), err}); l != slog.LevelWarn {
			t.Errorf("%v: %v", err, l)
		}
	}
}

// TestOwnLackIsNoDeath: what this process lacks for a connection is no news of the peer.
func TestOwnLackIsNoDeath(t *testing.T) {
	for _, lack := range []error{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.EADDRNOTAVAIL} {
		err := &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("socket", lack)}
		if o := classify(err); o != ticket.NoSpace {
			t.Errorf("%v: %s", err, o)
		}
	}
}
