package main

import (
	"bytes"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/internal/model"
)

// TestProgress: a line a second at most, with speed and time left of each kind of work by itself.
func TestProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		show := progress(&out)
		const mib = 1 << 20
		for _, x := range []struct {
			after time.Duration
			phase string
			done  int64
		}{
			{0, "download", 10}, {500, "download", 20}, {500, "download", 40}, {900, "download", 60}, {1100, "download", 300},
			{100, "load", 0}, {1000, "load", 0}, {1000, "load", 299}, {1000, "load", 300},
		} {
			time.Sleep(x.after * time.Millisecond)
			show(model.Progress{Phase: x.phase, What: "m", Done: x.done * mib, Total: 300 * mib})
		}
		want := "download m: 40 of 300 MiB (13%), 30 MiB/s, 9s left\n" +
			"download m: 300 of 300 MiB (100%)\n" +
			"load m: 0 of 300 MiB (0%)\n" +
			"load m: 299 of 300 MiB (99%), 150 MiB/s, 1s left\n" +
			"load m: 300 of 300 MiB (100%)\n"
		if out.String() != want {
			t.Errorf("have\n%swant\n%s", &out, want)
		}
	})
}
