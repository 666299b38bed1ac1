package convert_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/convert"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvlayout"
)

const dim = 6

func group(dtype kvlayout.DType, heads int) kvlayout.Group {
	return kvlayout.Plain(2, heads, dim, 4, dtype).Groups[0]
}

// layout has groups of two layers each.
func layout(bt int, groups ...kvlayout.Group) kvlayout.Layout {
	groups = slices.Clone(groups)
	for i := range groups {
		groups[i].Layers = kvlayout.Run(2*i, 2)
	}
	return kvlayout.Layout{BlockTokens: bt, Groups: groups}
}

// layerOf is a layer of a model of groups like g.
func layerOf(g kvlayout.Group, layer int) *kvlayout.Layer {
	return &layout(4, g, g).Resolve()[layer]
}

// value is element d of a row; exact in every dtype when scaled by 448.
func value(layer, kv, head, pos, d int) float32 {
	v := []float32{448, -3.5, 0.25, float32(1 + (pos+head)%7), float32(layer*2 + kv), -0.5}[d]
	return v
}

// pack makes rows first .. first+rows-1 of the model in the form g.
func pack(g kvlayout.Group, layer, first, rows int) (b []byte, sums []uint64) {
	heads, size, rowBytes := g.Heads.Count, g.DType.Bytes(1), g.DType.Bytes(dim)
	b = make([]byte, layerOf(g, layer).PackedBytes(rows))
	sums = make([]uint64, heads)
	for kv := range 2 {
		for h := range heads {
			for r := range rows {
				at := ((kv*heads+h)*rows + r) * rowBytes
				for d := range dim {
					v := value(layer, kv, h, first+r, d)
					switch e := b[at+d*size:]; g.DType {
					case "f32":
						binary.LittleEndian.PutUint32(e, math.Float32bits(v))
					case "bf16":
						binary.LittleEndian.PutUint16(e, uint16(math.Float32bits(v)>>16))
					case "f16":
						exp := int(math.Float32bits(v)>>23&0xff) - 127 + 15
						half := math.Float32bits(v)>>31<<15 | uint32(exp)<<10 | math.Float32bits(v)>>13&0x3ff
						if v == 0 {
							half = 0
						}
						binary.LittleEndian.PutUint16(e, uint16(half))
					case kvlayout.F8E4M3:
						exp := int(math.Float32bits(v)>>23&0xff) - 127 + 7
						q := math.Float32bits(v)>>31<<7 | uint32(exp)<<3 | math.Float32bits(v)>>20&7
						if v == 0 {
							q = 0
						}
						e[0] = byte(q)
					}
				}
				row := b[at : at+rowBytes]
				if g.DType == kvlayout.F8E4M3 {
					scale := b[2*heads*rows*rowBytes+4*((kv*heads+h)*rows+r):][:4]
					binary.LittleEndian.PutUint32(scale, math.Float32bits(1))
					row = append(slices.Clone(row), scale...)
				}
				sums[h] += kernels.RowHash(layer, kv, h, first+r, row)
			}
		}
	}
	return b, sums
}

// model is a source of one form; flip, when set, damages what it loads.
type model struct {
	g    kvlayout.Group
	flip int
	mu   sync.Mutex
	n    int
}

func (m *model) Load(layer, index, first, rows int, dst []byte, digests []uint64) error {
	b, sums := pack(m.g, layer, first, rows)
	if m.flip > 0 {
		b[m.flip] ^= 1
	}
	copy(dst, b)
	copy(digests, sums)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.n++
	return nil
}

func TestSource(t *testing.T) {
	dtypes := []kvlayout.DType{kvlayout.F32, kvlayout.F16, kvlayout.BF16, kvlayout.F8E4M3}
	for _, from := range dtypes {
		for _, to := range dtypes {
			for _, heads := range []int{4, 1} {
				a, b := group(from, heads), group(to, heads)
				src, err := convert.New(&model{g: a}, layout(4, a), layout(4, b), kernels.DigestPart)
				if err != nil {
					t.Fatal(err)
				}
				for rows := 1; rows <= 4; rows++ {
					got, sums := make([]byte, layerOf(b, 1).PackedBytes(rows)), make([]uint64, heads)
					if err := src.Load(1, 3, 12, rows, got, sums); err != nil {
						t.Fatal(err)
					}
					want, digests := pack(b, 1, 12, rows)
					if !slices.Equal(got, want) || !slices.Equal(sums, digests) {
						t.Errorf("%s to %s, %d heads, %d rows: %x, want %x; digests %x, want %x", from, to, heads, rows, got, want, sums, digests)
					}
				}
			}
		}
	}
}

// A row that is damaged in the inner source gets no new digest; in a group of
// the same dtype its old one goes along and shows it.
func TestSourceVerifies(t *testing.T) {
	a, b := group("f32", 4), group("bf16", 4)
	src, err := convert.New(&model{g: a, flip: 5}, layout(4, a, a), layout(4, b, a), kernels.DigestPart)
	if err != nil {
		t.Fatal(err)
	}
	if err := src.Load(0, 0, 0, 4, make([]byte, layerOf(b, 0).PackedBytes(4)), make([]uint64, 4)); !errors.Is(err, kvconn.ErrDigest) {
		t.Errorf("a damaged row was converted: %v", err)
	}
	got, sums := make([]byte, layerOf(a, 2).PackedBytes(4)), make([]uint64, 4)
	if err := src.Load(2, 0, 0, 4, got, sums); err != nil {
		t.Fatal(err)
	}
	if want, digests := pack(a, 2, 0, 4); slices.Equal(got, want) || !slices.Equal(sums, digests) {
		t.Error("the digest was made anew of damaged rows")
	}
}

func TestNew(t *testing.T) {
	in := &model{}
	f := func(ok, same bool, from, to kvlayout.Group) {
		t.Helper()
		src, err := convert.New(in, layout(4, from), layout(8, to), kernels.DigestPart)
		if (err == nil) != ok || ok && (src == kvconn.Source(in)) != same {
			t.Errorf("%+v to %+v: %v, %v", from, to, src, err)
		}
	}
	f(true, true, group("f32", 4), group("f32", 4))
	f(true, false, group("f32", 4), group("f16", 4))
	f(false, false, group("f32", 4), group("f32", 1))
	f(false, false, group("f32", 1), group("f16", 2))
	odd := group("f32", 4)
	odd.Planes = kvlayout.KV(8)
	f(true, true, odd, odd)
	f(false, false, odd, group("f16", 4))
	odd = group(kvlayout.U4, 4)
	f(true, true, odd, odd)
	f(false, false, odd, group("f16", 4))
}

// worker is one sender of a test: it keeps the form g.
type worker struct{ g kvlayout.Group }

func (w *worker) OnTicket(ctx context.Context, o *kvconn.Outgoing) {
	src, err := convert.New(&model{g: w.g}, layout(4, w.g), o.Layout(), kernels.DigestPart)
	if err == nil {
		err = o.Accept(src)
	}
	if err != nil {
		o.Fail("refused", err.Error())
		return
	}
	for l := range w.g.Layers {
		for i := range o.Ticket().Dest {
			o.Push(l, []int{i})
		}
	}
	o.Commit(nil)
}

// collector notes which blocks have come; each has to be of the form g.
type collector struct {
	g    kvlayout.Group
	mu   sync.Mutex
	seen map[[2]int]bool // layer, block
}

func (c *collector) Store(layer int, dst int32, row, rows, firstPos int, packed []byte, digests []uint64) error {
	want, sums := pack(c.g, layer, firstPos, rows)
	if !slices.Equal(packed, want) || !slices.Equal(digests, sums) {
		return fmt.Errorf("layer %d block %d: rows or digests differ", layer, dst)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.seen[[2]int{layer, int(dst)}] = true
	return nil
}

// A receiver gets a whole prompt from a sender that keeps another dtype.
func TestOverAConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := kvconntest.NewMemory(1 << 16)
		m, err := kvconn.NewMetrics(nil)
		if err != nil {
			t.Fatal(err)
		}
		log := slog.New(slog.NewTextHandler(io.Discard, nil))
		config := func(id, numerics string, g kvlayout.Group) kvconn.Config {
			c := kvconn.DefaultConfig()
			c.Convert = true
			c.Identity = kvconn.Identity{PeerID: kvconn.PeerID{ID: id, Epoch: 1}, ModelFingerprint: "m", Numerics: numerics, Layout: layout(8, g)}
			return c
		}
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		w := &worker{group("f32", 4)}
		srv, err := kvconn.NewServer(config("prefill", "n-f32", w.g), log, m)
		if err != nil {
			t.Fatal(err)
		}
		ln, err := tr.Listen("prefill")
		if err != nil {
			t.Fatal(err)
		}
		wg.Go(func() {
			if err := srv.Serve(ctx, ln, w); err != nil {
				t.Error(err)
			}
		})
		g := group("bf16", 4)
		recv, err := kvconn.NewReceiver(config("decode", "n-bf16", g), tr, log, m)
		if err != nil {
			t.Fatal(err)
		}
		s, err := recv.Open(ctx, "prefill", kvconn.PeerID{})
		if err != nil {
			t.Fatal(err)
		}
		c := &collector{g: g, seen: map[[2]int]bool{}}
		in, err := s.Request(ctx, kvconn.TicketSpec{Positions: 21, Dest: []kvconn.Dest{{Block: 1}, {Block: 2}, {Block: 3}}, Sink: c})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := in.Wait(ctx); err != nil {
			t.Error(err)
		}
		if len(c.seen) != 3*len(g.Layers) {
			t.Errorf("%d blocks have come of %d", len(c.seen), 3*len(g.Layers))
		}
		if err := recv.Close(ctx); err != nil {
			t.Error(err)
		}
		cancel()
		wg.Wait()
		time.Sleep(time.Minute) // of the bubble: nothing is left that waits
	})
}
