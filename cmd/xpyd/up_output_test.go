package main

import (
	"bytes"
	"testing"
)

// TestStartOutput: of each child the last line is held back until all have started; if a start has
// failed, neither that nor what comes later is printed.
func TestStartOutput(t *testing.T) {
	for _, failed := range []bool{false, true} {
		var got bytes.Buffer
		o := &startOutput{w: &got, held: map[string][]byte{}}
		for _, line := range []string{"a 1\n", "b 1\n", "a 2\n"} {
			if n, err := o.Write([]byte(line)); n != len(line) || err != nil {
				t.Fatal(n, err)
			}
		}
		if got.String() != "a 1\n" {
			t.Errorf("before the start has ended: %q", got.String())
		}
		want := 4 * len("a 1\n")
		if failed {
			want = len("a 1\n")
			o.mute()
		} else {
			o.release()
		}
		if n, err := o.Write([]byte("b 2\n")); n != 4 || err != nil {
			t.Fatal(n, err)
		}
		if got.Len() != want {
			t.Errorf("failed %t: %q", failed, got.String())
		}
	}
}
