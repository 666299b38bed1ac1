package tier

import (
	"path/filepath"
	"testing"

	"github.com/xpyd/xpyd/kernels/kerneltest"
	"github.com/xpyd/xpyd/kvlayout"
)

// Units of any layout come back from host memory and from the SSD, also after a
// restart; a pool of another layout never reads them, though its units be as large.
func TestLayouts(t *testing.T) {
	for name, l := range kerneltest.Layouts(16) {
		t.Run(name, func(t *testing.T) {
			cfg := config(filepath.Join(t.TempDir(), "kv"))
			cfg.HostBytes, cfg.DirBytes = 1<<20, 4<<20
			tokens := prompt(1, 96)
			r := newRigIn(t, cfg, newMemPoolOf(l, 64))
			r.run(tokens, 0)
			r.saved(tierSSD, 6)
			r.cache.Clear()
			r.load(tokens, 96)
			r.run(tokens, 96)
			r.cache.Clear()
			r.host.Clear()
			r.load(tokens, 96)
			r.run(tokens, 96)
			r.close()

			r = newRigIn(t, cfg, newMemPoolOf(l, 64))
			r.load(tokens, 96)
			r.run(tokens, 96)
			if r.value("loaded_units_total", tierSSD) != 6 {
				t.Error("not from the SSD")
			}
			r.close()

			other, err := kvlayout.Decode(l.Encode())
			if err != nil {
				t.Fatal(err)
			}
			other.Groups[0].Window += 64
			r = newRigIn(t, cfg, newMemPoolOf(other, 64))
			r.load(tokens, 0)
		})
	}
}
