package tier

import (
	"path/filepath"
	"testing"
)

// TestTenantsSSD: a tenant that has its share of the SSD makes room from its own units,
// also after a restart; the log does not move for it.
func TestTenantsSSD(t *testing.T) {
	cfg := config(filepath.Join(t.TempDir(), "kv"))
	cfg.TenantShare, cfg.DirBytes = 0.25, 32*page // 8 of 32 units
	var r *rig
	compute := func(n int, salt string) {
		t.Helper()
		if _, err := r.compute(prompt(n, 32), salt, "run"); err != nil {
			t.Fatal(err)
		}
		r.quiet()
		if err := r.disk.Check(nil); err != nil {
			t.Fatal(err)
		}
	}
	loaded := func(n int, salt string) int {
		t.Helper()
		r.cache.Clear()
		r.host.Clear()
		return r.tiers.Load(t.Context(), prompt(n, 32), salt, 32)
	}
	for round := range 2 {
		r = newRig(t, cfg)
		for i := range 3 {
			compute(256*i, "modest")
		}
		for i := range 40 {
			compute(256*(100+50*round+i), "greedy")
		}
		if s := r.tiers.Stats()[1]; s.Units != 14 {
			t.Errorf("%+v, want 6 units and 8", s)
		}
		for i := range 3 {
			if n := loaded(256*i, "modest"); n != 32 {
				t.Errorf("round %d: the modest one lost its prompt %d", round, i)
			}
		}
		for i := 36; i < 40; i++ {
			if n := loaded(256*(100+50*round+i), "greedy"); n != 32 {
				t.Errorf("round %d: the greedy one's prompt %d is not there", round, i)
			}
		}
		if n := r.value("tenants", tierSSD); n != 2 {
			t.Errorf("%v tenants", n)
		}
		if files, _ := filepath.Glob(filepath.Join(cfg.Dir, "*.xpydkv")); len(files) > 2 {
			t.Errorf("%d segments for 14 units", len(files))
		}
		r.close()
	}
}

// TestTornOver: a crash in the middle of overwriting a record leaves neither
// the old unit nor the new one, whichever half was written.
func TestTornOver(t *testing.T) {
	for name, keep := range map[string]func(old, now []byte) []byte{
		"only the header":     func(old, now []byte) []byte { return append(now[:headerSize:headerSize], old[headerSize:]...) },
		"all but the header":  func(old, now []byte) []byte { return append(old[:headerSize:headerSize], now[headerSize:]...) },
		"the beginning":       func(old, now []byte) []byte { return append(now[:500:500], old[500:]...) },
		"nothing but its end": func(old, now []byte) []byte { return append(old[:500:500], now[500:]...) },
	} {
		t.Run(name, func(t *testing.T) {
			cfg := config(filepath.Join(t.TempDir(), "kv"))
			cfg.TenantShare, cfg.DirBytes = 0.2, 16*page // 3 of 16
			r := newRig(t, cfg)
			old, now := prompt(0, 48), prompt(256, 48)
			chain := r.cache.NewChain("")
			chain.Extend(now)
			r.run(old, 0)
			r.saved(tierSSD, 3)
			before := map[place][]byte{}
			for _, p := range r.places() {
				before[p] = r.peek(p)
			}
			r.run(now, 0)
			r.saved(tierSSD, 3)
			p := r.places()[chain.Name(16)]
			r.edit(p, 0, keep(before[p], r.peek(p)))
			r.close()
			r = newRig(t, cfg)
			got := 0
			for _, tokens := range [][]int32{old, now} {
				n := r.tiers.Load(t.Context(), tokens, "", 48)
				r.run(tokens, n) // right rows
				got += n
			}
			if got > 32 { // a torn unit of the old prompt's middle may leave its beginning
				t.Errorf("%d tokens loaded", got)
			}
			r.quiet()
			if err := r.disk.Check(nil); err != nil {
				t.Error(err)
			}
		})
	}
}
