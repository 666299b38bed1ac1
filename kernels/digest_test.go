package kernels_test

import (
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvlayout"
)

func TestDigestVectors(t *testing.T) {
	raw, err := os.ReadFile("testdata/digest_vectors.json")
	if err != nil {
		t.Fatal(err)
	}
	var v struct {
		Rows []struct {
			Layer, KV, Head, Pos int
			Row, Hash            string
		}
		Slabs []struct {
			KVHeads  int `json:"kv_heads"`
			N        int
			RowBytes int `json:"row_bytes"`
			Layer    int
			FirstPos int `json:"first_pos"`
			Packed   string
			Digest   []string
		}
	}
	if err := json.Unmarshal(raw, &v); err != nil {
		t.Fatal(err)
	}
	for _, r := range v.Rows {
		row, _ := hex.DecodeString(r.Row)
		if got := fmt.Sprintf("%016x", kernels.RowHash(r.Layer, r.KV, r.Head, r.Pos, row)); got != r.Hash {
			t.Errorf("row of %d bytes at (%d,%d,%d,%d): got %s want %s", len(row), r.Layer, r.KV, r.Head, r.Pos, got, r.Hash)
		}
	}
	for i, s := range v.Slabs {
		packed, _ := hex.DecodeString(s.Packed)
		out := make([]uint64, s.KVHeads)
		kernels.DigestRows(layer(s.Layer, s.KVHeads, s.RowBytes), s.FirstPos, s.N, packed, out)
		for h, want := range s.Digest {
			if got := fmt.Sprintf("%016x", out[h]); got != want {
				t.Errorf("slab %d head %d: got %s want %s", i, h, got, want)
			}
		}
	}
}

// layer is a layer of a layout whose K and V rows, planes 0 and 1 of digests, have rowBytes.
func layer(number, heads, rowBytes int) *kvlayout.Layer {
	return &kvlayout.Plain(number+1, heads, rowBytes, 16, kvlayout.U8).Resolve()[number]
}

func randomBytes(r *rand.Rand, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

// A flip of any single bit is always seen, also where a product's factor is
// zero, one or all ones: see DESIGN.md for the proof.
func TestRowHashSingleBitFlips(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	f := func(row []byte) {
		t.Helper()
		want := kernels.RowHash(3, 1, 2, 77, row)
		for bit := range 8 * len(row) {
			row[bit/8] ^= 1 << (bit % 8)
			if kernels.RowHash(3, 1, 2, 77, row) == want {
				t.Fatalf("flip of bit %d of %d bytes not seen", bit, len(row))
			}
			row[bit/8] ^= 1 << (bit % 8)
		}
	}
	for range 50 {
		f(randomBytes(r, 1+r.IntN(300)))
	}
	f(make([]byte, 256))
	// Lanes whose factors are 0, 1 or 2^32-1 for the real keys.
	for _, lo := range []uint32{0, 1, 0xffffffff} {
		for _, hi := range []uint32{0, 1, 0xffffffff} {
			row := make([]byte, 64)
			for i := range 8 {
				k := kernels.DigestKey(i)
				binary.LittleEndian.PutUint64(row[8*i:], uint64(uint32(k)^lo)|uint64(uint32(k>>32)^hi)<<32)
			}
			f(row)
		}
	}
}

func TestDigestDetects(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	const n, rowBytes = 5, 48
	base := randomBytes(r, layer(0, 3, rowBytes).PackedBytes(n))
	sum := func(number, pos int, p []byte) (s uint64) {
		out := make([]uint64, 3)
		kernels.DigestRows(layer(number, 3, rowBytes), pos, n, p, out)
		for _, d := range out {
			s += d
		}
		return s
	}
	want := sum(2, 9, base)
	if sum(3, 9, base) == want || sum(2, 10, base) == want {
		t.Error("a moved block was not seen")
	}
	rows := len(base) / rowBytes
	row := func(p []byte, i int) []byte { return p[i*rowBytes : (i+1)*rowBytes] }
	for i := range rows {
		zeroed := append([]byte(nil), base...)
		clear(row(zeroed, i))
		if sum(2, 9, zeroed) == want {
			t.Errorf("zeroed row %d was not seen", i)
		}
		for j := range i {
			swapped := append([]byte(nil), base...)
			copy(row(swapped, i), row(base, j))
			copy(row(swapped, j), row(base, i))
			if sum(2, 9, swapped) == want {
				t.Errorf("swap of rows %d and %d was not seen", i, j)
			}
		}
	}
	zero := make([]byte, len(base))
	if sum(2, 9, zero) == 0 || sum(2, 9, zero) == sum(2, 10, zero) {
		t.Error("zero rows carry no coordinates")
	}
}

// FuzzDigestAdds checks that a digest is the sum over any split of its rows,
// and that hashing never panics or depends on padding bytes.
func FuzzDigestAdds(f *testing.F) {
	f.Add([]byte("0123456789abcdef0123456789abcdef"), uint16(7), uint8(2), uint8(1))
	f.Add(make([]byte, 200), uint16(65535), uint8(5), uint8(20))
	f.Fuzz(func(t *testing.T, data []byte, pos uint16, cut, rowBytes uint8) {
		rb := int(rowBytes) + 1
		l := layer(4, 1, rb)
		n := len(data) / (2 * rb)
		data = data[:2*n*rb]
		out := make([]uint64, 1)
		kernels.DigestRows(l, int(pos), n, data, out)
		a := 0
		if n > 0 {
			a = int(cut) % (n + 1)
		}
		k, v := data[:n*rb], data[n*rb:]
		sum := kernels.DigestPart(l, 0, 0, int(pos), a, k, nil) +
			kernels.DigestPart(l, 0, 0, int(pos)+a, n-a, k[a*rb:], nil) +
			kernels.DigestPart(l, 1, 0, int(pos), a, v, nil) +
			kernels.DigestPart(l, 1, 0, int(pos)+a, n-a, v[a*rb:], nil)
		if sum != out[0] {
			t.Fatalf("split at %d of %d: %x, whole %x", a, n, sum, out[0])
		}
		pad := append(append([]byte(nil), data...), make([]byte, (16-len(data)%16)%16)...)
		if kernels.RowHash(0, 0, 0, 0, data) != kernels.RowHash(0, 0, 0, 0, pad) {
			t.Fatal("zero padding to 16 bytes changed the hash")
		}
	})
}

// Whatever instructions a machine has, the digest is that of the rows one by
// one: for every row size, also past the key table, any count and alignment.
func TestDigestSIMD(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	buf := randomBytes(r, 40*2304+64)
	check := func(t *testing.T) {
		for _, rb := range []int{1, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512, 520, 1024, 2048, 2112, 2304} {
			for _, n := range []int{1, 2, 7, 8, 9, 16, 17, 39} {
				for _, pos := range []int{0, 1000, 1<<32 - 12} {
					rows := buf[r.IntN(64):][:n*rb]
					var want uint64
					for i := range n {
						want += kernels.RowHash(7, 1, 3, pos+i, rows[i*rb:(i+1)*rb])
					}
					if got := kernels.DigestPart(layer(7, 4, rb), 1, 3, pos, n, rows, nil); got != want {
						t.Fatalf("%d rows of %d bytes at %d: %x, one by one %x", n, rb, pos, got, want)
					}
				}
			}
		}
	}
	kernels.EachSIMD(func(name string) { t.Run(name, check) })
}

func TestDigestKeys(t *testing.T) {
	long := make([]byte, 16*130)
	for i := range 260 {
		if i < 256 && kernels.DigestTable(i) != kernels.DigestKey(i) {
			t.Errorf("table entry %d differs from the formula", i)
		}
	}
	if kernels.RowHash(0, 0, 0, 0, long) == kernels.RowHash(0, 0, 0, 0, long[:2048]) {
		t.Error("lanes past the table are not hashed")
	}
}

func BenchmarkDigestRows(b *testing.B) {
	l := layer(1, 4, 256)
	p := make([]byte, l.BlockBytes())
	out := make([]uint64, 4)
	b.SetBytes(int64(len(p)))
	for b.Loop() {
		kernels.DigestRows(l, 0, 16, p, out)
	}
}

// Rows of FP8 are hashed with their scales behind them, which lie behind all rows.
func TestDigestScaled(t *testing.T) {
	const n, number, first = 5, 7, 1000
	l := &kvlayout.Plain(8, 3, 48, 16, kvlayout.F8E4M3).Resolve()[number]
	if l.PackedBytes(n) != 2*3*n*(48+4) || l.BlockBytes() != l.PackedBytes(16) || layer(0, 1, 48).ScaleBytes() != 0 {
		t.Fatalf("%d bytes of rows, %d a block", l.PackedBytes(n), l.BlockBytes())
	}
	packed := randomBytes(rand.New(rand.NewPCG(3, 3)), l.PackedBytes(n))
	got, want := make([]uint64, 3), make([]uint64, 3)
	kernels.DigestRows(l, first, n, packed, got)
	for kv := range 2 {
		for h := range 3 {
			for i := range n {
				at := (kv*3+h)*n + i
				row := append(append([]byte(nil), packed[at*48:at*48+48]...), packed[2*3*n*48+4*at:][:4]...)
				want[h] += kernels.RowHash(number, kv, h, first+i, row)
			}
		}
	}
	for h := range want {
		if got[h] != want[h] {
			t.Errorf("head %d: %x, want %x", h, got[h], want[h])
		}
	}
	packed[len(packed)-1] ^= 1 // of the last head's last scale
	if kernels.DigestRows(l, first, n, packed, got); got[2] == want[2] || got[1] != want[1] {
		t.Error("a bit of a scale does not show, or shows in another head")
	}
}
