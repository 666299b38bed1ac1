package main

import (
	"reflect"
	"testing"
)

// TestDrawnLoads: a load repeats, comes about as fast as asked for, and has what its kind says.
func TestDrawnLoads(t *testing.T) {
	for nth := range drawnLoads {
		d := drawnLoad(nth)
		load := d.requests(20)
		if again := d.requests(20); !reflect.DeepEqual(load, again) {
			t.Fatalf("%v: another load the second time", d)
		}
		want := 20 * d.turns * drawnWindow.Seconds()
		if got := float64(len(load)); got < 0.5*want || got > 1.3*want { // talks end at the window's end and at long prompts
			t.Errorf("%v: %v requests, expected about %v", d, got, want)
		}
		for i := range load {
			if load[i].Output < 1 || load[i].Prompt.Tokens() > drawnMost {
				t.Fatalf("%v: request %d of %d and %d tokens", d, i, load[i].Prompt.Tokens(), load[i].Output)
			}
		}
	}
}
