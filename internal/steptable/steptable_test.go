package steptable_test

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/steptable"
)

// device is one whose parts are known: a step of it takes what law says.
type device struct {
	fixed, token, pair, read, sequence, draw float64 // seconds
	tile                                     int
}

var gpu = device{fixed: 6e-3, token: 20e-6, pair: 40e-9, read: 60e-9, sequence: 3e-6, draw: 8e-6, tile: 128}

func (d *device) law(l steptable.Load) float64 {
	tokens, draws := l.Decodes, l.Decodes
	s := d.fixed + d.read*float64(l.Context) + d.sequence*float64(l.Decodes)
	for _, p := range l.Pieces {
		tokens, draws = tokens+p.Tokens, draws+p.Draws
		s += d.pair * float64(p.Tokens) * (float64(p.Position) + float64(p.Tokens)/2)
	}
	return s + d.token*float64((tokens+d.tile-1)/d.tile*d.tile) + d.draw*float64(draws)
}

func piece(n, at int) steptable.Load {
	return steptable.Load{Pieces: []steptable.Piece{{Tokens: n, Position: at}}}
}

func batch(n, context int) steptable.Load { return steptable.Load{Decodes: n, Context: n * context} }

// table measures it; noise may make a time longer or shorter.
func (d *device) table(noise func() float64) *steptable.Table {
	t := &steptable.Table{Version: steptable.Version}
	timed := func(l steptable.Load, less float64) steptable.Time {
		return steptable.Time{Seconds: (d.law(l) - less) * noise(), Spread: d.law(l) / 100, Runs: 5}
	}
	for _, n := range []int{1, 2, 4, 8, 16, 32, 64, 128, 129, 256, 257, 384, 385, 512, 513, 1024} {
		for _, at := range []int{0, 1000, 8000} {
			t.Prefill = append(t.Prefill, steptable.Prefill{Tokens: n, Position: at, Time: timed(piece(n, at), 0)})
		}
	}
	for _, n := range []int{1, 2, 4, 8, 16, 64, 128} {
		for _, c := range []int{16, 64, 1024, 8192} {
			t.Decode = append(t.Decode, steptable.Decode{Batch: n, Context: c, Time: timed(batch(n, c), 0)})
		}
		t.Undrawn = append(t.Undrawn, steptable.Decode{Batch: n, Context: 16, Time: timed(batch(n, 16), d.draw*float64(n))})
	}
	return t
}

func quiet() float64 { return 1 }

func fitted(t *testing.T, table *steptable.Table) *steptable.Table {
	t.Helper()
	if err := table.Fit(); err != nil {
		t.Fatal(err)
	}
	return table
}

func seconds(t *steptable.Table, l steptable.Load) float64 {
	d, _ := t.Step(l)
	return d.Seconds()
}

func near(a, b, part float64) bool { return a-b <= part*b+2e-9 && b-a <= part*b+2e-9 }

// TestMeasured: a step that was measured takes what it took, and has the spread that it had.
func TestMeasured(t *testing.T) {
	table := fitted(t, gpu.table(quiet))
	for _, p := range table.Prefill {
		if got := seconds(table, piece(p.Tokens, p.Position)); !near(got, p.Seconds, 1e-9) {
			t.Errorf("%d tokens at %d: %g, measured %g", p.Tokens, p.Position, got, p.Seconds)
		}
	}
	for _, d := range table.Decode {
		mean, spread := table.Step(batch(d.Batch, d.Context))
		if !near(mean.Seconds(), d.Seconds, 1e-9) || !near(spread.Seconds(), d.Seconds/100, 1e-6) {
			t.Errorf("batch %d at %d: %v ± %v, measured %g ± %g", d.Batch, d.Context, mean, spread, d.Seconds, d.Spread)
		}
	}
}

// TestOthers: random mixed steps take what the device's law says, whose parts add up.
func TestOthers(t *testing.T) {
	table, rng := fitted(t, gpu.table(quiet)), rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		l := steptable.Load{Decodes: rng.IntN(200)}
		for range l.Decodes {
			l.Context += 1 + rng.IntN(9000)
		}
		for range rng.IntN(4) {
			l.Pieces = append(l.Pieces, steptable.Piece{Tokens: 1 + rng.IntN(400), Position: rng.IntN(9000), Draws: rng.IntN(2)})
		}
		if l.Decodes+len(l.Pieces) == 0 {
			l.Decodes, l.Context = 1, 1
		}
		// Between 1 and 128 tokens are several points, where the device has no edge.
		if got, want := seconds(table, l), gpu.law(l); !near(got, want, 0.03) {
			t.Fatalf("%+v: %g, want %g", l, got, want)
		}
	}
}

// TestTile: the step in time past a tile's edge is there, and nothing between the edges.
func TestTile(t *testing.T) {
	table := fitted(t, gpu.table(quiet))
	whole := gpu.token * float64(gpu.tile)
	if edge := seconds(table, piece(257, 0)) - seconds(table, piece(256, 0)); !near(edge, whole, 0.01) {
		t.Errorf("past the edge: %g, want %g", edge, whole)
	}
	if flat := seconds(table, piece(300, 0)) - seconds(table, piece(260, 0)); flat > whole/4 {
		t.Errorf("within a tile: %g", flat)
	}
}

// TestRises: however noisy the measurement, no step gets faster by a longer context, by a later
// position, by one more draw, or by one more piece.
func TestRises(t *testing.T) {
	for seed := range uint64(50) {
		rng := rand.New(rand.NewPCG(seed, 0))
		table := fitted(t, gpu.table(func() float64 { return 0.7 + 0.6*rng.Float64() }))
		rises := func(what string, load func(int) steptable.Load) {
			t.Helper()
			last := 0.0
			for x := 1; x < 12000; x += 1 + x/16 {
				s := seconds(table, load(x))
				if s < last-2e-9 {
					t.Fatalf("seed %d: %s %d: %g after %g", seed, what, x, s, last)
				}
				last = s
			}
		}
		b, n := 1+rng.IntN(150), 1+rng.IntN(1500)
		rises("context", func(x int) steptable.Load { return batch(b, x) })
		rises("position", func(x int) steptable.Load { return piece(n, x) })
		rises("draws", func(x int) steptable.Load {
			return steptable.Load{Pieces: []steptable.Piece{{Tokens: n, Draws: x}}}
		})
		rises("other pieces", func(x int) steptable.Load {
			l := batch(b, 100)
			l.Pieces = append(slices.Repeat([]steptable.Piece{{Tokens: 1}}, x), steptable.Piece{Tokens: n, Position: 50})
			return l
		})
	}
}

// TestEdges: nothing takes no time; what is far beyond the measured goes on as it did.
func TestEdges(t *testing.T) {
	table := fitted(t, gpu.table(quiet))
	if mean, spread := table.Step(steptable.Load{}); mean != 0 || spread != 0 {
		t.Errorf("an empty step: %v ± %v", mean, spread)
	}
	for _, l := range []steptable.Load{batch(500, 8000), batch(4, 100_000), piece(8192, 0), piece(512, 100_000)} {
		if got, want := seconds(table, l), gpu.law(l); !near(got, want, 0.1) {
			t.Errorf("%+v: %g, want about %g", l, got, want)
		}
	}
	kv := steptable.KV{BytesPerToken: 1000, Bandwidth: 1e9, Latency: 0.001}
	if got := kv.Transfer(5000); got != 6*time.Millisecond {
		t.Errorf("a transfer takes %v", got)
	}
}

// TestPoorTable: without draws, without later positions and with one batch a table still works.
func TestPoorTable(t *testing.T) {
	one := steptable.Time{Seconds: 0.01, Runs: 1}
	table := fitted(t, &steptable.Table{Version: 1, Prefill: []steptable.Prefill{{Tokens: 16, Time: one}}, Decode: []steptable.Decode{{Batch: 1, Context: 16, Time: one}}})
	for _, l := range []steptable.Load{batch(1, 16), batch(7, 999), piece(1, 0), piece(999, 999)} {
		if got := seconds(table, l); !near(got, 0.01, 1e-9) {
			t.Errorf("%+v: %g", l, got)
		}
	}
}

// TestFile: a table that is written and read gives the same times; a wrong one is refused with what
// is wrong.
func TestFile(t *testing.T) {
	var file bytes.Buffer
	table := fitted(t, gpu.table(quiet))
	table.About.Device = "a GPU"
	if err := table.Write(&file); err != nil {
		t.Fatal(err)
	}
	good := file.String()
	back, err := steptable.Read(&file)
	if err != nil {
		t.Fatal(err)
	}
	l := steptable.Load{Decodes: 37, Context: 51234, Pieces: []steptable.Piece{{Tokens: 77, Position: 300, Draws: 1}}}
	if seconds(back, l) != seconds(table, l) || back.About != table.About {
		t.Error("it came back otherwise")
	}
	f := func(want string, change func(*steptable.Table)) {
		t.Helper()
		bad := gpu.table(quiet)
		change(bad)
		var b bytes.Buffer
		if err := bad.Write(&b); err != nil {
			t.Fatal(err)
		}
		if _, err := steptable.Read(&b); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	f("version 2; this program reads 1", func(t *steptable.Table) { t.Version = 2 })
	f("both prefill and decode", func(t *steptable.Table) { t.Decode = nil })
	f("more than 16384 steps", func(t *steptable.Table) { t.Prefill = make([]steptable.Prefill, 1<<14) })
	f("has a control character", func(t *steptable.Table) { t.About.Model = "m\x1b[2J" })
	f("a text of 5000 bytes", func(t *steptable.Table) { t.About.Command = strings.Repeat("x", 5000) })
	f("-1 is not in 0..", func(t *steptable.Table) { t.About.Blocks = -1 })
	f("-2 is not a number of at least 0", func(t *steptable.Table) { t.KV.Bandwidth = -2 })
	f("a latency of 1e+09 s", func(t *steptable.Table) { t.KV.Latency = 1e9 })
	f("prefill of 0 tokens at position 0: a count is out of range", func(t *steptable.Table) { t.Prefill[0].Tokens = 0 })
	f("prefill of 1 tokens at position 0: twice", func(t *steptable.Table) { t.Prefill[1].Position = 0 })
	f("there is none of as many at position 0", func(t *steptable.Table) { t.Prefill = t.Prefill[1:] })
	f("decode of 1 at context 0: a count is out of range", func(t *steptable.Table) { t.Decode[0].Context = 0 })
	f("decode of 1 at context 16: twice", func(t *steptable.Table) { t.Decode[1].Context = 16 })
	f("0 seconds: want 1e-09 to 3600", func(t *steptable.Table) { t.Decode[3].Seconds = 0 })
	f("1e-15 seconds: want 1e-09", func(t *steptable.Table) { t.Prefill[1].Seconds = 1e-15 })
	f("a spread of -1 seconds", func(t *steptable.Table) { t.Undrawn[0].Spread = -1 })
	f("undrawn decode of 1: twice", func(t *steptable.Table) { t.Undrawn[1].Batch = 1 })
	f("0 runs", func(t *steptable.Table) { t.Undrawn[1].Runs = 0 })
	for text, want := range map[string]string{
		"":                                       "not a step table",
		"[1]":                                    "not a step table",
		strings.Replace(good, "1", `"1"`, 1):     "not a step table",
		strings.Repeat(" ", 17<<20):              "more than 16 MiB",
		strings.Replace(good, `0.0`, `1e999`, 1): "1e999",
	} {
		if _, err := steptable.Read(strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.20q: %v, want %q", text, err, want)
		}
	}
	if _, err := steptable.Open("nowhere.json"); err == nil || !strings.Contains(err.Error(), "nowhere.json") {
		t.Error(err)
	}
}

// FuzzRead: what Read takes, it takes again from Write, and every step of it has a time.
func FuzzRead(f *testing.F) {
	one := steptable.Time{Seconds: 0.01, Runs: 1}
	small := &steptable.Table{Version: 1, Prefill: []steptable.Prefill{{Tokens: 16, Time: one}, {Tokens: 16, Position: 9, Time: one}},
		Decode: []steptable.Decode{{Batch: 1, Context: 16, Time: one}, {Batch: 3, Context: 16, Time: one}}, Undrawn: []steptable.Decode{{Batch: 1, Context: 9, Time: one}}}
	var b bytes.Buffer
	if err := small.Write(&b); err != nil {
		f.Fatal(err)
	}
	f.Add(b.Bytes())
	f.Add([]byte(`{"version":1}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		table, err := steptable.Read(bytes.NewReader(raw))
		if err != nil {
			return
		}
		l := steptable.Load{Decodes: 1 << 20, Context: 1 << 40, Pieces: []steptable.Piece{{Tokens: 1 << 30, Position: 1 << 30, Draws: 1 << 20}, {Tokens: 1}}}
		for _, l := range []steptable.Load{l, batch(1, 1), piece(3, 5)} {
			if mean, spread := table.Step(l); mean < 0 || spread < 0 {
				t.Errorf("%+v: %v ± %v", l, mean, spread)
			}
		}
		var b bytes.Buffer
		if err := table.Write(&b); err != nil {
			t.Fatal(err)
		}
		if _, err := steptable.Read(&b); err != nil {
			t.Error(err)
		}
	})
}

// TestStepAllocates: it is called once a step of a simulated day.
func TestStepAllocates(t *testing.T) {
	table, l := fitted(t, gpu.table(quiet)), busy()
	if n := testing.AllocsPerRun(100, func() { table.Step(l) }); n > 0 {
		t.Errorf("%v allocations", n)
	}
}

func busy() steptable.Load {
	return steptable.Load{Decodes: 100, Context: 123456, Pieces: []steptable.Piece{{Tokens: 300, Position: 700}, {Tokens: 90, Position: 12, Draws: 1}, {Tokens: 20, Draws: 1}}}
}

func BenchmarkStep(b *testing.B) {
	table, l := gpu.table(quiet), busy()
	if err := table.Fit(); err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		table.Step(l)
	}
}
