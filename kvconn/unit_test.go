package kvconn

import (
	"bytes"
	"encoding/binary"
	"testing"
)

// FuzzUnit: a unit's parts are inside its body, and encode to it.
func FuzzUnit(f *testing.F) {
	u := unitHead{Ticket: 1, Tag: 2, Layer: 3, Index: 4, Block: -5, Generation: 6, Rows: 1, Heads: 2}
	f.Add(append(encode(nil, &u), make([]byte, 16+40)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		u, sums, rows, err := decodeUnit(b, nil)
		if err != nil {
			return
		}
		again := encode(nil, &u)
		for _, s := range sums {
			again = putU64(again, s)
		}
		if again = append(again, rows...); !bytes.Equal(again, b) {
			t.Errorf("%x became %x", b, again)
		}
	})
}

// decodeUnit splits a unit's body; digests are appended to sums.
func decodeUnit(b []byte, sums []uint64) (u unitHead, digests []uint64, rows []byte, err error) {
	c, m := codec{b: b, reading: true}, placed{Digests: sums}
	m.fields(&c)
	return m.unitHead, m.Digests, c.b, c.err
}

func appendEntry(b []byte, u *unitHead, bytes int) []byte {
	c := codec{b: b}
	u.entry(&c, &bytes)
	return c.b
}

// aBatch is the head of a batch of three units, and the bytes of their rows.
func aBatch() (head []byte, rows int) {
	units := []unitHead{{Layer: 1, Index: 2, Block: 3, Generation: 4, Rows: 16, Heads: 2},
		{Layer: 1, Index: 3, Block: -1, Generation: 1, Rows: 16, Heads: 2}, {Layer: 2, Index: 3, Block: 9, Rows: 1, Heads: 1}}
	head = encode(nil, &batchHead{7, 8, uint32(len(units)), 5})
	for i := range units {
		head = appendEntry(head, &units[i], 10*(i+1))
	}
	for i := range 5 {
		head = putU64(head, uint64(i)<<40)
	}
	return head, 60
}

func TestBatch(t *testing.T) {
	head, rows := aBatch()
	list, sums, err := decodeArrivals(typeBatch, head, rows, nil, nil)
	if err != nil || len(list) != 3 || len(sums) != 5 {
		t.Fatal(err, list, sums)
	}
	if u := list[2]; u.Ticket != 7 || u.Tag != 8 || u.Layer != 2 || u.Index != 3 || u.Block != 9 || u.Rows != 1 || u.bytes != 30 ||
		len(u.digests) != 1 || u.digests[0] != 4<<40 {
		t.Errorf("%+v", u)
	}
	f := func(name string, head []byte, rows int) {
		t.Helper()
		if n, err := typeBatch.headSize(head); err == nil && n <= len(head) {
			if _, _, err := decodeArrivals(typeBatch, head[:n], rows, nil, nil); err == nil {
				t.Errorf("%s: accepted", name)
			}
		}
	}
	change := func(at int, v uint32) []byte {
		b := bytes.Clone(head)
		binary.LittleEndian.PutUint32(b[at:], v)
		return b
	}
	f("rows", head, 61)
	f("no units", change(16, 0), rows)
	f("fewer units", change(16, 2), rows)
	f("many units", change(16, maxBatch+1), rows)
	f("fewer digests", change(20, 4), rows)
	f("many digests", change(20, 1<<31), rows)
	f("heads", change(batchHeadSize+20, 1<<31), rows)
	f("bytes", change(batchHeadSize+24, 1<<31), rows)
}

// FuzzBatch: the units of a batch add up to it, and encode to it.
func FuzzBatch(f *testing.F) {
	head, rows := aBatch()
	f.Add(head, rows)
	f.Add(head[:batchHeadSize], 0)
	f.Fuzz(func(t *testing.T, b []byte, rows int) {
		if len(b) < batchHeadSize {
			return
		}
		if n, err := typeBatch.headSize(b); err != nil || n != len(b) {
			return
		}
		list, sums, err := decodeArrivals(typeBatch, b, rows, nil, nil)
		if err != nil {
			return
		}
		again := encode(nil, &batchHead{list[0].Ticket, list[0].Tag, uint32(len(list)), uint32(len(sums))})
		total := 0
		for i := range list {
			again = appendEntry(again, &list[i].unitHead, list[i].bytes)
			total += list[i].bytes
		}
		for i := range list {
			for _, d := range list[i].digests {
				again = putU64(again, d)
			}
		}
		if total != rows || !bytes.Equal(again, b) {
			t.Errorf("%x with %d became %x with %d", b, rows, again, total)
		}
	})
}

// Reading a unit allocates nothing.
func TestUnitAllocations(t *testing.T) {
	w := &frameConn{version: 1}
	u := unitHead{Rows: 16, Heads: 8}
	b := beginFrame(nil, 1, typeUnit)
	b = append(encode(b, &u), make([]byte, 64+16<<10)...)
	endFrame(b, 0, w.out)
	src := bytes.NewReader(b)
	r := newFrameConn(&stubConn{r: src}, 64<<10)
	r.version, r.maxUnit = 1, 1<<20
	sums, list := make([]uint64, 0, 8), make([]arrival, 0, 1)
	if n := testing.AllocsPerRun(100, func() {
		src.Reset(b)
		typ, head, err := r.next()
		if err == nil {
			list, sums, err = decodeArrivals(typ, head, r.rest, list[:0], sums[:0])
		}
		if err == nil {
			_, err = r.takeRows(r.rest)
		}
		if err != nil {
			t.Fatal(err)
		}
		r.in = 0
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestUnitTag(t *testing.T) {
	a := unitTag([16]byte{1}, [16]byte{2}, 3)
	if a == unitTag([16]byte{2}, [16]byte{2}, 3) || a == unitTag([16]byte{1}, [16]byte{3}, 3) || a == unitTag([16]byte{1}, [16]byte{2}, 4) {
		t.Error("tags of different tickets are equal")
	}
}
