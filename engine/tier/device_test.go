package tier

import (
	"bytes"
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvlayout"
)

// bulk makes the rigs' pools fake devices; ssdIO is how their SSDs are read and
// written.
var (
	bulk  bool
	ssdIO = IOAuto
)

// TestMain runs every test twice: with a pool that is host memory and an SSD
// through io_uring, where the machine has that, and with a pool that only its
// device reaches and an SSD through pread.
func TestMain(m *testing.M) {
	code := m.Run()
	if flag.Lookup("test.list").Value.String()+flag.Lookup("test.fuzz").Value.String() != "" {
		os.Exit(code) // fuzzing, or asked what there is
	}
	bulk, ssdIO = true, IOPread
	fmt.Println("and with a device, and pread:")
	os.Exit(max(code, m.Run()))
}

// fakeDevice moves blocks in bulk, as a GPU does: later, out of order, and on
// memory that must stay what it is until then.
type fakeDevice struct {
	fakePool
	wg sync.WaitGroup // moves under way

	mu     sync.Mutex
	memory []byte          // registered
	fail   error           // of moves
	lost   error           // of arrivals, when they end
	gate   func(layer int) // an arrival's, before a layer lands; nil: it lands when it likes
}

// fakePool is memory that only the device reaches.
type fakePool interface {
	kernels.Pool
	Layout() kvlayout.Layout
	Blocks() int
}

func (d *fakeDevice) RegisterHost(mem []byte) (kernels.HostMemory, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(mem)%os.Getpagesize() != 0 || uintptr(unsafe.Pointer(unsafe.SliceData(mem)))%uintptr(os.Getpagesize()) != 0 || d.memory != nil {
		return nil, fmt.Errorf("%d bytes at %p", len(mem), mem)
	}
	d.memory = mem
	return (*fakeMemory)(d), nil
}

type fakeMemory fakeDevice

func (m *fakeMemory) Bytes() []byte { return m.memory }

func (m *fakeMemory) Close() error {
	m.wg.Wait()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.memory = nil
	return nil
}

// fakeMove is a move under way.
type fakeMove struct{ done chan struct{} }

func (m *fakeMove) Wait(ctx context.Context) error {
	select {
	case <-m.done:
		return nil
	case <-ctx.Done():
		return kernels.ErrLate
	}
}

func (d *fakeDevice) GatherBlocks(m *kernels.HostMove) (kernels.Pending, error) {
	return d.move(m, func(layer int, b *kernels.HostBlock, rows, sums []byte) {
		made := make([]uint64, d.Layout().Resolve()[0].Heads)
		d.Gather(layer, b.Block, 0, d.Layout().BlockTokens, rows)
		d.Digest(layer, b.Block, made)
		for h, v := range made {
			binary.LittleEndian.PutUint64(sums[8*h:], v)
		}
	})
}

func (d *fakeDevice) ScatterBlocks(m *kernels.HostMove) (kernels.Pending, error) {
	return d.move(m, d.scatter)
}

func (d *fakeDevice) scatter(layer int, b *kernels.HostBlock, rows, sums []byte) {
	stored := make([]uint64, d.Layout().Resolve()[0].Heads)
	for h := range stored {
		stored[h] = binary.LittleEndian.Uint64(sums[8*h:])
	}
	d.Scatter(layer, b.Block, 0, d.Layout().BlockTokens, rows)
	d.SetDigest(layer, b.Block, b.Filled, stored)
}

// fakeArrival is an arrival under way.
type fakeArrival struct {
	d      *fakeDevice
	layers []chan struct{} // closed when one is there and verified
	good   []bool
	err    error
}

func (d *fakeDevice) ArriveBlocks(m *kernels.HostMove) (kernels.HostArrival, error) {
	a := &fakeArrival{d: d, good: make([]bool, len(m.Blocks))}
	for range d.Layout().Layers() {
		a.layers = append(a.layers, make(chan struct{}))
	}
	d.mu.Lock()
	gate := d.gate
	d.mu.Unlock()
	_, err := d.moveBy(m, func(blocks []kernels.HostBlock, one func(layer, i int)) {
		for i := range a.good {
			a.good[i] = true
		}
		for layer := range a.layers {
			if gate != nil {
				gate(layer)
			}
			for i, b := range blocks {
				one(layer, i)
				ok, _ := d.Verify(context.Background(), []kernels.Landed{{Layer: layer, Block: b.Block, FirstPos: b.FirstPos, Rows: b.Filled}})
				a.good[i] = a.good[i] && ok[0]
			}
			if layer == len(a.layers)-1 {
				d.mu.Lock()
				a.err = d.lost
				d.mu.Unlock()
			}
			close(a.layers[layer])
		}
	}, d.scatter)
	return a, err
}

// AwaitLayer implements enginetest.Layered.
func (a *fakeArrival) AwaitLayer(layer int) { <-a.layers[layer] }

func (a *fakeArrival) Layers() int {
	for i, c := range a.layers {
		select {
		case <-c:
		default:
			return i
		}
	}
	return len(a.layers)
}

func (a *fakeArrival) Good() ([]bool, error) {
	if a.Layers() < len(a.layers) {
		return nil, kernels.ErrLate
	}
	return a.good, a.err
}

func (a *fakeArrival) Wait(ctx context.Context) error {
	select {
	case <-a.layers[len(a.layers)-1]:
		return a.err
	case <-ctx.Done():
		return kernels.ErrLate
	}
}

func (d *fakeDevice) move(m *kernels.HostMove, one func(layer int, b *kernels.HostBlock, rows, sums []byte)) (kernels.Pending, error) {
	return d.moveBy(m, func(blocks []kernels.HostBlock, one func(layer, i int)) {
		for layer := range d.Layout().Layers() {
			for i := range blocks {
				one(layer, len(blocks)-1-i)
			}
		}
	}, one)
}

// moveBy has all move each block of each layer by calling one, later.
func (d *fakeDevice) moveBy(m *kernels.HostMove, all func(blocks []kernels.HostBlock, one func(layer, i int)), one func(layer int, b *kernels.HostBlock, rows, sums []byte)) (kernels.Pending, error) {
	l := d.Layout()
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.fail != nil {
		return nil, d.fail
	}
	if m.Memory != (*fakeMemory)(d) || d.memory == nil || m.FirstLayer != 0 || m.Layers != l.Layers() {
		return nil, fmt.Errorf("not a move of tiers: %+v", m)
	}
	v, mem := *m, d.memory
	v.Blocks = slices.Clone(m.Blocks)
	p := &fakeMove{make(chan struct{})}
	d.wg.Go(func() {
		defer close(p.done)
		all(v.Blocks, func(layer, i int) {
			b := &v.Blocks[i]
			rows := mem[b.Rows+int64(layer)*v.LayerStride:][:l.Resolve()[0].BlockBytes()]
			one(layer, b, rows, mem[b.Digests+int64(layer)*v.DigestStride:][:8*l.Resolve()[0].Heads])
		})
	})
	return p, nil
}

func (d *fakeDevice) Verify(_ context.Context, list []kernels.Landed) ([]bool, error) {
	good := make([]bool, len(list))
	l := d.Layout()
	rows, stored, made := make([]byte, l.Resolve()[0].BlockBytes()), make([]uint64, l.Resolve()[0].Heads), make([]uint64, l.Resolve()[0].Heads)
	for i, e := range list {
		d.Gather(e.Layer, e.Block, 0, e.Rows, rows)
		d.Digest(e.Layer, e.Block, stored)
		kernels.DigestRows(&l.Resolve()[e.Layer], e.FirstPos, e.Rows, rows, made)
		good[i] = slices.Equal(stored, made)
	}
	return good, nil
}

// TestDeviceFails: a device that does not move costs hits and nothing else, and it is said.
func TestDeviceFails(t *testing.T) {
	if !bulk {
		return // there is none
	}
	r := newRig(t, config(""))
	dev := r.dev
	var log bytes.Buffer
	r.tiers.log = slog.New(slog.NewTextHandler(&log, nil))
	says := func(what string) {
		t.Helper()
		if !strings.Contains(log.String(), what+": a fault") {
			t.Errorf("%q is not said: %q", what, log.String())
		}
		r.tiers.mu.Lock()
		defer r.tiers.mu.Unlock()
		r.tiers.said = time.Time{}
	}
	set := func(err error) {
		dev.mu.Lock()
		defer dev.mu.Unlock()
		dev.fail = err
	}
	tokens := prompt(1, 96)
	set(fmt.Errorf("a fault"))
	r.run(tokens, 0)
	r.quiet()
	r.saved(tierHost, 0)
	says("move out of the pool")
	set(nil)
	r.cache.Clear()
	r.run(tokens, 0)
	r.saved(tierHost, 6)
	r.cache.Clear()
	set(fmt.Errorf("a fault"))
	r.load(tokens, 0)
	says("move to the pool")
	set(nil)
	r.load(tokens, 96)
	r.run(tokens, 96) // right rows
}
