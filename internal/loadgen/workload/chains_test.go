package workload_test

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/loadgen/client"
	"github.com/xpyd/xpyd/internal/loadgen/workload"
)

// TestChains: a request waits for the answer of the one it continues; else the trace's order holds.
func TestChains(t *testing.T) {
	entries := []workload.Entry{
		{In: 1000, Out: 5, Blocks: []uint64{1, 2}},       // 0: one whole block
		{In: 512, Out: 5, Blocks: []uint64{7}},           // 1
		{In: 1500, Out: 5, Blocks: []uint64{1, 3, 4}},    // 2: continues 0, whose second block is not whole
		{In: 2048, Out: 5, Blocks: []uint64{1, 3, 5, 6}}, // 3: continues 2
		{In: 2048, Out: 5, Blocks: []uint64{1, 9, 5, 6}}, // 4: continues 0
		{In: 100, Out: 5, Blocks: []uint64{8}},           // 5: nobody can continue it
		{In: 600, Out: 5, Blocks: []uint64{8, 9}},        // 6
		{In: 100, Out: 5}, // 7
	}
	c := workload.NewChains(workload.NewTrace(workload.NewText(3), entries, 1, workload.BlockTokens))
	take := func(in, turn int) *workload.Item {
		t.Helper()
		it, ok := c.Next(t.Context())
		if !ok || it.In != in || it.Turn != turn || len(words(it)) != in {
			t.Fatalf("%t %+v, want %d tokens, turn %d", ok, it, in, turn)
		}
		return it
	}
	zero, one := take(1000, 1), take(512, 1)
	five := take(100, 1)
	c.Done(zero, &client.Result{})
	two, four := take(1500, 2), take(2048, 2)
	c.Done(two, &client.Result{})
	three := take(2048, 3)
	take(600, 1)
	take(100, 1)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, ok := c.Next(ctx); ok {
		t.Error("a request for nobody")
	}
	for _, it := range []*workload.Item{one, three, four, five} {
		c.Done(it, &client.Result{})
	}
	common := func(a, b *workload.Item) int {
		x, y := words(a), words(b)
		n := 0
		for n < min(len(x), len(y)) && x[n] == y[n] {
			n++
		}
		return n
	}
	if n := common(two, three); n < 1024 || n > 1030 {
		t.Errorf("a turn and its next one have %d tokens in common, want 1024", n)
	}
}

// TestScale: smaller blocks shorten a trace's lengths and share as much.
func TestScale(t *testing.T) {
	entries := readTrace(t, "testdata/mooncake.jsonl")
	before := slices.Clone(entries)
	entries = workload.Scale(entries, 16)
	trace := workload.NewTrace(workload.NewText(3), entries, 1, 16)
	for i, e := range entries {
		if got, want := float64(e.In), float64(before[i].In)/32; got < want || got > want+1 || (e.In+15)/16 != len(e.Blocks) {
			t.Errorf("%d tokens of %d in %d blocks", e.In, before[i].In, len(e.Blocks))
		}
		it := next(t, trace)
		if n := len(words(it)); n != e.In || it.Out < 1 || it.Out > before[i].Out/32+1 {
			t.Errorf("%d words of %d, %d tokens out", n, e.In, it.Out)
		}
	}
	for _, line := range []string{`{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[1]}`, `{"timestamp":0,"input_length":513,"output_length":1,"hash_ids":[1,2]}`} {
		e, err := workload.ReadTrace(strings.NewReader(line))
		if err != nil {
			t.Fatal(err)
		}
		if e = workload.Scale(e, 1); e[0].In != len(e[0].Blocks) {
			t.Errorf("%+v", e[0])
		}
	}
}
