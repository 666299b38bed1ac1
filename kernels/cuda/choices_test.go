//go:build cuda && cgo && linux

package cuda_test

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cuda"
)

// TestChoices: one process measures which kernels compute the projections, the others take its
// choices and compute the same bits; a file that is damaged, cut or another model's is not taken.
func TestChoices(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "projections")
	a := families()["llama gqa4 128"]
	w := randomWeights(a, 7)
	opt := cuda.Options{MaxTokens: 1300, MaxSeqs: 80, Tune: true, Choices: dir, Blocks: 100, FP16: inFP16()}
	tokens := make([]int32, 1300)
	for i := range tokens {
		tokens[i] = int32(i * 7 % a.Vocab)
	}
	blocks := make([]int32, 82)
	for i := range blocks {
		blocks[i] = int32(i)
	}
	logits := func(b *cuda.Backend) (all [][]float32) {
		for _, n := range []int{1, 20, 60, 130, 700, 1030, 1300} {
			all = append(all, slices.Clone(mustStep(t, b, kernels.Seq{Tokens: tokens[:n], Blocks: blocks, WantLogits: true})[0].Logits))
		}
		return all
	}
	var list [3]*cuda.Backend
	var failed [3]error
	var wg sync.WaitGroup
	for i := range list { // at once: one measures, the others wait for it
		wg.Go(func() { list[i], failed[i] = cuda.New(a, w, opt) })
	}
	wg.Wait()
	measured := 0
	for i, b := range list {
		if failed[i] != nil {
			t.Fatal(failed[i])
		}
		t.Cleanup(func() { b.Close() })
		t.Log(b.Choices())
		if strings.HasPrefix(b.Choices(), "measured, kept in "+dir) {
			measured++
		} else if !strings.HasPrefix(b.Choices(), "from "+dir) {
			t.Errorf("choices %q", b.Choices())
		}
	}
	if measured != 1 {
		t.Errorf("%d measured, want 1", measured)
	}
	want := logits(list[0])
	for _, b := range list[1:] {
		if got := logits(b); !slices.EqualFunc(got, want, sameBits) {
			t.Error("the same choices gave other bits")
		}
	}
	files, err := filepath.Glob(filepath.Join(dir, strings.Repeat("[0-9a-f]", 16)))
	if err != nil || len(files) != 1 {
		t.Fatal(files, err)
	}
	good, err := os.ReadFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	flipped := slices.Clone(good)
	flipped[len(good)/2] ^= 1
	for name, bad := range map[string][]byte{"flipped": flipped, "cut": good[:len(good)-8], "empty": {}, "long": append(slices.Clone(good), good[16:96]...)} {
		if err := os.WriteFile(files[0], bad, 0o600); err != nil {
			t.Fatal(err)
		}
		if b := open(t, a, w, opt); !strings.HasPrefix(b.Choices(), "measured, kept") {
			t.Errorf("%s: choices %q", name, b.Choices())
		}
		if mended, err := os.ReadFile(files[0]); err != nil || bytes.Equal(mended, bad) {
			t.Errorf("%s: the file was not replaced: %v", name, err)
		}
	}
	opt.MaxTokens = 1400 // another shape
	if b := open(t, a, w, opt); !strings.HasPrefix(b.Choices(), "measured, kept") {
		t.Errorf("another shape: choices %q", b.Choices())
	}
}
