package fleet

import (
	"testing"
	"time"
)

// TestTickTells: whoever waits for a change hears of one that a tick makes, also
// when loads have changed since the last one.
func TestTickTells(t *testing.T) {
	w, err := Watch(WatcherConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if err := w.AddStatic(*worker("a", 1), Static); err != nil {
		t.Fatal(err)
	}
	changed := w.Changed()
	w.change(func(now time.Time) {
		w.reg.end(w.reg.members["a"], Suspect, causeSilence, "", now)
		w.reg.stale = true
		w.tick(now)
	})
	select {
	case <-changed:
	default:
		t.Error("nobody was told")
	}
}
