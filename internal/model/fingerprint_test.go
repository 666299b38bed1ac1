package model_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/model"
	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/internal/model/modeltest"
	"github.com/xpyd/xpyd/kernels"
)

// The embedded model's fingerprint is part of what peers compare: it changes
// only with a new fingerprintMagic.
func TestFingerprintIsStable(t *testing.T) {
	const want = "b11084bb12b24b59a5880849cf3b6389c111cf89c17147059668107ec3b7ea96"
	if m := open(t, ""); m.Fingerprint != want {
		t.Errorf("fingerprint %s, want %s", m.Fingerprint, want)
	}
}

// So are those of every family, from either kind of file.
func TestFingerprintsOfFamilies(t *testing.T) {
	want := map[string][2]string{ // in BF16 of seed 1, and as Q8_0 of seed 2
		"llama":   {"750313cba66ecacb469a4c0e1040eb814c0cdb6dfbe2017fa1ebdb4f00999e28", "4886a5835abecd795720448e136a37968c98d8b3c0a94867cc4ec36dc442287f"},
		"mistral": {"82ec08f24f905acb6810bd522dac6a083e1f9da8aa293f72822747eb650657ae", ""},
		"qwen2":   {"ef599730cea95092d91e223ac77f53dfff6de755d652474b135b4dcabfdd134f", "18dad7affa82d36fb8598410036a27389651ded4a770224cf1e8ee52582046b4"},
		"qwen3":   {"d4d9f2dcb5243883f644aca3f159daa04d2217d73a5d2a74fec640061cd353ad", "60d2915cef0c6cde4bf01b4470331973827e8b29eedf305ec0b87e05e109cefd"},
	}
	want["mixtral"] = [2]string{"274c947da61ceb981520896907f16cd41787063259039b65238a43669af8bf17"}
	want["qwen3_moe"] = [2]string{"f7212b728dc1069b011b982b1211ab2adb1e7fa169252c0b443f1a06a7643cb6", "d7d15f4c60caa95c4d1cf34dbcc77582516e24a1df541d3dc886e20559af17d0"}
	want["gemma3_text"] = [2]string{"eead5e0a6bbe46229008c905ea1ef7e305fafc444e3203cff69c7ba1de9d9b0f", "47caafd35ea88f973696f5f79a1eefd601c592ea54e8a341e42869a8fa357c87"}
	want["deepseek_v2"] = [2]string{"4eea03b340bfc05c06df0557af0273d544ed47ad9d6dc1a9b164c83f71ef751e"}
	want["deepseek_v3"] = [2]string{"e06e11498c64bfe5cd84fe19b0a62bfd7ceb3f6b57a4994b27d404a4a1026356"}
	for _, family := range arch.Families() {
		c := modeltest.Tiny(family.Name)
		if got := open(t, writeHF(t, c, modeltest.HFOptions{Seed: 1, DType: kernels.BF16})).Fingerprint; got != want[family.Name][0] {
			t.Errorf("%s: fingerprint %s", family.Name, got)
		}
		if family.GGUF == "" {
			continue
		}
		path := filepath.Join(t.TempDir(), "m.gguf")
		if err := modeltest.WriteGGUF(path, c, modeltest.GGUFOptions{Seed: 2, Type: "Q8_0"}); err != nil {
			t.Fatal(err)
		}
		if got := open(t, path).Fingerprint; got != want[family.Name][1] {
			t.Errorf("%s.gguf: fingerprint %s", family.Name, got)
		}
	}
}

func TestFingerprintTellsModelsApart(t *testing.T) {
	c := modeltest.Tiny("llama")
	other := c
	other.RopeTheta = 20000
	seen := map[string]string{}
	f := func(name, dir string) {
		fp := open(t, dir).Fingerprint
		if twin, ok := seen[fp]; ok {
			t.Errorf("%s has the fingerprint of %s", name, twin)
		}
		seen[fp] = name
	}
	f("first", writeHF(t, c, modeltest.HFOptions{Seed: 1}))
	f("other weights", writeHF(t, c, modeltest.HFOptions{Seed: 2}))
	f("other dtype", writeHF(t, c, modeltest.HFOptions{Seed: 1, DType: kernels.BF16}))
	f("other configuration", writeHF(t, other, modeltest.HFOptions{Seed: 1}))
	again := open(t, writeHF(t, c, modeltest.HFOptions{Seed: 1, Shards: 4})).Fingerprint
	if seen[again] != "first" {
		t.Error("shards change the fingerprint")
	}
}

func TestFingerprintCache(t *testing.T) {
	dir, cache := writeHF(t, modeltest.Tiny("llama"), modeltest.HFOptions{}), t.TempDir()
	weights := filepath.Join(dir, "model.safetensors")
	age := func(d time.Duration) {
		t.Helper()
		when := time.Now().Add(-d)
		if err := os.Chtimes(weights, when, when); err != nil {
			t.Fatal(err)
		}
	}
	// load opens the model and reports whether its weights were read.
	load := func() (fp string, read bool) {
		t.Helper()
		m, err := model.Open(t.Context(), dir, model.Options{CacheDir: cache, Progress: func(p model.Progress) {
			if p.Phase != "fingerprint" || p.Done > p.Total {
				t.Errorf("progress %+v", p)
			}
			read = true
		}})
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		return m.Fingerprint, read
	}
	f := func(name, want string, wantRead bool) string {
		t.Helper()
		fp, read := load()
		if read != wantRead || (want != "" && fp != want) {
			t.Errorf("%s: weights read %v, fingerprint %s", name, read, fp)
		}
		return fp
	}
	age(0)
	fp := f("first", "", true)
	f("fresh files are not remembered", fp, true)
	age(time.Hour)
	f("old files", fp, true)
	f("remembered", fp, false)
	age(2 * time.Hour)
	f("other time", fp, true)
	f("remembered again", fp, false)
	files, err := filepath.Glob(filepath.Join(cache, "fingerprints", "*"))
	if err != nil || len(files) != 1 {
		t.Fatalf("cache files %v, %v", files, err)
	}
	for _, bad := range []string{"", "{", `{"state":"x","fingerprint":"y"}`, "\x00\x01"} {
		if err := os.WriteFile(files[0], []byte(bad), 0o644); err != nil {
			t.Fatal(err)
		}
		f("corrupt cache", fp, true)
	}
	b, err := os.ReadFile(weights)
	if err != nil {
		t.Fatal(err)
	}
	b[len(b)-1] ^= 1
	if err := os.WriteFile(weights, b, 0o644); err != nil {
		t.Fatal(err)
	}
	if changed, read := load(); !read || changed == fp {
		t.Error("changed weights are not noticed")
	}
	// A cache that cannot be written is no reason to fail.
	age(time.Hour)
	cache = filepath.Join(weights, "no-directory")
	f("no cache", "", true)
}
