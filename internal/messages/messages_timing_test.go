package messages_test

import "testing"

// BenchmarkAppend is one event with a piece of text.
func BenchmarkAppend(b *testing.B) {
	a, run, out := answerTo(b, ``), []byte(delta(`"content":" word"`)), make([]byte, 0, 4<<10)
	a.Append(nil, []byte(first+delta(`"content":"a"`)))
	b.ReportAllocs()
	for b.Loop() {
		out = a.Append(out[:0], run)
	}
}

// TestAllocations: an event with a piece of text costs none.
func TestAllocations(t *testing.T) {
	a, run, out := answerTo(t, ``), []byte(delta(`"content":" word"`)), make([]byte, 0, 4<<10)
	a.Append(nil, []byte(first+delta(`"content":"a"`)))
	if n := testing.AllocsPerRun(100, func() { out = a.Append(out[:0], run) }); n > 0 {
		t.Errorf("%v allocations", n)
	}
}
