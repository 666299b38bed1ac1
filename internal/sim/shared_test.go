package sim

import (
	"testing"
	"time"
)

// TestOneDevice: steps of two workers on one device take turns, so that each takes twice as long
// while both are under way, and no longer than alone before and after.
func TestOneDevice(t *testing.T) {
	cfg := like(Split{Prefill: 1, Decode: 1})
	cfg.OneDevice = true
	load := Load{Requests: []Request{
		{Prompt: Prompt{tokens: 16, nth: 1}, Output: 200},
		{At: 500 * time.Millisecond, Prompt: Prompt{tokens: 400, nth: 2}, Output: 2}, // 13 ms
	}}
	shared := play(t, cfg, load)
	cfg.OneDevice = false
	apart := play(t, cfg, load)
	if got, want := apart[0].Longest, perStep; got > want+time.Millisecond {
		t.Errorf("on its own device a gap of %v, want %v", got, want)
	}
	if got, want := shared[0].Longest, 2*perStep; got < want || got > want+time.Millisecond {
		t.Errorf("on a shared one the longest gap is %v, want %v", got, want)
	}
	prompt := perStep + 400*perToken
	if got, want := shared[1].TTFT()-apart[1].TTFT(), prompt; got < want-perStep || got > want+perStep {
		t.Errorf("a prompt that takes %v alone takes %v longer beside a stream, want as much", prompt, got)
	}
	// What the stream lost is what the prompt took, and the other's steps.
	lost := (shared[0].Last - shared[0].First) - (apart[0].Last - apart[0].First)
	if lost < prompt-perStep || lost > prompt+2*perStep {
		t.Errorf("the stream lost %v beside a prompt of %v", lost, prompt)
	}
}

// TestOneDeviceWhole: the device is one also for whole workers: two of them do together what one does.
func TestOneDeviceWhole(t *testing.T) {
	cfg := like(Split{Whole: 2})
	cfg.OneDevice = true
	load := Load{Requests: every(0, 2, 16, 100)}
	out := play(t, cfg, load)
	if got, want := out[0].Gap(), 2*perStep; got < want*95/100 || got > want*105/100 {
		t.Errorf("a gap of %v, want %v", got, want)
	}
}
