package responses_test

import "testing"

// BenchmarkAppend is one event with a piece of text, in answers of a thousand.
func BenchmarkAppend(b *testing.B) {
	run, out := []byte(delta(`"content":" word"`)), make([]byte, 0, 4<<10)
	a, n := answerTo(b, `{"input":"a"}`, options()), 0
	b.ReportAllocs()
	for b.Loop() {
		if n++; n%1000 == 0 {
			a = answerTo(b, `{"input":"a"}`, options())
		}
		out = a.Append(out[:0], run)
	}
}
