//go:build cuda && cgo && linux

package cuda_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cuda"
)

// choicesDir names the folder of the choices to a process of TestChoices.
const choicesDir = "XPYD_TEST_CHOICES"

// TestChoices: one process measures which kernels compute the projections, the others take its
// choices and compute the same bits; a file that is damaged, cut or another model's is not taken.
func TestChoices(t *testing.T) {
	a := families()["llama gqa4 128"]
	w := randomWeights(a, 7)
	opt := cuda.Options{MaxTokens: 1300, MaxSeqs: 80, Tune: true, Choices: os.Getenv(choicesDir), Blocks: 100, FP16: inFP16()}
	if opt.Choices != "" {
		b := open(t, a, w, opt)
		fmt.Printf("%s\n%x\n", b.Choices(), logitsDigest(t, b, a.Vocab))
		return
	}
	dir := filepath.Join(t.TempDir(), "projections")
	opt.Choices = dir
	var out [3]bytes.Buffer
	var failed [3]error
	var wg sync.WaitGroup
	for i := range out { // at once: one measures, the others wait for it
		wg.Go(func() {
			c := exec.CommandContext(soon(t), os.Args[0], "-test.run", "^TestChoices$")
			c.Env, c.Stdout, c.Stderr = append(os.Environ(), choicesDir+"="+dir), &out[i], os.Stderr
			failed[i] = c.Run()
		})
	}
	wg.Wait()
	measured, first := 0, ""
	for i := range out {
		if failed[i] != nil {
			t.Fatal(failed[i], out[i].String())
		}
		choices, rest, _ := strings.Cut(out[i].String(), "\n")
		digest, _, _ := strings.Cut(rest, "\n")
		t.Log(choices)
		if strings.HasPrefix(choices, "measured, kept in "+dir) {
			measured++
		} else if !strings.HasPrefix(choices, "from "+dir) {
			t.Errorf("choices %q", choices)
		}
		if first == "" {
			first = digest
		}
		if len(digest) != 2*sha256.Size || digest != first {
			t.Errorf("the same choices gave other bits: %q, %q", digest, first)
		}
	}
	if measured != 1 {
		t.Errorf("%d measured, want 1", measured)
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

// logitsDigest hashes the logits behind prompts of lengths for which other kernels are chosen.
func logitsDigest(t *testing.T, b *cuda.Backend, vocab int) []byte {
	tokens := make([]int32, 1300)
	for i := range tokens {
		tokens[i] = int32(i * 7 % vocab)
	}
	blocks := make([]int32, 82)
	for i := range blocks {
		blocks[i] = int32(i)
	}
	h := sha256.New()
	for _, n := range []int{1, 20, 60, 130, 700, 1030, 1300} {
		logits := mustStep(t, b, kernels.Seq{Tokens: tokens[:n], Blocks: blocks, WantLogits: true})[0].Logits
		if err := binary.Write(h, binary.LittleEndian, logits); err != nil {
			t.Fatal(err)
		}
	}
	return h.Sum(nil)
}
