package tier

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"
)

// TestPinRestart: pins go on after a restart, for as long as they had left:
// their units stay on the SSD whatever is written there, and in host memory once
// they are loaded.
func TestPinRestart(t *testing.T) {
	cfg := config(filepath.Join(t.TempDir(), "kv"))
	cfg.PinShare, cfg.DirBytes = 0.25, 16*page // 4 units
	r := newRig(t, cfg)
	pinned, short, gone := prompt(1, 32), prompt(300, 16), prompt(600, 16)
	r.run(pinned, 0)
	r.quiet()
	for _, p := range []struct {
		tokens []int32
		ttl    time.Duration
	}{{pinned, time.Hour}, {short, time.Millisecond}, {gone, time.Hour}} {
		if _, err := r.tiers.Pin(p.tokens, "", p.ttl); err != nil {
			t.Fatal(err)
		}
	}
	if !r.tiers.Unpin(r.tiers.PinID(gone, "")) {
		t.Fatal("not pinned")
	}
	before := r.tiers.Pins()
	storm := func(n int) {
		t.Helper()
		for i := range 40 {
			r.cache.Clear()
			r.run(prompt(n+256*i, 64), 0)
			r.quiet()
		}
		r.cache.Clear()
	}
	storm(5000)
	for n := range 3 {
		r.close()
		r = newRig(t, cfg)
		list := r.tiers.Pins()
		if len(list) != 1 || list[0].ID != before[len(before)-1].ID || !list[0].Until.Equal(before[len(before)-1].Until) || list[0].Tokens != 32 || list[0].SSD != 2 {
			t.Fatalf("restart %d: %+v, were %+v", n, list, before)
		}
		storm(20000 * (n + 1))
		if s := r.tiers.Stats()[1]; s.Evicted < 50 {
			t.Errorf("%+v: the log has not gone round", s)
		}
	}
	r.load(pinned, 32)
	storm(90000)
	r.load(pinned, 32)
	if list := r.tiers.Pins(); list[0].Host != 2 {
		t.Errorf("%+v: not kept in host memory", list)
	}
	if !r.tiers.Unpin(before[len(before)-1].ID) {
		t.Error("cannot be ended")
	}
	r.close()
	r = newRig(t, cfg)
	if list := r.tiers.Pins(); len(list) != 0 {
		t.Errorf("ended, and back: %+v", list)
	}
}

// TestPinFile: a file that is torn, another model's or nonsense is no reason
// not to start; with a smaller share there are fewer pins.
func TestPinFile(t *testing.T) {
	cfg := config(filepath.Join(t.TempDir(), "kv"))
	cfg.PinShare = 0.5
	r := newRig(t, cfg)
	for i := range 4 {
		if _, err := r.tiers.Pin(prompt(1000*i, 32), "", time.Hour); err != nil {
			t.Fatal(err)
		}
	}
	r.close()
	path := filepath.Join(cfg.Dir, "pins")
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		file  []byte
		share float64
		want  int
	}{
		"whole":             {good, 0.5, 4},
		"smaller share":     {good, 0.25, 2},
		"none":              {good, 0, 0},
		"torn":              {good[:len(good)/2], 0.5, 0},
		"empty":             {nil, 0.5, 0},
		"another model's":   {bytes.Replace(good, []byte(identity), []byte("another"), 1), 0.5, 0},
		"of another format": {bytes.Replace(good, []byte("pins 1"), []byte("pins 9"), 1), 0.5, 0},
		"half a name":       {bytes.Replace(good, []byte(`"units":"`), []byte(`"units":"AAAA`), 1), 0.5, 0},
	} {
		t.Run(name, func(t *testing.T) {
			cfg.PinShare = c.share
			if err := os.WriteFile(path, c.file, 0o600); err != nil {
				t.Fatal(err)
			}
			r := newRig(t, cfg)
			defer r.close()
			if list := r.tiers.Pins(); len(list) != c.want {
				t.Errorf("%d pins, want %d", len(list), c.want)
			}
		})
	}
}

func FuzzPins(f *testing.F) {
	want := savedPins{Format: pinsFormat, Identity: identity, Tokens: 16}
	f.Add([]byte(`{"format":"xpyd KV pins 1","identity":"model and numerics","unit_tokens":16,"pins":[{"units":"AAAAAAAAAAAAAAAAAAAAAA==","until":"2026-11-22T03:00:00Z"}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		list, err := parsePins(b, want)
		for _, p := range list {
			if err != nil || len(p.keys) == 0 || p.tokens != 16*len(p.keys) {
				t.Fatalf("%+v %v", p, err)
			}
		}
	})
}

// TestPinFileAgain: pins that could not be written are written once that works again,
// without another change.
func TestPinFileAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := config(t.TempDir())
		cfg.DirIO, cfg.PinShare = IOPread, 0.5 // see TestTTL
		r := newRig(t, cfg)
		defer r.close()
		path := filepath.Join(cfg.Dir, "pins")
		if err := os.Mkdir(path+".new", 0o700); err != nil { // no file can be made there
			t.Fatal(err)
		}
		if _, err := r.tiers.Pin(prompt(1, 96), "", time.Hour); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * probeFirst)
		if err := os.Remove(path + ".new"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(probeLast)
		synctest.Wait()
		b, err := r.disk.ReadPins()
		if err != nil {
			t.Fatal(err)
		}
		if list, err := parsePins(b, r.tiers.noPins()); err != nil || len(list) != 1 {
			t.Errorf("%d pins in the file: %v", len(list), err)
		}
	})
}
